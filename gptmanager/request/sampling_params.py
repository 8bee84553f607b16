"""`SamplingParams`: how a request's tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gptmanager.request.input_rows import HostRows


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters by which a request's tokens are chosen. Lengths are in tokens.

    `top_k` 0 means that all tokens are candidates. `seed` and a token's absolute position determine
    the random numbers. Each of `end_ids` ends the output; the end ids are banned until `min_length`
    tokens have been generated. `embedding_bias` holds rows of TOKEN_BIAS `[n]`: a token id, and the
    bias that is added to the logit of this token. `bad_words` are token sequences that are never
    completed. With `no_repeat_ngram_size` 0, n-grams may repeat.
    """

    greedy: bool = True
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    min_length: int = 0
    end_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    embedding_bias: HostRows | None = None

    def without_numbers(self) -> SamplingParams:
        """Return the parameters as a recording keeps them, with only a digest of the bias."""
        bias = self.embedding_bias
        return self if bias is None else replace(self, embedding_bias=bias.without_numbers())

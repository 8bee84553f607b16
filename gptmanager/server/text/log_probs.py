"""Format log probabilities of tokens for completions and for chats.

The request's penalties, bans and temperature affect log probabilities of output tokens; top-k,
top-p and min-p do not. Log probabilities of prompt tokens are from the model's own distribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer

from gptmanager.callbacks.processors.token_bytes import token_bytes
from gptmanager.errors import ConfigError

_LOWEST = -9999.0


class TokenLogProb(NamedTuple):
    """A token and its log probability, which is None for the first token of a prompt.

    `top` has the most probable tokens at this position and their log probabilities, best first.
    `start` is the index, in the answer, of the first character of the token's text.
    """

    token: int
    log_prob: float | None
    top: Sequence[tuple[int, float]] = ()
    start: int = 0


def output_log_probs(
    tokens: Sequence[int], tensors: Mapping[str, torch.Tensor], beam: int
) -> list[TokenLogProb]:
    """Return the log probabilities of a beam's new tokens, or [] if `tensors` has none.

    `tokens` and `tensors` are of the same `GenerationPart`.
    """
    if "output_log_probs" not in tensors:
        return []
    chosen = _numbers(tensors["output_log_probs"][0, beam])
    tops = _tops(tensors, "top_log_prob_ids", "top_log_probs", beam, len(tokens))
    return [
        TokenLogProb(token, log_prob, top)
        for token, log_prob, top in zip(tokens, chosen, tops, strict=False)
    ]


def prompt_log_probs(
    prompt: Sequence[int], tensors: Mapping[str, torch.Tensor]
) -> list[TokenLogProb]:
    """Return the log probabilities of a prompt's tokens; the first token's is None."""
    chosen = _numbers(tensors["prompt_log_probs"][0])
    tops = _tops(tensors, "prompt_top_log_prob_ids", "prompt_top_log_probs", None, len(prompt) - 1)
    return [
        TokenLogProb(prompt[0], None),
        *(TokenLogProb(*one) for one in zip(prompt[1:], chosen, tops, strict=False)),
    ]


def _tops(
    tensors: Mapping[str, torch.Tensor], ids: str, values: str, beam: int | None, count: int
) -> Sequence[Sequence[tuple[int, float]]]:
    if ids not in tensors:
        return [()] * count
    found = [tensors[name][0] if beam is None else tensors[name][0, beam] for name in (ids, values)]
    return [
        [*zip(row, column, strict=True)]
        for row, column in zip(found[0].tolist(), _numbers(found[1]), strict=True)
    ]


def _numbers(tensor: torch.Tensor) -> Any:
    """Return the values as lists. Replace -inf by -9999, like vLLM: JSON has no infinity."""
    return tensor.clamp(min=_LOWEST).tolist()


class TokenTexts:
    """The texts of single tokens. Without a tokenizer, each token is written as `token_id:N`."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    def as_ids(self) -> TokenTexts:
        """Return a variant that writes every token as `token_id:N`."""
        return TokenTexts(None)

    @cached_property
    def _bytes(self) -> list[bytes]:
        if self._tokenizer is None:
            return []
        try:
            return token_bytes(self._tokenizer)
        except ConfigError:  # unsupported decoder: `bytes_of` uses the tokens' names instead
            return []

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token.

        For a special token, or a token with unknown bytes, return the bytes of the token's name.
        """
        if self._tokenizer is None:
            return f"token_id:{token}".encode()
        known = self._bytes[token] if token < len(self._bytes) else b""
        return known or (self._tokenizer.id_to_token(token) or "").encode()

    def text_of(self, token: int) -> str:
        """Return the text of a token; invalid UTF-8 is replaced by U+FFFD."""
        return self.bytes_of(token).decode(errors="replace")

    def placed(self, listed: Sequence[TokenLogProb], text: str) -> list[TokenLogProb]:
        """Return a prompt's log probabilities with `start` set to each token's index in `text`.

        A special token that the tokenizer has added covers no characters.
        """
        data, at, num_characters = text.encode(errors="replace"), 0, 0
        found = []
        for one in listed:
            found.append(one._replace(start=num_characters))
            own = self.bytes_of(one.token)
            if not data.startswith(own, at):
                # SentencePiece writes a space before the first word
                own = own[1:] if own[:1] == b" " and data.startswith(own[1:], at) else b""
            passed = data[at : at + len(own)]
            num_characters += sum(byte & 0xC0 != 0x80 for byte in passed)
            at += len(passed)
        return found

    def name_of(self, token: int) -> str:
        """Return a token's text, or its bytes in hexadecimal digits if they are not valid UTF-8."""
        own = self.bytes_of(token)
        try:
            return own.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in own)


def completion_shape(
    listed: Sequence[TokenLogProb], num_top: int, texts: TokenTexts
) -> dict[str, Any]:
    """Return the object `logprobs` of a completion: lists of `tokens`, `token_logprobs`,
    `top_logprobs` and `text_offset`.

    The top log probabilities at a position always include the position's own token. If that token
    is not among the `num_top` best tokens, it is added to them.
    """
    names = [texts.name_of(one.token) for one in listed]
    return {
        "tokens": names,
        "token_logprobs": [one.log_prob for one in listed],
        "top_logprobs": [
            None
            if one.log_prob is None
            else {
                **{texts.name_of(token): value for token, value in one.top[:num_top]},
                name: one.log_prob,
            }
            for name, one in zip(names, listed, strict=True)
        ],
        "text_offset": [one.start for one in listed],
    }


def chat_shape(listed: Sequence[TokenLogProb], num_top: int, texts: TokenTexts) -> dict[str, Any]:
    """Return the object `logprobs` of a chat: `content` has one object per token."""

    def shape(token: int, log_prob: float | None) -> dict[str, Any]:
        own = texts.bytes_of(token)
        return {"token": texts.text_of(token), "logprob": log_prob, "bytes": list(own)}

    return {
        "content": [
            {
                **shape(one.token, one.log_prob),
                "top_logprobs": [shape(*top) for top in one.top[:num_top]],
            }
            for one in listed
        ],
        "refusal": None,
    }


def prompt_shape(
    listed: Sequence[TokenLogProb], num_top: int, texts: TokenTexts
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's form: an object per token, but None for the first token.

    Each object maps ids of the `num_top` best tokens, and of the token itself, to objects with a
    log probability, a rank and a text.
    """
    return [
        None
        if one.log_prob is None
        else {
            str(token): {"logprob": value, "rank": rank, "decoded_token": texts.text_of(token)}
            for token, value, rank in _ranked(one, num_top)
        }
        for one in listed
    ]


def _ranked(one: TokenLogProb, num_top: int) -> list[tuple[int, float, int | None]]:
    assert one.log_prob is not None
    top: list[tuple[int, float, int | None]] = [
        (token, value, rank) for rank, (token, value) in enumerate(one.top[:num_top], start=1)
    ]
    known = {token for token, _, _ in top}
    # the rank of a token outside the top is not known
    return top if one.token in known else [*top, (one.token, one.log_prob, None)]

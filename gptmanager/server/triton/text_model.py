"""The models `ensemble` and `tensorrt_llm_bls`: text in, text out.

As in TensorRT-LLM's model repository for Triton, both models tokenize the text, call the model
`tensorrt_llm` and detokenize its output.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gptmanager.callbacks import GenerationPart
from gptmanager.callbacks.processors.banned_texts import MAX_WORD_LETTERS
from gptmanager.callbacks.text.text_encoder import TextTooLongError
from gptmanager.errors import CapacityError
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.http.body import run_in_thread
from gptmanager.server.settings import ServerSettings
from gptmanager.server.text.outputs import Ends, Output
from gptmanager.server.triton.errors import invalid
from gptmanager.server.triton.tensors import InputReader, Sizes, input_table, prompt_too_long, table
from gptmanager.server.triton.token_model import (
    LOG_PROBS_AND_LOGITS,
    Tensors,
    TokenModel,
    TokenReply,
)

INPUTS = input_table(
    ("text_input", "BYTES", (1,), False),
    ("max_tokens", "INT32", (1,), False),
    ("decoder_text_input", "BYTES"),
    ("bad_words", "BYTES", (-1,), True, False, ("bad_words",)),
    ("stop_words", "BYTES", (-1,), True, False, ("stop_words",)),
    ("end_id pad_id top_k", "INT32"),
    ("top_p temperature length_penalty", "FP32"),
    ("repetition_penalty presence_penalty frequency_penalty", "FP32"),
    ("min_length", "INT32"),
    ("random_seed", "UINT64"),
    ("return_log_probs return_context_logits return_generation_logits", "BOOL"),
    ("beam_width num_return_sequences", "INT32"),
    ("stream exclude_input_in_output", "BOOL"),
    ("prompt_embedding_table", "FP16", (-1, -1), True, True, ("prompt", "hidden")),
    ("prompt_vocab_size", "INT32"),
    ("prompt_table_extra_id", "UINT64"),
    ("embedding_bias_words", "BYTES", (-1,), True, False, ("bias_words",)),
    ("embedding_bias_weights", "FP32", (-1,), True, False, ("bias_words",)),
    ("lora_task_id", "UINT64"),
    ("lora_weights", "FP16", (-1, -1), True, True, ("adapter_rows", "adapter_width")),
    ("lora_config", "INT32", (-1, 3), True, False, ("adapter_rows",)),
)
BLS_INPUTS = {**INPUTS, **input_table(("num_draft_tokens", "INT32"), ("use_draft_logits", "BOOL"))}
OUTPUTS = {**table(("text_output", "BYTES", (-1,))), **LOG_PROBS_AND_LOGITS}
_RENAMED = {
    "max_tokens": "request_output_len",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
}
_BYTES_PER_LETTER = 4  # the maximum in UTF-8
_NOT_PASSED_ON = frozenset(
    ("text_input", "decoder_text_input", "bad_words", "stop_words", "stream")
    + ("prompt_table_extra_id", "embedding_bias_words", "embedding_bias_weights")
    + ("exclude_input_in_output", "num_draft_tokens", "use_draft_logits")
)
_MAX_STOP_LETTERS = 1 << 16  # characters of one stop word


class TextModel:
    """The model that clients know as `name`, with texts as inputs and outputs.

    It tokenizes the text and calls the model `tokens` with the token ids.
    """

    outputs = OUTPUTS
    needs_outputs = ()

    def __init__(
        self, name: str, engine: Engine, settings: ServerSettings, tokens: TokenModel, sizes: Sizes
    ) -> None:
        self.name = name
        self.backend = "python" if name == "tensorrt_llm_bls" else "ensemble"
        self.inputs = BLS_INPUTS if name == "tensorrt_llm_bls" else INPUTS
        self.reader = InputReader(name, self.inputs, sizes)
        self._engine = engine
        self._tokens = tokens
        self._excludes_input = settings.manager.params.exclude_input_in_output
        assert engine.card.tokenizer is not None and engine.banned_texts is not None
        self._tokenizer = engine.card.tokenizer
        self._banned_texts = engine.banned_texts

    async def replies(self, row: Mapping[str, Any]) -> list[TextReply]:
        """Return a reply for each requested sequence. Raises ApiError if `row` is invalid."""
        _check(row)
        _, width = self._tokens.check_outputs(row)
        virtual, streams = self._virtual_tokens(row), row.get("stream", False)
        stops = _words("stop_words", row, _MAX_STOP_LETTERS)
        banned = _words("bad_words", row, MAX_WORD_LETTERS)
        if stops and width > 1:
            raise invalid(
                "stop_words",
                f"stop_words are not supported with beam_width = {width}: pass beam_width = 1",
            )
        text = _text("text_input", row["text_input"][0])
        prompt = [*virtual, *await self._encode(text)]
        if not prompt:
            raise invalid("text_input", "text_input has no tokens: at least 1 is needed")
        tokens_row = {_RENAMED.get(key, key): row[key] for key in row.keys() - _NOT_PASSED_ON}
        tokens_row.update(
            input_ids=np.array(prompt, dtype=np.int32),
            input_lengths=len(prompt),
            streaming=streams or bool(stops),  # stop words are matched token by token
            exclude_input_in_output=True,
        )
        tokens_row.setdefault("end_id", None)  # None: the end ids of the checkpoint
        if "prompt_table_extra_id" in row:
            tokens_row["prompt_table_extra_ids"] = np.array([row["prompt_table_extra_id"]])
        if "embedding_bias_words" in row:
            tokens_row["embedding_bias"] = await run_in_thread(functools.partial(self._bias, row))
        before = "" if streams or row.get("exclude_input_in_output", self._excludes_input) else text
        replies = []
        for reply in await self._tokens.replies(tokens_row, output_len="max_tokens"):
            if banned:
                reply.request.by_name["logits_post_processor"] = self._ban(banned)
            ends = Ends(stops=stops)
            beams = range(reply.num_beams)
            outputs = [Output(self._tokenizer, prompt, ends, offset=0) for _ in beams]
            replies.append(TextReply(reply, outputs, before, streams))
        return replies

    def _virtual_tokens(self, row: Mapping[str, Any]) -> range:
        """Return the virtual token ids, one per row of the prompt table. They precede the text."""
        if "prompt_embedding_table" not in row:
            return range(0)
        first, most = self._engine.card.vocab_size, len(row["prompt_embedding_table"])
        size = row.get("prompt_vocab_size", most)  # the manager refuses sizes outside 1..most
        return range(first, first + min(size, most))

    async def _encode(self, text: str) -> list[int]:
        try:
            return await self._engine.encode("text_input", text)
        except ApiError as error:
            if not isinstance(error.__cause__, TextTooLongError):
                raise
            raise prompt_too_long(
                f"at least {error.__cause__.num_tokens}", self._engine.card.max_model_len - 1
            ) from error

    def _ban(self, words: Sequence[str]) -> Any:
        try:
            return self._banned_texts.bind(words)
        except CapacityError as error:
            raise ApiError(503, f"bad_words: {error}", param="bad_words") from None
        except ValueError as error:
            text = str(error).removeprefix("words: ")
            raise invalid("bad_words", f"bad_words: {text}") from None

    def _bias(self, row: Mapping[str, Any]) -> np.ndarray:
        """Return the bias of each token of the vocabulary, float32 `[vocab_size]`.

        A word at the start of a text may have other tokens than the same word after a space. The
        word's weight is added to the bias of all these tokens. A token that is in both
        tokenizations gets the weight only once.
        """
        words = _words("embedding_bias_words", row, MAX_WORD_LETTERS, keeps_empty=True)
        weights = row.get("embedding_bias_weights", ())
        if len(words) != len(weights):
            raise invalid(
                "embedding_bias_weights",
                f"embedding_bias_words has {len(words)} words, but embedding_bias_weights has "
                f"{len(weights)} weights: pass one weight for each word",
            )
        bias = np.zeros(self._engine.card.vocab_size, dtype=np.float32)
        texts = [text for word in words for text in (word, " " + word)]
        found = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        for at_start, after_space, weight in zip(found[::2], found[1::2], weights, strict=True):
            ids = {*at_start.ids, *after_space.ids}
            bias[[token for token in ids if token < len(bias)]] += weight
        return bias


class TextReply:
    """Converts the responses of `reply` into text.

    Text that may still become a stop word is held back until a later response.
    """

    def __init__(self, reply: TokenReply, outputs: list[Output], before: str, streams: bool):
        self.request = reply.request
        self.index = reply.index
        self._reply = reply
        self._outputs = outputs  # one for each beam
        self._texts = [before] * len(outputs)  # for each beam, the text that is not yet sent
        self.streams = streams
        self._pending: list[Tensors] = []

    @property
    def is_complete(self) -> bool:
        """Whether the text of the first beam has ended."""
        return self._outputs[0].finish_reason is not None

    def take(self, part: GenerationPart) -> list[Tensors]:
        """Return the responses for a part, with text in place of token ids; see `TokenReply`."""
        responses = self._reply.take(part)
        found = []
        for index, tensors in enumerate(responses):
            is_last = part.result is not None and index == len(responses) - 1
            ids, lengths = tensors.pop("output_ids")[0], tensors.pop("sequence_length")[0]
            if not self.is_complete or not self._pending:  # tokens after the end are dropped
                self._pending.append(tensors)
            for beam, output in enumerate(self._outputs[: len(ids)]):
                output.push(ids[beam, : lengths[beam]].tolist())
                if is_last:
                    assert part.result is not None
                    output.finish(part.result.finish_reasons[beam])
                self._texts[beam] += output.take().text
            if is_last or (self.streams and self._texts[0] and not self.is_complete):
                found.append(self._response())
        return found

    def _response(self) -> Tensors:
        tensors = dict(self._pending[-1])
        for name in self._reply.requested.per_token:
            tensors[name] = np.concatenate([one[name] for one in self._pending], axis=2)
        tensors["context_logits"] = self._pending[0]["context_logits"]
        texts = np.empty((1, len(self._texts)), dtype=object)
        texts[0] = [text.encode() for text in self._texts]
        self._pending, self._texts = [], [""] * len(self._texts)
        return {"text_output": texts, **tensors}


def _check(row: Mapping[str, Any]) -> None:
    if "decoder_text_input" in row:
        raise invalid(
            "decoder_text_input", "decoder_text_input is not supported: the model has no encoder"
        )
    for name in ("num_draft_tokens", "use_draft_logits"):
        if row.get(name):
            raise invalid(
                name,
                f"{name} = {row[name]} is not supported, because the server has no draft model",
            )


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start}"
        raise invalid(name, f"{name} must be text in UTF-8: {reason}") from None


def _words(
    name: str, row: Mapping[str, Any], most_letters: int, *, keeps_empty: bool = False
) -> tuple[str, ...]:
    """Return the strings of the input `name`. `InputReader` has already limited their number.

    Clients without words to pass send an empty string, so empty strings are dropped unless
    `keeps_empty`. Raises ApiError for a string of more than `most_letters` characters.
    """
    found = []
    for index, raw in enumerate(row.get(name, ())):
        where = f"{name}[{index}]"
        word = "" if len(raw) > _BYTES_PER_LETTER * most_letters else _text(where, raw)
        if len(word) > most_letters or (raw and not word):
            given = f"{len(word)} characters" if word else f"{len(raw)} bytes"
            raise invalid(
                name, f"{where} has {given}, at most {most_letters} characters are allowed"
            )
        if word or keeps_empty:
            found.append(word)
    return tuple(found)

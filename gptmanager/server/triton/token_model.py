"""The model `tensorrt_llm`: token ids in, token ids out, with the tensors of the C++ backend.

The model converts the inputs of a call into engine requests, and the outputs of these requests into
tensors.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gptmanager.callbacks import GenerationPart, GenerationResult
from gptmanager.lifecycle.log import RareWarnings
from gptmanager.server.engine.call import EngineRequest, check_in_time
from gptmanager.server.engine.engine import Engine
from gptmanager.server.settings import ServerSettings
from gptmanager.server.text.sampling import mixed_seed
from gptmanager.server.triton.errors import invalid
from gptmanager.server.triton.tensors import InputReader, Sizes, input_table, prompt_too_long, table

_logger = logging.getLogger(__name__)

Tensors = dict[str, np.ndarray]
_PROMPT = (True, False, ("prompt",))
INPUTS = input_table(
    ("input_ids", "INT32", (-1,), False, False, ("prompt",)),
    ("input_lengths", "INT32", (1,), False),
    ("request_output_len", "INT32", (1,), False),
    ("decoder_input_ids", "INT32", (-1,), *_PROMPT),
    ("decoder_input_lengths end_id pad_id", "INT32"),
    ("stop_words_list bad_words_list", "INT32", (2, -1), True, False, ("word_ids",)),
    ("embedding_bias", "FP32", (-1,), True, False, ("vocabulary",)),
    ("beam_width num_return_sequences", "INT32"),
    ("temperature repetition_penalty presence_penalty frequency_penalty", "FP32"),
    ("runtime_top_k", "INT32"),
    ("runtime_top_p runtime_top_p_min runtime_top_p_decay", "FP32"),
    ("runtime_top_p_reset_ids", "INT32"),
    ("len_penalty beam_search_diversity_rate", "FP32"),
    ("early_stopping", "BOOL"),
    ("min_length", "INT32"),
    ("random_seed", "UINT64"),
    ("return_log_probs return_context_logits return_generation_logits", "BOOL"),
    ("stop streaming", "BOOL"),
    ("prompt_embedding_table", "FP16", (-1, -1), True, True, ("prompt", "hidden")),
    ("prompt_vocab_size", "INT32"),
    ("prompt_table_extra_ids", "UINT64", (-1,), *_PROMPT),
    ("draft_input_ids", "INT32", (-1,), *_PROMPT),
    ("draft_logits", "FP32", (-1, -1), True, False, ("prompt", "vocabulary")),
    ("draft_acceptance_threshold", "FP32"),
    ("lora_task_id", "UINT64"),
    ("lora_weights", "FP16", (-1, -1), True, True, ("adapter_rows", "adapter_width")),
    ("lora_config", "INT32", (-1, 3), True, False, ("adapter_rows",)),
    ("exclude_input_in_output", "BOOL"),
    ("context_phase_params", "UINT8", (-1,), *_PROMPT),
)
LOG_PROBS_AND_LOGITS = table(
    ("cum_log_probs", "FP32", (-1,)),
    ("output_log_probs", "FP32", (-1, -1)),
    ("context_logits", "FP32", (-1, -1)),
    ("generation_logits", "FP32", (-1, -1, -1)),
    ("batch_index sequence_index", "INT32"),
)
OUTPUTS = {
    **table(("output_ids", "INT32", (-1, -1)), ("sequence_length", "INT32", (-1,))),
    **LOG_PROBS_AND_LOGITS,
}
MAX_SEQUENCES = 128
PAD = -1  # fills the shorter beams of a response
_ONE = np.array([[1]], dtype=np.int32)
_SAME_NAMES = (
    *("end_id", "pad_id", "stop_words_list", "bad_words_list", "embedding_bias", "beam_width"),
    *("temperature", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("runtime_top_k", "runtime_top_p", "len_penalty", "min_length", "random_seed"),
    *("return_log_probs", "return_context_logits", "return_generation_logits"),
    *("prompt_embedding_table", "prompt_vocab_size", "draft_input_ids", "draft_logits"),
    *("lora_task_id", "lora_weights", "lora_config"),
)
# limit for a row of a call: the bytes of the logits of all its prompts and outputs together
MAX_LOGITS_BYTES = 256 << 20
# inputs that this engine does not support -> the values that are accepted nevertheless
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "decoder_input_ids": (),
    "decoder_input_lengths": (),
    "runtime_top_p_decay": (1.0,),
    "beam_search_diversity_rate": (0.0,),
    "draft_acceptance_threshold": (),
    "context_phase_params": (),
}


class TokenModel:
    """The model `tensorrt_llm`. `replies` converts a row of a call; see `inference.Reply`."""

    name = "tensorrt_llm"
    backend = "tensorrtllm"
    inputs = INPUTS
    outputs = OUTPUTS
    needs_outputs = ("output_ids", "sequence_length")

    def __init__(self, engine: Engine, settings: ServerSettings, sizes: Sizes) -> None:
        self.reader = InputReader(self.name, self.inputs, sizes)
        self._card = engine.card
        self._params = settings.manager.params
        self._log = RareWarnings(_logger)

    async def replies(
        self, row: Mapping[str, Any], *, output_len: str = "request_output_len"
    ) -> list[TokenReply]:
        """Return a reply for each sequence that the row asks for, or one reply for all beams.

        `output_len`: the client's name for the input `request_output_len`, for errors. Raises
        ApiError for a wrong row.
        """
        count, width = self.check_outputs(row)
        is_streaming = row.get("streaming", False)
        if is_streaming and width > 1:
            raise invalid(
                "beam_width",
                f"beam_width = {width} must be 1 with streaming: beams cannot be streamed",
            )
        by_name = self._by_name(row)
        prompt = self._prompt(row)
        most = self._max_new_tokens(row, len(prompt), output_len)
        if width > 1:  # one request returns several of its beams
            by_name["num_return_sequences"], count = count, 1
            if "num_return_sequences" not in row:
                by_name["num_return_sequences"] = width
        num_requests = 1 if width > 1 else count
        self._check_logits(row, len(prompt) * num_requests, most * num_requests * width)
        gathers = self._params.gather_context_logits, self._params.gather_generation_logits
        found = []
        for index in range(count):
            if index and "random_seed" in row:
                by_name = {**by_name, "random_seed": mixed_seed(row["random_seed"], 0, index)}
            request = EngineRequest(prompt, most, is_streaming=is_streaming, **by_name)
            requested = RequestedOutputs(
                row.get("return_log_probs", False),
                row.get("return_context_logits", False) or gathers[0],
                row.get("return_generation_logits", False) or gathers[1],
                row.get("exclude_input_in_output", self._params.exclude_input_in_output),
            )
            found.append(TokenReply(request, requested, index))
        return found

    def check_outputs(self, row: Mapping[str, Any]) -> tuple[int, int]:
        """Return the number of sequences that a row asks for, and its beam width.

        Raises ApiError if one of these numbers is outside its limits. Call this method before
        anything is allocated for each sequence or beam.
        """
        count, width = row.get("num_return_sequences", 1), row.get("beam_width", 1)
        most = self._card.max_beam_width
        if not 1 <= width <= most:
            raise invalid("beam_width", f"beam_width = {width} is outside 1..{most}")
        limit, source = (MAX_SEQUENCES, "") if width == 1 else (width, ", the beam_width")
        if not 1 <= count <= limit:
            raise invalid(
                "num_return_sequences",
                f"num_return_sequences = {count} is outside 1..{limit}{source}",
            )
        return count, width

    def _check_logits(self, row: Mapping[str, Any], num_prompt: int, num_new: int) -> None:
        """Raise ApiError for a row that asks for too many bytes of logits.

        `num_prompt` and `num_new` are the numbers of tokens of all prompts and of all outputs.
        """
        of_context = row.get("return_context_logits", False) or self._params.gather_context_logits
        of_output = (
            row.get("return_generation_logits", False) or self._params.gather_generation_logits
        )
        num_rows = num_prompt * bool(of_context) + num_new * bool(of_output)
        size = 4 * num_rows * self._card.vocab_size
        if size > MAX_LOGITS_BYTES:
            name = "return_context_logits" if of_context else "return_generation_logits"
            raise invalid(
                name,
                f"{name}: the logits of {num_rows} tokens with a vocabulary of "
                f"{self._card.vocab_size} have {size} bytes, at most {MAX_LOGITS_BYTES} are "
                "allowed",
            )

    def _prompt(self, row: Mapping[str, Any]) -> list[int]:
        ids, length = row["input_ids"], row["input_lengths"]
        if not 1 <= length <= len(ids):
            raise invalid(
                "input_lengths",
                f"input_lengths = {length} is outside 1..{len(ids)}, the length of input_ids",
            )
        prompt: list[int] = ids[:length].tolist()
        return prompt

    def _max_new_tokens(self, row: Mapping[str, Any], length: int, name: str) -> int:
        """Return how many tokens to generate.

        As in the C++ backend, the requested number is lowered if fewer tokens fit after the prompt
        and the draft tokens.
        """
        most: int = row["request_output_len"]
        limit = self._card.max_model_len
        if most < 1:
            raise invalid(name, f"{name} = {most} must be at least 1")
        if length >= limit:
            raise prompt_too_long(length, limit - 1)
        room = max(limit - length - len(row.get("draft_input_ids", ())), 1)
        if most > room:
            self._log.warning(
                "%s = %d lowered to %d: prompt of %d tokens, max_seq_len = %d",
                *(name, most, room, length, limit),
            )
        return min(most, room)

    def _by_name(self, row: Mapping[str, Any]) -> dict[str, Any]:
        for name, idle in _UNSUPPORTED.items():
            if name in row and not any(row[name] == value for value in idle):
                allowed = f" except with the value {idle[0]:g}" if idle else ""
                raise invalid(name, f"{name} is not supported{allowed}")
        by_name = {name: row[name] for name in _SAME_NAMES if name in row}
        by_name["include_stop_in_output"] = False
        by_name.setdefault("end_id", -1)  # no end token; without -1, the checkpoint's end ids apply
        if "early_stopping" in row:
            by_name["early_stopping"] = int(row["early_stopping"])
        if "prompt_table_extra_ids" in row:  # requests with different ids must not share blocks
            ids = np.ascontiguousarray(row["prompt_table_extra_ids"], dtype=np.uint64)
            by_name["cache_salt"] = f"table {hashlib.blake2b(ids.tobytes()).hexdigest()}"
        return by_name


class RequestedOutputs(NamedTuple):
    """The outputs that a row asks for in addition to its new tokens.

    `excludes_input`: whether the token ids of a response begin after the prompt. A streamed
    response never has the prompt.
    """

    log_probs: bool
    context_logits: bool
    generation_logits: bool
    excludes_input: bool

    @property
    def per_token(self) -> list[str]:
        """Names of the requested tensors that have new tokens as their third dimension."""
        names = {"output_log_probs": self.log_probs, "generation_logits": self.generation_logits}
        return [name for name, is_requested in names.items() if is_requested]


class TokenReply:
    """Converts the parts of one engine request into responses: a single one, or one per token."""

    is_complete = False  # the engine itself detects every end

    def __init__(self, request: EngineRequest, requested: RequestedOutputs, index: int) -> None:
        self.request = request
        self.index = index  # index of the sequence within the row
        self.streams: bool = request.by_name["is_streaming"]
        self.requested = requested
        self._cum_log_prob = 0.0
        self._context_logits = np.zeros((1, 1, 1), dtype=np.float32)
        self._not_requested = {
            "cum_log_probs": np.zeros((1, 1), dtype=np.float32),
            # a view of a single 0, so that a long prompt needs no memory
            "output_log_probs": np.broadcast_to(np.float32(0), (1, 1, len(request.tokens))),
            "context_logits": self._context_logits,
            "generation_logits": np.zeros((1, 1, 1, 1), dtype=np.float32),
            "sequence_index": np.array([[index]], dtype=np.int32),
        }

    @property
    def num_beams(self) -> int:
        """The number of sequences that the engine request returns: more than 1 only with beams."""
        found: int = self.request.by_name.get("num_return_sequences", 1)
        return found

    def take(self, part: GenerationPart) -> list[Tensors]:
        """Return the tensors of each response that this part completes.

        The last part completes at least one response. Raises ApiError (504) if the request has
        timed out.
        """
        if part.result is not None:
            check_in_time(part.result)
        if self.requested.context_logits and "context_logits" in part.tensors:
            self._context_logits = part.tensors["context_logits"].numpy()
        if not self.streams:
            return [] if part.result is None else [self._whole(part, part.result)]
        found = [self._token(part, index) for index in range(len(part.tokens))]
        if part.result is not None and not found:
            found.append(self._tensors([()], part, 0, 0))
        return found

    def _whole(self, part: GenerationPart, result: GenerationResult) -> Tensors:
        beams = result.generated_ids or ((),)
        tensors = self._tensors(beams, part, 0, max(map(len, beams)))
        if self.requested.log_probs and "cum_log_probs" in part.tensors:
            tensors["cum_log_probs"] = part.tensors["cum_log_probs"].numpy()
        if not self.requested.excludes_input:
            prompt = np.array([self.request.tokens], dtype=np.int32)
            ids = tensors["output_ids"]
            before = np.broadcast_to(prompt, (1, len(beams), prompt.shape[1]))
            tensors["output_ids"] = np.concatenate([before, ids], axis=2)
            tensors["sequence_length"] = tensors["sequence_length"] + np.int32(prompt.shape[1])
        return tensors

    def _token(self, part: GenerationPart, index: int) -> Tensors:
        if self.requested.log_probs:
            self._cum_log_prob += float(part.tensors["output_log_probs"][0, 0, index])
        return self._tensors([part.tokens[index : index + 1]], part, index, index + 1)

    def _tensors(
        self, beams: Sequence[Sequence[int]], part: GenerationPart, begin: int, end: int
    ) -> Tensors:
        """Return the tensors of a response with the part's tokens from `begin` up to `end`.

        Outputs that are not requested are zeros.
        """
        lengths = [len(tokens) for tokens in beams]
        most = max(lengths)
        ids = [[*tokens, *[PAD] * (most - len(tokens))] for tokens in beams]
        found = {
            "output_ids": np.array([ids], dtype=np.int32),
            "sequence_length": _ONE if lengths == [1] else np.array([lengths], dtype=np.int32),
            **self._not_requested,
        }
        if self.requested.log_probs:
            found["cum_log_probs"] = np.full((1, 1), self._cum_log_prob, dtype=np.float32)
            nothing: tuple[int, ...] = (1, len(beams), 0)
            found["output_log_probs"] = _piece(part, "output_log_probs", begin, end, nothing)
        if self.requested.generation_logits:
            nothing = (1, len(beams), 0, 1)
            found["generation_logits"] = _piece(part, "generation_logits", begin, end, nothing)
        if self.requested.context_logits:  # only in the first response
            found["context_logits"] = self._context_logits
            self._context_logits = self._context_logits[:, :0]
        return found


def _piece(
    part: GenerationPart, name: str, begin: int, end: int, nothing: tuple[int, ...]
) -> np.ndarray:
    """Return a part's tensor for the tokens from `begin` up to `end`.

    The result is zeros of the shape `nothing` if the part does not have the tensor.
    """
    if name not in part.tensors:
        return np.zeros(nothing, dtype=np.float32)
    found: np.ndarray = part.tensors[name][:, :, begin:end].numpy()
    return found

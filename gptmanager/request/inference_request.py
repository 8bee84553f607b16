"""The values that hosts and managers exchange, and the signatures of the callbacks.

Setting a tensor checks nothing. A request is checked as a whole after GetInferenceRequests has
returned it, and errors are sent through SendResponse. Where the host constructs the request, only
an unknown property or keyword or an invalid id raises an exception.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, Protocol, SupportsIndex, TypeVar, Union

import numpy as np
import torch

from gptmanager.arguments import as_integer
from gptmanager.errors import quoted

TensorLike = Union[torch.Tensor, np.ndarray]
_Request = TypeVar("_Request", bound="InferenceRequest")


class NamedTensor(NamedTuple):
    """One named tensor of a response, on the CPU. The host may keep it: it is never overwritten."""

    name: str
    tensor: torch.Tensor


class Stream(Protocol):
    """The stream that the logits are computed on; usable as a context manager."""

    cuda_stream: int  # 0 on the CPU
    stream_id: int
    device_index: int

    def synchronize(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: object) -> None: ...


GetInferenceRequestsCallback = Callable[[int], "Iterable[InferenceRequest]"]
SendResponseCallback = Callable[[int, list[NamedTensor], bool, str], None]
PollStopSignalCallback = Callable[[], Iterable[int]]
ReturnBatchManagerStatsCallback = Callable[[str], None]
LogitsPostProcessor = Callable[
    [int, torch.Tensor, Sequence[Sequence[int]], Stream, Union[int, None]],
    Union[torch.Tensor, None],
]

# the names of tensors
TENSORS = (
    *("input_ids", "input_lengths", "position_ids", "request_output_len", "end_id", "pad_id"),
    *("runtime_top_k", "runtime_top_p", "runtime_min_p", "temperature", "random_seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "noRepeatNgramSize"),
    *("min_length", "bad_words_list", "embedding_bias", "stop_words_list"),
    *("beam_width", "num_return_sequences", "len_penalty", "early_stopping"),
    *("return_log_probs", "return_context_logits", "return_generation_logits"),
    *("num_top_log_probs", "num_prompt_log_probs"),
    *("include_stop_in_output", "prompt_embedding_table", "prompt_vocab_size"),
    *("lora_task_id", "lora_weights", "lora_config", "draft_input_ids", "draft_logits"),
)
# other names that are accepted for a property -> the tensor's name
TENSOR_ALIASES: dict[str, str] = {
    "max_new_tokens": "request_output_len",
    "length_penalty": "len_penalty",
    "no_repeat_ngram_size": "noRepeatNgramSize",
}
_TENSOR_OF_PROPERTY = {**{name: name for name in TENSORS}, **TENSOR_ALIASES}
_WORD_LISTS = ("bad_words_list", "stop_words_list")


class InferenceRequest:
    """A request: its id, its tensors by name, and options that are not tensors.

    Every tensor name is also a property (`request.temperature = ...`); reading a tensor that
    is not set raises AttributeError ("Undefined tensor: ..."). Tensors are torch tensors or NumPy
    arrays. The shape `[n]` is equivalent to the shape `[1, n]`, and a scalar to the shape `[1]`.

    With `is_streaming`, new tokens are sent as they are generated; otherwise there is one response
    at the end. Requests with a higher `priority` run first; requests of equal priority keep their
    order. `deadline_s` limits the whole life of the request, and `queue_timeout_s` the time until
    its first computation, both in seconds since GetInferenceRequests returned it. None and infinity
    mean no limit. `client_id` is passed to the logits post-processor. Requests share cached blocks
    only with requests of an equal `cache_salt`. `retention_priority` is from 0 to 100: cached
    blocks of a lower priority are evicted first. With None, the blocks keep their priority.

    Raise ValueError for an id outside 0..2**64-1, TypeError for an id that is not an integer.
    """

    is_streaming: bool
    logits_post_processor: Any
    client_id: int | None
    priority: float
    deadline_s: float | None
    queue_timeout_s: float | None
    cache_salt: Any
    retention_priority: int | None

    def __init__(
        self,
        request_id: int,
        tensors: Mapping[str, TensorLike] | None = None,
        *,
        is_streaming: bool = False,
        logits_post_processor: Any = None,
        client_id: int | None = None,
        priority: float = 0.5,
        deadline_s: float | None = None,
        queue_timeout_s: float | None = None,
        cache_salt: Any = None,
        retention_priority: int | None = None,
    ) -> None:
        if isinstance(request_id, bool) or not isinstance(request_id, (int, np.integer)):
            raise TypeError(f"request_id must be an integer, got {request_id!r}")
        if not 0 <= request_id < 2**64:
            raise ValueError(f"request_id = {request_id} is outside 0..2**64-1")
        self.__dict__.update(
            request_id=int(request_id),
            tensors=_as_dict(tensors),
            is_streaming=is_streaming,
            logits_post_processor=logits_post_processor,
            client_id=client_id,
            priority=priority,
            deadline_s=deadline_s,
            queue_timeout_s=queue_timeout_s,
            cache_salt=cache_salt,
            retention_priority=retention_priority,
        )

    @classmethod
    def from_tokens(
        cls: type[_Request],
        request_id: int,
        input_ids: Sequence[int],
        max_new_tokens: int,
        **by_name: Any,
    ) -> _Request:
        """Create a request from plain Python values.

        `by_name` has tensors by name, as scalars or lists (a word list is a list of lists of token
        ids), and keywords of the constructor. None means "not given". Raise AttributeError for an
        unknown name.
        """
        keywords = {key: by_name.pop(key) for key in KEYWORDS if key in by_name}
        request = cls(request_id, **{k: v for k, v in keywords.items() if v is not None})
        for name, value in {
            "input_ids": input_ids,
            "request_output_len": max_new_tokens,
            **by_name,
        }.items():
            if name not in _TENSOR_OF_PROPERTY:
                raise _no_property(name)
            if value is not None:
                setattr(request, name, _as_tensor(value, is_word_list=name in _WORD_LISTS))
        return request

    def __setattr__(self, name: str, value: Any) -> None:
        if name in KEYWORDS:
            self.__dict__[name] = value
        elif name in _TENSOR_OF_PROPERTY:
            self.__dict__["tensors"][_TENSOR_OF_PROPERTY[name]] = value
        elif name in self.__dict__:
            raise AttributeError(f"InferenceRequest.{name} is set by the constructor alone")
        else:
            raise _no_property(name)

    def __getattr__(self, name: str) -> Any:
        if name in _TENSOR_OF_PROPERTY:
            tensors = self.__dict__.get("tensors", {})  # none before `__init__` has run
            if _TENSOR_OF_PROPERTY[name] in tensors:
                return tensors[_TENSOR_OF_PROPERTY[name]]
            raise AttributeError(f"Undefined tensor: {_TENSOR_OF_PROPERTY[name]}")
        raise AttributeError(f"InferenceRequest has no property {name!r}")

    def __copy__(self) -> InferenceRequest:
        return self._copied(dict(self.tensors))

    def __deepcopy__(self, memo: dict[int, Any]) -> InferenceRequest:
        """Copy the tensors; share the logits post-processor, which may hold uncopyable objects."""
        return self._copied(copy.deepcopy(self.tensors, memo))

    def _copied(self, tensors: dict[str, TensorLike]) -> InferenceRequest:
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__, tensors=tensors)
        return made

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        if self.logits_post_processor is not None:
            raise TypeError(
                f"request {self.request_id} cannot be pickled: its logits_post_processor is code "
                "(set it in the process that serves the request)"
            )
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"InferenceRequest({self.request_id}, tensors={sorted(self.tensors)})"


KEYWORDS = tuple(InferenceRequest.__annotations__)  # keywords of the constructor, except tensors


def _no_property(name: str) -> AttributeError:
    """Return the error for a name that is not a property, with the one that was probably meant."""
    return AttributeError(f"InferenceRequest has no property {name!r}{similar_property(name)}")


def similar_property(name: str) -> str:
    """Return a question with the property that `name` probably means, or "" if none is similar."""
    known = [*_TENSOR_OF_PROPERTY, *KEYWORDS]
    parts = [it for it in known if name in it]  # "top_p": runtime_top_p
    near = parts or get_close_matches(name, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _as_dict(tensors: Mapping[str, TensorLike] | None) -> dict[str, TensorLike]:
    try:
        return dict(tensors or {})
    except (TypeError, ValueError):
        raise TypeError(
            f"tensors = {quoted(tensors)} must be a dict of names and arrays; for plain values "
            "there is InferenceRequest.from_tokens"
        ) from None


def word_list(words: Iterable[Sequence[int]]) -> np.ndarray:
    """Return token words as a tensor `[1, 2, L]` int32: concatenated ids, then their end offsets.

    `[[5, 7, 3], [9, 2]]` becomes `[[[5, 7, 3, 9, 2], [3, 5, -1, -1, -1]]]`. Ids that exceed int32
    get a wider dtype, and are refused when the request is checked. Raise TypeError for words that
    are not sequences of integers.
    """
    if not isinstance(words, Iterable):
        raise TypeError(f"words = {quoted(words)} is not a list of words")
    found = [_word(index, word) for index, word in enumerate(words)]
    ids = [token for word in found for token in word]
    ends = list(itertools.accumulate(map(len, found)))
    width = max(len(ids), len(ends))
    padding = [[0] * (width - len(ids)), [-1] * (width - len(ends))]
    rows = [[ids + padding[0], ends + padding[1]]]
    for dtype in (np.int32, np.int64):
        try:
            return np.array(rows, dtype=dtype)
        except OverflowError:
            continue
    return np.array(rows, dtype=object)


def _word(index: int, word: Any) -> list[int]:
    if isinstance(word, (str, bytes)):  # iterating a text would yield characters
        raise TypeError(f"word {index} = {word!r} is not a sequence of integers")
    try:
        return [as_integer(token) for token in word]
    except TypeError as error:
        raise TypeError(f"word {index} is not a sequence of integers: {error}") from None


def _as_tensor(value: Any, *, is_word_list: bool) -> Any:
    """Convert a value to an array. If that fails, return it unchanged; it is rejected later."""
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value
    try:
        if is_word_list:
            return word_list(value)
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError):
        return value
    return array if _keeps_types(array, value) else value


def _keeps_types(array: np.ndarray, value: Any) -> bool:
    """Return whether an array made of a list has kept the types of the list's elements."""
    if not isinstance(value, (list, tuple)):
        return True
    kinds = _kinds(value)
    if kinds <= {bool}:
        return True
    are_numbers = all(kind in (int, float) or issubclass(kind, np.number) for kind in kinds)
    are_floats = any(issubclass(kind, (float, np.floating)) for kind in kinds)
    # NumPy also converts large integers to floats
    return are_numbers and array.dtype.kind in ("f" if are_floats else "iu")


def _kinds(value: Any) -> set[type]:
    """Return the types of all elements of a nested list."""
    kinds = set(map(type, value))
    if kinds.isdisjoint((list, tuple)):
        return kinds
    return {kind for item in value for kind in _kinds(item)}

"""`AttentionProvider` and `LinearProvider`: interfaces to external attention and matmuls.

The functions at the end call their methods. An error names the provider, the method and what was
wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from gptmanager.errors import CallbackError, quoted, response_text
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowLengths


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """The R rows of one phase of a step; a row is a sequence, or one beam of it.

    `kv_lengths` int32 `[R]`: row r has `kv_lengths[r]` positions. `query_starts` int32 `[R + 1]`:
    row r has the queries `query_starts[r]:query_starts[r + 1]`, one for each of the last positions
    of the row. `block_tables` int32 `[R, N]`: position p of row r is token `p % B` of the block
    `block_tables[r, p // B]`, for blocks of B tokens. `lengths`: `query_starts` and `kv_lengths` in
    NumPy, on the CPU; None in a captured step. `memo`: a dict, empty at the start of a step. The
    provider may keep there what all layers of the step need.
    """

    query_starts: Tensor
    kv_lengths: Tensor
    block_tables: Tensor
    lengths: RowLengths | None
    memo: dict[Any, Any] = field(default_factory=dict)


class AttentionProvider(Protocol):
    """Computes attention over pages in place of our own kernels (`attention_provider`).

    It runs on the CPU or on a device, wherever the queries are. On a device the manager's CUDA
    stream is torch's current stream, and all work must be enqueued on it. Our own kernels rotate
    queries and keys, scale queries that have a temperature, and write keys and values to their
    pages, before a provider is called.

    `name`: the provider's name in the log. `capturable`: whether a generation step that uses the
    provider may be captured as a CUDA graph. If so, `attend_generation` must read nothing but
    tensors, enqueue the same work for any lengths, and never wait. A captured step may end with
    rows that are padding: their KV length is 0 and their results are ignored. If a provider
    computes attention, steps with contexts are never captured.
    """

    name: str
    capturable: bool

    def refusal(
        self, shape: AttentionShape, dtype: torch.dtype, tokens_per_block: int
    ) -> str | None:
        """Return why this attention is not supported, or None if it is supported.

        Called once for each shape of the model, at the start. Anything but None or a string is an
        error. Our own kernels compute attention that is refused. `shape` has the head size, the
        numbers of heads, and in `shape.features` the names of features that a provider might lack:
        "window", "sink" (the first positions, seen by all), "softcap", "sinks" (scores without a
        value), "fp8" (pages in 8 bits), "is_once" (keys that are also the values), "chunked".
        Queries and the result have `dtype`.
        """
        ...

    def attend_generation(
        self,
        queries: Tensor,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention `[R, H, D]` of rows with one query each, `queries [R, H, D]`.

        `pages.keys.mT` and `pages.values` are `[P, K, B, D]`: P blocks of B tokens, with K KV
        heads. On a device each block is contiguous, and so are both tensors, except with
        `ModelType.V1`, where there are gaps between blocks. A query sees the positions from 0 to
        its own, or those that `shape` says. `sinks [H]` is None unless `shape.sinks`. Memory after
        the end of a row may hold NaN, and block ids after its last block, or before its window,
        mean nothing. Do not change the pages. The next call may reuse the memory of the result.
        """
        ...

    def attend_context(
        self,
        queries: Tensor,
        pages: Pages,
        rows: AttentionRows,
        shape: AttentionShape,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return the attention `[T, H, D]` of rows with any number of queries, `queries [T, H, D]`.

        The rows are prompts, chunks of prompts, and rows with draft tokens. A step that calls this
        method is never captured. The other arguments are those of `attend_generation`.
        """
        ...


class LinearProvider(Protocol):
    """Computes matmuls with weights of the network in place of our own kernels (`linear_provider`).

    The weights that `accepts` accepts are stored as plain tensors. Our own kernels compute with
    weights in 8 or 4 bits and, on a GPU, with the weights of experts. The CUDA stream and
    `capturable` are as in `AttentionProvider`.
    """

    capturable: bool

    def accepts(self, rows: int, columns: int, dtype: torch.dtype) -> bool:
        """Return whether the provider multiplies by weights `[rows, columns]` of this dtype.

        Called once for each kind of weights. On the CPU, the weights of a layer's experts are
        stored as one matrix, so the provider is also asked about the rows of all experts together.
        """
        ...

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return `x @ weight^T + bias`, `[T, rows]`, for `x [T, columns]`, in the weight's dtype.

        Do not change `weight [rows, columns]`. Its elements change when a host loads new weights.
        Do not overwrite the result in a later call.
        """
        ...


def is_capturable(provider: Any) -> bool:
    """Return whether a provider says that its steps may be captured."""
    return bool(getattr(provider, "capturable", False))


def name_of(provider: Any) -> str:
    """Return a provider's name in the log."""
    return str(getattr(provider, "name", None) or type(provider).__name__)


def answer_of(
    provider: Any, method: str, given: Sequence[Any], kinds: tuple[type, ...], expected: str
) -> Any:
    """Call a method, and return its answer. Raise CallbackError if it has none of these types."""
    answer = _call(provider, method, given)
    if not isinstance(answer, kinds):
        raise _misuse(provider, method, quoted(answer), expected)
    return answer


def result_of(provider: Any, method: str, given: Sequence[Any], shape: Sequence[int]) -> Tensor:
    """Call a method that computes. Return its result, contiguous, in its first argument's dtype.

    Raise CallbackError if the result is not a tensor of floats of this shape, on the device of the
    first argument. Our kernels read its memory: memory of another device would end the process.
    """
    result, first = _call(provider, method, given), given[0]
    if not isinstance(result, Tensor):
        raise _misuse(provider, method, f"a value of type {type(result).__name__}", "a tensor")
    for what, found, expected in (
        ("shape", tuple(result.shape), tuple(shape)),
        ("device", result.device, first.device),
        ("layout", result.layout, torch.strided),
    ):
        if found != expected:
            raise _misuse(provider, method, f"the {what} {found}", str(expected))
    if not result.is_floating_point():
        raise _misuse(provider, method, f"the dtype {result.dtype}", str(first.dtype))
    return result.to(first.dtype).contiguous()  # all ops of a model require this


def _call(provider: Any, method: str, given: Sequence[Any]) -> Any:
    """Call a method. Raise CallbackError if it raises anything but an error of memory.

    Errors of memory are passed on: the executor then runs the step in parts.
    """
    try:
        return getattr(provider, method)(*given)
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        name = name_of(provider)
        raise CallbackError(
            f"{method} of the provider {name} raised {response_text(error)}"
        ) from error


def _misuse(provider: Any, method: str, found: str, expected: str) -> CallbackError:
    return CallbackError(
        f"{method} of the provider {name_of(provider)} returned {found}, expected {expected}"
    )

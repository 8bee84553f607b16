"""Processors that allow, ban or prefer tokens, each for one request.

    banned = BannedTokens()
    request.logits_post_processor = banned.bind([13, 198])

Each processor is a CUDA kernel; on the CPU a NumPy function, its twin, does the same. All requests
of a batch that use the same object, such as `banned`, are processed by one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from gptmanager import RawKernelLogitsPostProcessor
from gptmanager.arguments import as_token, at_least
from gptmanager.decoding.processors.raw_kernel import BoundKernel
from gptmanager.errors import quoted

Logits = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Params = npt.NDArray[np.void]

_MAX_BIAS = float(np.finfo(np.float32).max)
_SIGNATURE = """
static_assert(sizeof(Params) == PARAMS_SIZE, "sizeof(Params) differs from the dtype's item size");

extern "C" __global__ void KERNEL(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    float* row = logits + (long long)rows[blockIdx.x] * vocab_size;
    const Params& mine = params[slots[blockIdx.x]];
"""

_ALLOWED = f"""
struct Params {{ int count; int ids[MAX_TOKENS]; }};
#define KERNEL allowed_tokens
{_SIGNATURE}
    for (int token = threadIdx.x; token < vocab_size; token += blockDim.x) {{
        int low = 0, high = mine.count;  // the ids ascend
        while (low < high) {{
            int middle = (low + high) / 2;
            if (mine.ids[middle] < token) low = middle + 1; else high = middle;
        }}
        if (low == mine.count || mine.ids[low] != token) row[token] = __uint_as_float(0xff800000u);
    }}
}}
"""

_BANNED = f"""
struct Params {{ int count; int ids[MAX_TOKENS]; }};
#define KERNEL banned_tokens
{_SIGNATURE}
    for (int i = threadIdx.x; i < mine.count; i += blockDim.x)
        if (mine.ids[i] < vocab_size) row[mine.ids[i]] = __uint_as_float(0xff800000u);
}}
"""

_BIAS = f"""
struct Params {{ int count; int ids[MAX_TOKENS]; float bias[MAX_TOKENS]; }};
#define KERNEL token_bias
{_SIGNATURE}
    for (int i = threadIdx.x; i < mine.count; i += blockDim.x)
        if (mine.ids[i] < vocab_size) row[mine.ids[i]] += mine.bias[i];
}}
"""


class _TokenRule(RawKernelLogitsPostProcessor):
    """A rule for at most `max_tokens` tokens of a request.

    `value_fields`: further fields of the kernel's `Params`, with a float32 for each token.
    """

    def __init__(
        self, source: str, name: str, twin: Any, max_tokens: int, *value_fields: str
    ) -> None:
        at_least(1, "max_tokens", max_tokens)
        values = [(field, np.float32, (max_tokens,)) for field in value_fields]
        fields = [("count", np.int32), ("ids", np.int32, (max_tokens,)), *values]
        super().__init__(source, name, fields, options=(f"-DMAX_TOKENS={max_tokens}",), twin=twin)
        self.max_tokens = max_tokens


class AllowedTokens(_TokenRule):
    """Allows only the given tokens. Include the request's `end_id`, so that the output can end."""

    def __init__(self, max_tokens: int = 256) -> None:
        super().__init__(_ALLOWED, "allowed_tokens", _allow, max_tokens)

    def bind(self, token_ids: Sequence[int]) -> BoundKernel:  # type: ignore[override]
        """Return the processor of a request.

        Raise ValueError for an empty list, for more than `max_tokens` different ids, and for an id
        outside 0..2**31-1; TypeError for an id that is not an integer.
        """
        if not token_ids:
            raise ValueError("token_ids is empty: no token would be allowed")
        return super().bind(**_padded(token_ids, self.max_tokens))


class BannedTokens(_TokenRule):
    """Bans the given tokens."""

    def __init__(self, max_tokens: int = 256) -> None:
        super().__init__(_BANNED, "banned_tokens", _ban, max_tokens)

    def bind(self, token_ids: Sequence[int]) -> BoundKernel:  # type: ignore[override]
        """Return the processor of a request.

        Raise ValueError for more than `max_tokens` different ids, and for an id outside
        0..2**31-1; TypeError for an id that is not an integer.
        """
        return super().bind(**_padded(token_ids, self.max_tokens))


class TokenBias(_TokenRule):
    """Adds a bias to the logits of given tokens: a bias of log 2 doubles the odds of a token."""

    def __init__(self, max_tokens: int = 256) -> None:
        super().__init__(_BIAS, "token_bias", _add_bias, max_tokens, "bias")

    def bind(self, bias: Mapping[int, float]) -> BoundKernel:  # type: ignore[override]
        """Return the processor of a request. `bias` maps token ids to biases; -inf bans a token.

        Raise ValueError for more than `max_tokens` ids, for an id outside 0..2**31-1, and for NaN
        and more than float32's largest number; TypeError for an id that is not an integer, a bias
        that is not a number, and another type than a mapping.
        """
        if not isinstance(bias, Mapping):
            raise TypeError(f"bias must be a dict of token ids and biases, got {quoted(bias)}")
        given: Mapping[Any, Any] = bias
        for token, added_to in given.items():
            if not isinstance(added_to, Real):
                raise TypeError(f"bias[{token}] must be a number, got {quoted(added_to)}")
            if not added_to <= _MAX_BIAS:
                raise ValueError(f"bias[{token}] = {added_to} must be at most {_MAX_BIAS:.8g}")
        added = np.zeros(self.max_tokens, dtype=np.float32)
        params = _padded(list(bias), self.max_tokens)
        added[: len(bias)] = [bias[token] for token in sorted(bias)]
        return super().bind(**params, bias=added)


def _padded(token_ids: Sequence[int], max_tokens: int) -> dict[str, Any]:
    """Return the parameters `count` and `ids`: the different ids, ascending, then zeros.

    Raise ValueError for too many ids, and the errors of `as_token`.
    """
    ids = sorted({as_token(token) for token in token_ids})
    if len(ids) > max_tokens:
        raise ValueError(f"{len(ids)} different ids are more than max_tokens = {max_tokens}")
    padded = np.zeros(max_tokens, dtype=np.int32)
    padded[: len(ids)] = ids
    return {"count": len(ids), "ids": padded}


def _ids(params: np.void, vocab_size: int) -> Ints:
    ids: Ints = params["ids"][: params["count"]]
    return ids[ids < vocab_size]


def _allow(logits: Logits, rows: Ints, slots: Ints, params: Params, *history: Any) -> None:
    for row, slot in zip(rows, slots, strict=True):
        ids = _ids(params[slot], logits.shape[1])
        kept = logits[row, ids]
        logits[row] = -np.inf
        logits[row, ids] = kept


def _ban(logits: Logits, rows: Ints, slots: Ints, params: Params, *history: Any) -> None:
    for row, slot in zip(rows, slots, strict=True):
        logits[row, _ids(params[slot], logits.shape[1])] = -np.inf


def _add_bias(logits: Logits, rows: Ints, slots: Ints, params: Params, *history: Any) -> None:
    for row, slot in zip(rows, slots, strict=True):
        ids = _ids(params[slot], logits.shape[1])
        logits[row, ids] += params[slot]["bias"][: len(ids)]

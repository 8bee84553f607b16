"""Orders of rows and columns in which a file differs from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptmanager.kernels.gemm.int4_groups import GROUP

# Config fields with the values of `ValueHeads`
VALUE_HEADS = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
)
# Returns, for each of these rows (or columns) of a checkpoint, its index in the file, int64 `[n]`.
Order = Callable[[range], Tensor]


def pairs_to_halves(head_dim: int) -> Order:
    """Return the order of heads for which a file has the rows of each RoPE pair next to each other.

    In a checkpoint, a head has the first rows of all its pairs, and then the second rows of all its
    pairs.
    """

    def order(rows: range) -> Tensor:
        head, row = np.divmod(np.arange(rows.start, rows.stop), head_dim)
        second, pair = np.divmod(row, head_dim // 2)
        return torch.from_numpy(head * head_dim + 2 * pair + second)

    return order


def order_of_groups(columns: Order, count: int) -> Tensor | None:
    """Return the index in the file of each group of 32 of `count` columns, int64 `[groups]`.

    Returns None if the columns of a group are not a group in the file.
    """
    if count % GROUP:
        return None
    places = columns(range(count)).view(-1, GROUP)
    first = places[:, :1]
    are_groups = torch.equal(places, first + torch.arange(GROUP)) and not (first % GROUP).any()
    return first.flatten() // GROUP if are_groups else None


class ValueHeads(NamedTuple):
    """The value heads of linear attention, which llama.cpp stores in another order (Qwen3.5).

    A checkpoint has all value heads of a key head, then those of the next one. A file has the first
    value heads of all key heads, then their second ones.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def order(self, first: int, size: int) -> Order:
        """Return the order of rows, of which each value head has `size` from row `first` on."""
        count = self.value_heads // self.key_heads

        def order(rows: range) -> Tensor:
            row = np.arange(rows.start, rows.stop)
            head, inner = np.divmod(row - first, size)
            key, number = np.divmod(head, count)
            moved = first + (number * self.key_heads + key) * size + inner
            return torch.from_numpy(np.where(row < first, row, moved))

        return order

    def places(self) -> Mapping[str, tuple[int, int]]:
        """Return, by module, the first row of the value heads, and the rows of each of them."""
        keys = 2 * self.key_heads * self.key_dim
        of_values, of_heads = (0, self.value_dim), (0, 1)
        return {
            **dict.fromkeys(("attn_qkv", "ssm_conv1d"), (keys, self.value_dim)),
            **dict.fromkeys(("attn_gate", "ssm_out"), of_values),
            **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"), of_heads),
        }

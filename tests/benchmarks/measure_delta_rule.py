"""A layer with a gated delta rule: ours next to torch's formula, transformers, and what it must do.

python tests/benchmarks/measure_delta_rule.py

The sizes are those of Qwen3-Next and of Qwen3.5 0.8B, in bfloat16 and float32. `matmuls`: the
layer's two large projections by our kernels. `state`: torch multiplies the memories of all requests
by a number in place, which reads and writes them once. Runs alternate; the best of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from gptmanager.kernels import CpuKernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors
from gptmanager.kernels.recurrent.recurrent_ops import RecurrentOps

# by model: its hidden size, and the shape of its layers
MODELS = {
    "Qwen3-Next": (2048, DeltaShape(16, 32, key_dim=128, value_dim=128, width=4)),
    "Qwen3.5 0.8B": (1024, DeltaShape(16, 16, key_dim=128, value_dim=128, width=4)),
}
CASES = [(1, 512), (1, 1), (16, 1), (64, 1)]  # requests, tokens of each
SECONDS = 1.5


class Formula(RecurrentOps):
    """The ops in torch."""

    deterministic = False


class Case:
    def __init__(
        self, hidden: int, shape: DeltaShape, requests: int, tokens: int, dtype: torch.dtype
    ) -> None:
        self.requests, self.tokens, count = requests, tokens, requests * tokens
        self.kernels, self.shape, heads = CpuKernels(), shape, shape.value_heads
        self.projected = torch.randn(count, shape.channels + shape.values).to(dtype)
        self.gates = torch.randn(count, 2 * heads)
        conv, norm = (torch.randn(shape.width, shape.channels).to(dtype) / 2, torch.ones(128))
        self.tensors = DeltaTensors(conv, torch.zeros(heads), torch.zeros(heads), norm.to(dtype))
        self.state = DeltaState(
            torch.zeros(requests, shape.width - 1, shape.channels, dtype=dtype),
            torch.zeros(requests, heads, shape.key_dim, shape.value_dim),
        )
        starts = torch.arange(0, count + 1, tokens, dtype=torch.int32)
        slots = torch.arange(requests, dtype=torch.int32)
        self.rows = RowSpans(starts, starts[1:], slots, slots[:, None])
        self.norm = theirs.Qwen3NextRMSNormGated(shape.value_dim).to(dtype)
        self.past = torch.zeros(requests, shape.channels, shape.width - 1, dtype=dtype)
        self.memory = torch.zeros(requests, heads, shape.key_dim, shape.value_dim)

        self.matrices = []
        for rows, columns in ((self.projected.shape[1], hidden), (hidden, shape.values)):
            matrix = self.kernels.new_matrix(rows, columns, dtype)
            assert matrix is not None
            matrix.copy_(torch.randn(rows, columns) / 64)
            self.matrices.append((torch.randn(count, columns).to(dtype), matrix))

    def ours(self) -> Tensor:
        return self._computed(self.kernels)

    def formula(self) -> Tensor:
        return self._computed(Formula())

    def _computed(self, ops: RecurrentOps) -> Tensor:
        given = (self.projected, self.gates.clone(), self.shape, self.tensors, 1e-6, self.state)
        return ops.gated_delta(*given, self.rows)

    def matmuls(self) -> None:
        for x, matrix in self.matrices:
            self.kernels.linear(x, matrix)

    def states(self) -> None:
        self.state.memory.mul_(0.999)

    def theirs(self) -> Tensor:
        whole = self.projected.unflatten(0, (self.requests, self.tokens))
        channels, z = whole.split((self.shape.channels, self.shape.values), dim=-1)
        x, conv = channels.transpose(1, 2), self.tensors.conv.t().contiguous()
        if self.tokens == 1:
            x = theirs.causal_conv1d_update(x, self.past, conv, None, "silu")
        else:
            self.past.copy_(x[..., -self.past.shape[-1] :])
            x = theirs.causal_conv1d_fn(x, conv, None, activation="silu")
        q, k, v = x.transpose(1, 2).split(
            (self.shape.keys, self.shape.keys, self.shape.values), dim=-1
        )
        group = self.shape.value_heads // self.shape.key_heads
        q, k = (
            it.unflatten(-1, (-1, self.shape.key_dim)).repeat_interleave(group, 2) for it in (q, k)
        )
        b, a = self.gates.unflatten(0, (self.requests, self.tokens)).chunk(2, dim=-1)
        decay = -self.tensors.decay.exp() * F.softplus(a + self.tensors.step)
        rule = theirs.torch_recurrent_gated_delta_rule
        rule = rule if self.tokens == 1 else theirs.torch_chunk_gated_delta_rule
        found, self.memory = rule(
            *(q, k, v.unflatten(-1, (-1, self.shape.value_dim))),
            g=decay,
            beta=b.sigmoid(),
            initial_state=self.memory,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return self.norm(found.flatten(0, 2), z.reshape(-1, self.shape.value_dim))


def milliseconds(actions: Sequence[Callable[[], object]]) -> list[float]:
    best, until = [1e9] * len(actions), time.perf_counter() + SECONDS
    for action in actions:
        action()
    while max(best) == 1e9 or time.perf_counter() < until:
        for number, action in enumerate(actions):
            start = time.perf_counter()
            action()
            best[number] = min(best[number], 1000 * (time.perf_counter() - start))
    return best


def main() -> None:
    with torch.inference_mode():
        for model, (hidden, shape) in MODELS.items():
            for dtype in (torch.bfloat16, torch.float32):
                for requests, tokens in CASES:
                    torch.manual_seed(0)
                    case = Case(hidden, shape, requests, tokens, dtype)
                    ours, right = case.ours(), case.theirs()
                    error = (ours.flatten() - right.flatten()).abs().max() / right.std()
                    own, formula, others, matmuls, states = milliseconds(
                        (case.ours, case.formula, case.theirs, case.matmuls, case.states)
                    )
                    print(
                        f"{model:12} {str(dtype)[6:]:9} {requests:3} x {tokens:3} tokens: "
                        f"{own:8.3f} ms; formula {formula:8.3f}, transformers {others:8.3f}, "
                        f"matmuls {matmuls:8.3f}, state {states:8.3f}; error {error:.0e}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()

"""A layer with a gated delta rule, without its projections: ours next to transformers' on torch.

python tests/benchmarks/measure_delta_rule.py

The sizes are those of Qwen3-Next, in bfloat16 and float32. Runs alternate; the best of each counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from gptmanager.kernels import CpuKernels
from gptmanager.kernels.attention.attention_arguments import RowSpans
from gptmanager.kernels.recurrent.delta_formulas import DeltaShape, DeltaState, DeltaTensors

SHAPE = DeltaShape(key_heads=16, value_heads=32, key_dim=128, value_dim=128, width=4)
CASES = [(1, 512), (1, 1), (16, 1), (64, 1)]  # requests, tokens of each
SECONDS = 1.5


class Case:
    def __init__(self, requests: int, tokens: int, dtype: torch.dtype) -> None:
        self.requests, self.tokens, count = requests, tokens, requests * tokens
        self.kernels = CpuKernels()
        heads = SHAPE.value_heads
        self.projected = torch.randn(count, SHAPE.channels + SHAPE.values).to(dtype)
        self.gates = torch.randn(count, 2 * heads)
        conv, norm = torch.randn(SHAPE.width, SHAPE.channels).to(dtype) / 2, torch.ones(128)
        self.tensors = DeltaTensors(conv, torch.zeros(heads), torch.zeros(heads), norm.to(dtype))
        self.state = DeltaState(
            torch.zeros(requests, SHAPE.width - 1, SHAPE.channels, dtype=dtype),
            torch.zeros(requests, heads, SHAPE.key_dim, SHAPE.value_dim),
        )
        starts = torch.arange(0, count + 1, tokens, dtype=torch.int32)
        slots = torch.arange(requests, dtype=torch.int32)
        self.rows = RowSpans(starts, starts[1:], slots, slots[:, None])
        self.norm = theirs.Qwen3NextRMSNormGated(SHAPE.value_dim).to(dtype)
        self.past = torch.zeros(requests, SHAPE.channels, SHAPE.width - 1, dtype=dtype)
        self.memory = torch.zeros(requests, heads, SHAPE.key_dim, SHAPE.value_dim)

    def ours(self) -> Tensor:
        given = self.projected, self.gates.clone(), SHAPE, self.tensors, 1e-6, self.state
        return self.kernels.gated_delta(*given, self.rows)

    def theirs(self) -> Tensor:
        whole = self.projected.unflatten(0, (self.requests, self.tokens))
        channels, z = whole.split((SHAPE.channels, SHAPE.values), dim=-1)
        x, conv = channels.transpose(1, 2), self.tensors.conv.t().contiguous()
        if self.tokens == 1:
            x = theirs.causal_conv1d_update(x, self.past, conv, None, "silu")
        else:
            self.past.copy_(x[..., -self.past.shape[-1] :])
            x = theirs.causal_conv1d_fn(x, conv, None, activation="silu")
        q, k, v = x.transpose(1, 2).split((SHAPE.keys, SHAPE.keys, SHAPE.values), dim=-1)
        group = SHAPE.value_heads // SHAPE.key_heads
        q, k = (it.unflatten(-1, (-1, SHAPE.key_dim)).repeat_interleave(group, 2) for it in (q, k))
        b, a = self.gates.unflatten(0, (self.requests, self.tokens)).chunk(2, dim=-1)
        decay = -self.tensors.decay.exp() * F.softplus(a + self.tensors.step)
        rule = theirs.torch_recurrent_gated_delta_rule
        rule = rule if self.tokens == 1 else theirs.torch_chunk_gated_delta_rule
        found, self.memory = rule(
            *(q, k, v.unflatten(-1, (-1, SHAPE.value_dim))),
            g=decay,
            beta=b.sigmoid(),
            initial_state=self.memory,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        return self.norm(found.flatten(0, 2), z.reshape(-1, SHAPE.value_dim))


def milliseconds(one: Callable[[], Tensor], other: Callable[[], Tensor]) -> tuple[float, float]:
    best, until = [1e9, 1e9], time.perf_counter() + SECONDS
    for action in (one, other):
        action()
    while time.perf_counter() < until:
        for number, action in enumerate((one, other)):
            start = time.perf_counter()
            action()
            best[number] = min(best[number], 1000 * (time.perf_counter() - start))
    return best[0], best[1]


def main() -> None:
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            for requests, tokens in CASES:
                torch.manual_seed(0)
                case = Case(requests, tokens, dtype)
                ours, right = case.ours(), case.theirs()
                error = (ours.flatten() - right.flatten()).abs().max() / right.std()
                own, others = milliseconds(case.ours, case.theirs)
                print(
                    f"{str(dtype)[6:]:9} {requests:3} x {tokens:3} tokens: {own:8.3f} ms, "
                    f"transformers {others:8.3f} ms ({others / own:5.1f} x), error {error:.0e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Generation attention on the emulator or a GPU, checked."""

from __future__ import annotations

import torch

from gptmanager.cuda.attention.generation_attention import GenerationWork, generation_attention
from gptmanager.cuda.attention.generation_plan import Places, plan_generation

PLACES = Places(4, 3)
# Weights are rounded to the dtype before they meet the values.
ABSOLUTE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def attend(machine, rows, *, scale=0.09, stretch=64, padding=0, places=PLACES, **options):
    bounds = {name: options[name] for name in ("window", "sink") if name in options}
    plan = plan_generation(
        rows.kv_lengths.numpy(), rows.kv_heads, places, stretch=stretch, **bounds
    )
    plan = plan.padded(len(plan.items) + padding, len(rows.rows))
    out = machine.empty(rows.queries.shape, rows.dtype)
    partial = machine.empty((plan.num_partials, rows.heads, rows.head_dim), torch.float32)
    arrived = machine.tensor(torch.zeros(len(rows.rows), rows.kv_heads, dtype=torch.int32))
    work = GenerationWork(
        *(machine.tensor(torch.from_numpy(it)) for it in vars(plan).values()),
        partial,
        machine.empty((plan.num_partials, rows.heads), torch.float32),
        arrived,
    )
    generation_attention(
        *(machine.launcher, out, machine.tensor(rows.queries)),
        *(rows.pages_on(machine), rows.spans_on(machine), work),
        *(rows.shape(scale, **options), rows.sinks_on(machine)),
    )
    assert not arrived.cpu().any()
    return out.cpu()


def check(machine, rows, **options):
    got = attend(machine, rows, **options)
    options = {name: options[name] for name in ("window", "sink", "softcap") if name in options}
    expected = rows.textbook(0.09, **options)
    absolute = ABSOLUTE[rows.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=absolute, atol=absolute)

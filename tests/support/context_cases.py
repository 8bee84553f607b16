"""Context attention on the emulator or a GPU, checked."""

from __future__ import annotations

import numpy as np
import torch
from requirements import skip

from gptmanager.cuda.attention.context_attention import context_attention, plan_context

ABSOLUTE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def choosing(machine, kind, monkeypatch):
    if kind == "warpgroups" and getattr(machine.launcher, "arch", "sm_90a") != "sm_90a":
        skip("products of warpgroups need a Hopper GPU")
    monkeypatch.setattr(machine.launcher, "has_warpgroups", kind == "warpgroups")
    return machine


def attend(machine, rows, *, scale=0.09, **options):
    num_new = np.array([new for new, _ in rows.rows], dtype=np.int32)
    shape = rows.shape(scale, **options)
    items = torch.from_numpy(plan_context(num_new, rows.kv_lengths.numpy(), shape))
    out = machine.empty(rows.queries.shape, rows.dtype)
    context_attention(
        *(machine.launcher, out, machine.tensor(rows.queries)),
        *(rows.pages_on(machine), rows.spans_on(machine), machine.tensor(items)),
        *(shape, rows.sinks_on(machine)),
    )
    return out.cpu()


def check(machine, rows, **options):
    got = attend(machine, rows, **options)
    absolute = ABSOLUTE[rows.dtype]
    expected = rows.textbook(0.09, **options)
    torch.testing.assert_close(got.double(), expected, rtol=absolute, atol=absolute)

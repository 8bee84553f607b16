"""Every family with kernels for devices, on the emulator: contexts, chunks and recorded steps."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from family_configs import FAMILY_CONFIGS, WIDE
from family_runs import family_folder, tokens
from step_rows import packed

from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.graphs import StepGraphs
from gptmanager.cuda.device.streams import EmulatedStream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.packed_rows import StepShape
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.kernels.reference import Kernels
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import load_model

pytestmark = pytest.mark.every(3)

pytest.importorskip("transformers", reason="transformers is not installed")
TEXTS = tokens(24, 1), tokens(7, 2)
STEPS = [
    packed(None, *spans, every=True)
    for spans in (((0, 14), (0, 3)), ((14, 21), (3, 4)), ((21, 22), (4, 5)), ((22, 23), (5, 6)))
]


def logits_of(name, kernels, stream):
    """Return logits of two sequences: prompts, a chunk with a first token, two generation steps."""
    model = load_model(family_folder(name), kernels=kernels, device=stream.device, dtype="float32")
    spec, tables = model.spec, DeviceTables(2, 32, 4, stream.device)
    states = {"state_shapes": spec.states, "num_lines": 2}
    pool = KvPool(spec.pages, 8, 8, token_major=True, **states)
    for pages in chain.from_iterable(it.tokens for it in pool.stacks):
        pages.fill_(torch.nan)
    copies = Uploads(stream), Downloads(stream, 16)
    sizes = {"graph_sizes": (2,), "shapes": (StepShape(10, 1, 1, 8),)}
    runner = DeviceRunner(model, pool, tables, stream, *copies, **sizes)
    for line, text in enumerate(TEXTS):
        tables.write_blocks(line, 0, [5 - line, 2 + line, 7 - line, line])
        tables.write_tokens(line, 0, text)
    with torch.inference_mode():
        return torch.cat([runner.run(rows).logits.clone() for rows in STEPS])


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.every(20)
def test_logits_are_those_of_the_reference(toolchain, name, monkeypatch):
    run, replayed = StepGraphs.run, []

    def spy(self, size, arrays):
        replayed.append(size)
        return run(self, size, arrays)

    monkeypatch.setattr(StepGraphs, "run", spy)
    stream = EmulatedStream()
    found = logits_of(name, CudaKernels(stream.launcher), stream)
    # torch computes attention to latents, and no graph has that
    assert replayed == ([] if "kv_lora_rank" in WIDE[name] else [10, 2, 2])
    expected = logits_of(name, Kernels(), stream)
    assert (found - expected).abs().max() < 2e-4 * expected.std()


HEAD_DIMS = "must be one of (32, 64, 80, 96, 128, 256)"
GROUP = {"num_attention_heads": 32, "num_key_value_heads": 1, "head_dim": 32}
LATENTS = "keys that are also values (latents) are not supported"


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("llama", {}, f"head dimension 16 {HEAD_DIMS}"),
        ("gemma2", {"head_dim": 512}, f"head dimension 512 {HEAD_DIMS}"),
        ("llama", GROUP, "32 query heads do not divide into groups of up to 16 for 1 KV heads"),
        ("deepseek_v2", {}, LATENTS),
        ("deepseek_v3", {}, LATENTS),
    ],
)
def test_attention_that_no_kernel_takes_runs_on_torch_and_the_log_says_so(
    toolchain, monkeypatch, caplog, name, changes, reason
):
    own = f"{name} without kernels {len(changes)}"
    monkeypatch.setitem(WIDE, own, {**FAMILY_CONFIGS[name], **changes})
    stream = EmulatedStream()
    found = logits_of(own, CudaKernels(stream.launcher), stream)
    expected = logits_of(own, Kernels(), stream)
    assert (found - expected).abs().max() < 2e-4 * expected.std()
    assert torch.equal(found.argmax(dim=-1), expected.argmax(dim=-1))
    (line,) = (it.getMessage() for it in caplog.records if "no kernel" in it.getMessage())
    assert reason in line and "PyTorch computes it" in line

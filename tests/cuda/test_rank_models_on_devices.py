"""A model split over ranks with kernels for devices, on the emulator: collectives in recordings."""

from __future__ import annotations

import torch
from devices import LLAMA, checkpoint
from rank_threads import World
from step_rows import packed

from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.graphs import StepGraphs
from gptmanager.cuda.device.streams import EmulatedStream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import load_model

PROMPTS = ([1, 2, 3, 70, 90], [4, 95, 6])


def logits_of(collectives):
    """Return the logits of the prompts, and of two captured steps after them."""
    stream = EmulatedStream()
    model = load_model(
        (LLAMA, checkpoint(tuple(sorted(LLAMA.items(), key=str)))),
        kernels=CudaKernels(stream.launcher),
        device=stream.device,
        collectives=collectives,
    )
    spec, tables = model.spec, DeviceTables(2, 64, 4, stream.device)
    pool = KvPool(spec.pages, 8, 16, token_major=True)
    copies = Uploads(stream), Downloads(stream, 16)
    runner = DeviceRunner(model, pool, tables, stream, *copies, graph_sizes=(2,))
    for line, prompt in enumerate(PROMPTS):
        tables.write_blocks(line, 0, range(4 * line, 4 * line + 4))
        tables.write_tokens(line, 0, [*prompt, 7 + line, 90 - line])
    spans, found = [(0, len(prompt)) for prompt in PROMPTS], []
    for _ in range(3):
        found.append(runner.run(packed(None, *spans)).logits.clone())
        spans = [(end, end + 1) for _, end in spans]
    return torch.stack(found)


def test_recorded_steps_of_ranks_give_the_logits_of_one(toolchain, monkeypatch):
    run, replayed = StepGraphs.run, []

    def spy(self, size, arrays):
        replayed.append(size)
        return run(self, size, arrays)

    monkeypatch.setattr(StepGraphs, "run", spy)
    with torch.inference_mode():
        expected = logits_of(None)
    assert replayed == [2, 2]
    first, *others = World(2, 2).run(torch.inference_mode()(logits_of))
    assert replayed == [2] * 10
    torch.testing.assert_close(first, expected, atol=1e-4, rtol=1e-4)
    assert {it.shape for it in others} == {(3, 2, 0)}

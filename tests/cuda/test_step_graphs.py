"""CUDA graphs of steps alone: which sizes are captured, and what a capture and a replay read."""

from __future__ import annotations

import numpy as np
import torch

from gptmanager.cuda.device.graphs import StepGraphs, ladder, token_ladder
from gptmanager.cuda.device.streams import EmulatedStream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.executor.captured_steps import CapturedSteps


def test_the_ladder_has_a_step_for_each_batch_with_few_rows_of_padding():
    assert ladder(1) == (1,) and ladder(4) == (1, 2, 4) and ladder(20) == (1, 2, 4, 8, 16, 24)
    for most in range(1, 300):
        steps = ladder(most)
        assert most <= steps[-1] < most + 8
        assert all(b - a <= 8 for a, b in zip(steps, steps[1:], strict=False))


def test_sizes_that_are_captured():
    """Up to the largest step, and while launches take the CPU longer than a GPU computes."""
    sizes = 64, 128, 256, 512
    assert token_ladder(sizes, 8192, 10**9) == sizes
    for most in (1, 63, 64, 65, 128, 512, 513):
        found = token_ladder(sizes, most, 10**9)
        assert found == sizes[: len(found)] and found[-1] >= min(most, sizes[-1])
        assert all(size < most for size in found[:-1])
    assert token_ladder((1, 8), 1, 10**9) == (1,)
    assert token_ladder(sizes, 8192, 6 * 10**9) == (64, 128)
    assert token_ladder(sizes, 8192, 16 * 10**9) == () == token_ladder((), 8192, 1)
    assert token_ladder(sizes, 8192, 10**10) == (64,), "the CPU launches as long as the GPU reads"
    assert token_ladder((4, 120, 121), 8192, 10**10) == (4, 120), "or computes"


def test_a_graph_is_captured_for_each_size_and_reads_the_arrays_of_a_replay():
    stream, captured, counted = EmulatedStream(), [], []
    graphs = StepGraphs(stream, Uploads(stream), (1, 4, 2))

    def step(tensors):
        captured.append([it.tolist() for it in tensors])
        return tensors[0] + tensors[1]

    def arrays(size, value):
        return np.full(size, value, dtype=np.int32), np.arange(size, dtype=np.int64)

    assert graphs.size_for(1) is None, "nothing is captured yet"
    graphs.record(
        lambda size: arrays(size, 7), step, lambda *progress: counted.append(progress), "graphs"
    )
    assert [len(it) for it, _ in captured] == sorted((len(it) for it, _ in captured), reverse=True)
    for size in (1, 2, 4):  # what a capture runs with has no lasting effect
        assert [7] * size in [it for it, _ in captured]
    assert {tuple(set(it)) for it, _ in captured} == {(7,)}
    assert counted == [("graphs", 1, 3), ("graphs", 2, 3), ("graphs", 3, 3)]
    assert [graphs.size_for(n) for n in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    for size in (2, 4, 1, 2):
        given = arrays(size, 10 * size)
        result, inputs = graphs.run(size, given)
        assert result.tolist() == (given[0] + given[1]).tolist()
        assert all(
            torch.equal(one, torch.from_numpy(it)) for one, it in zip(inputs, given, strict=True)
        )


def test_graphs_are_captured_without_a_report_of_progress():
    stream = EmulatedStream()
    graphs = StepGraphs(stream, Uploads(stream), (2,))
    graphs.record(lambda size: [np.ones(size, np.int32)], lambda tensors: tensors[0] + 1)
    assert graphs.run(2, [np.zeros(2, np.int32)])[0].tolist() == [1, 1]


def test_steps_with_adapters_are_graphs_of_their_own():
    stream, counted = EmulatedStream(), []

    def step(tensors, slots):
        return tensors[0] * 2 if slots is None else tensors[0] + slots

    def arrays(size):
        return np.zeros(size, dtype=np.int32), np.ones(size, dtype=np.int64)

    given = np.array([10, 20], dtype=np.int32), np.array([5, 6], dtype=np.int64)
    for has_adapters in (False, True):
        steps = CapturedSteps(stream, Uploads(stream), (2,))
        steps.record(
            arrays, step, has_adapters, lambda *progress: counted.append(progress), "graphs"
        )
        assert [steps.size_for(n) for n in (1, 2, 3)] == [2, 2, None]
        slots = [None, np.array([3, -1], dtype=np.int32)][: 1 + has_adapters]
        for own, expected in zip(slots, ([20, 40], [13, 19]), strict=False):
            result, inputs = steps.run(2, given, own)
            assert result.tolist() == expected
            assert [it.tolist() for it in inputs] == [it.tolist() for it in given]
    assert counted == [("graphs", 1, 1), ("graphs", 1, 1), ("graphs with adapters", 1, 1)]

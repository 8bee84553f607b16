"""What recording a step asks of torch, with a torch that has no device."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from gptmanager.cuda.device import streams
from gptmanager.cuda.device.streams import DeviceStream


class Graph:
    def __init__(self):
        self.replay = self.pool = lambda: "memory"


@pytest.fixture
def stream(monkeypatch):
    """A DeviceStream; `calls`: what it asked of torch."""
    calls = []

    class Recording:
        def __init__(self, graph, pool, stream, capture_error_mode):
            calls.append((pool, capture_error_mode, stream is own._stream))

        def __enter__(self):
            calls.append(f"begins, {gc.isenabled()=}")

        def __exit__(self, *exc):
            calls.append("ends")

    fakes = {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device": lambda index: nullcontext(),
        "Stream": lambda: SimpleNamespace(synchronize=lambda: calls.append("waits")),
        "CUDAGraph": Graph,
        "graph": Recording,
    }

    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(streams, "find_cupy", lambda: None)
    monkeypatch.setattr(streams, "DeviceLauncher", lambda: None)
    own = DeviceStream("cuda")
    own.calls = calls
    return own


def test_a_step_runs_before_it_is_recorded_in_the_memory_of_the_last_one(stream):
    def run():
        stream.calls.append("runs")
        return torch.ones(1)

    for pool in (None, "memory"):
        replay, result = stream.capture(run)
        assert replay() == "memory" and result == 1
        assert stream.calls == [
            *("runs", "waits", (pool, "thread_local", True)),
            *("begins, gc.isenabled()=False", "runs", "ends"),
        ]
        assert gc.isenabled()
        stream.calls.clear()


def test_a_step_that_cannot_be_captured_leaves_no_trace(stream):
    runs = []

    def run():
        runs.append(1)
        if len(runs) == 2:
            raise RuntimeError("not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="capturing"):
        stream.capture(run)
    assert gc.isenabled() and stream.calls[-1] == "ends"
    assert stream._device_lock.acquire(blocking=False)
    stream._device_lock.release()


def test_a_timer_repeats_what_it_has_captured_once(stream, monkeypatch):
    """Its time does not include the capture; `seconds` is the median of several repetitions."""
    replays, runs, times = [], [], iter([7.0, 9.0, 1.0, 2.0, 8.0, 3.0, 4.0, 5.0])
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    event.elapsed_time = lambda end: next(times)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(Graph, "__init__", lambda own: setattr(own, "replay", own.play))
    monkeypatch.setattr(Graph, "play", lambda own: replays.append(own), raising=False)

    def run():
        runs.append(1)
        return torch.ones(1)

    once = stream.timer(run)
    assert (len(runs), len(replays)) == (2, 0)
    assert once() == 7e-3 and once() == 9e-3 and (len(runs), len(replays)) == (2, 2)
    assert stream.seconds(run, is_captured=False) == 3e-3
    assert (len(runs), len(replays)) == (2 + 6, 2)

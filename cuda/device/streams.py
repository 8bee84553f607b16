"""Where a step's work is enqueued: a stream of a CUDA device, or the emulator, which runs at once.

Both give what an executor needs of a device: memory that copies go from, events, and the recording
of work to be run again. Knows nothing of steps.
"""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from gptmanager.cuda.device.device import find_cupy
from gptmanager.cuda.device.launch import DeviceLauncher, EmulatorLauncher, Launcher
from gptmanager.errors import ConfigError

_REPEATS = 5  # of what is timed


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """`with stream:` makes it the current one of this thread."""

    name: str  # of the device, as hosts write it
    device: torch.device
    launcher: Launcher

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> None: ...

    def staging(self, num_bytes: int) -> Tensor:
        """Pinned memory, uint8 `[num_bytes]`: copies from and to the device do not wait for it."""

    def event(self) -> Event: ...

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record `run`: what repeats its work on the same memory, and the result, written anew."""

    def synchronize(self) -> None:
        """Wait for all that was enqueued."""

    def catch_up(self) -> None:
        """Wait for what this thread has enqueued on the stream that is current without this one."""

    def relieve(self) -> None:
        """Give back the device's memory that is held for later."""

    def free_bytes(self) -> int:
        """Memory of the device that nothing holds."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Memory that `run` holds at most, beyond what is held before."""


class DeviceStream:
    """An own stream of a CUDA device. ConfigError without CuPy, or without a device."""

    # While a stream records, the device as a whole may neither be waited for, as each recording
    # does at first, nor be asked for its free memory back: several managers take turns.
    _turn = threading.RLock()

    def __init__(self, device: torch.device | str) -> None:
        find_cupy()
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device='cuda' needs a CUDA build of torch: {torch.__version__} finds no device"
            )
        index = torch.device(device).index
        if index is not None and index >= torch.cuda.device_count():
            raise ConfigError(
                f"device='{device}': there are {torch.cuda.device_count()} CUDA devices"
            )
        self.launcher: Launcher
        with torch.cuda.device(index if index is not None else torch.cuda.current_device()):
            self.device = torch.device("cuda", torch.cuda.current_device())
            self.name = str(self.device)
            self.launcher = DeviceLauncher()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graph_memory: Any = None
        self._contexts: list[AbstractContextManager[Any]] = []

    def __enter__(self) -> DeviceStream:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        context.__enter__()
        self._contexts.append(context)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._contexts.pop().__exit__(*exc)

    def staging(self, num_bytes: int) -> Tensor:
        is_pinned = self.launcher.features.pinned
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)

    def event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        graph, result = self._record(run, self._graph_memory)
        self._graph_memory = graph.pool()  # one memory: graphs of one stream run one by one
        return graph.replay, result

    def seconds(self, run: Callable[[], Tensor]) -> float:
        """Median time of `run`, recorded, so that launches cost nothing. Waits for it."""
        graph, _ = self._record(run, None)  # its memory goes with it: no other one may share that
        events: Any = torch.cuda.Event
        begin, end = events(enable_timing=True), events(enable_timing=True)
        times = []
        for _ in range(_REPEATS):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(times)

    def _record(
        self, run: Callable[[], Tensor], memory: Any
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        run()  # what is compiled, loaded or chosen at a first call cannot be recorded
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            self._turn,
            _without_collection(),
            torch.cuda.graph(
                graph,
                pool=memory,
                stream=self._stream,
                capture_error_mode="thread_local",  # what a host's threads do there is theirs
            ),
        ):
            result = run()
        return graph, result

    def synchronize(self) -> None:
        self._stream.synchronize()

    def catch_up(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def relieve(self) -> None:
        self._stream.synchronize()
        with self._turn:
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        self.relieve()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def peak_bytes(self, run: Callable[[], object]) -> int:
        with self._turn:  # the allocator counts what all streams hold
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            run()
            self.synchronize()
            return max(0, torch.cuda.max_memory_allocated(self.device) - before)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Garbage may hold kernels and recordings, whose ends are calls that a recording forbids."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class EmulatedStream:
    """CUDA kernels on the CPU, each run to its end when it is launched: for tests."""

    def __init__(self, launcher: EmulatorLauncher | None = None) -> None:
        self.name, self.device = "emulator", torch.device("cpu")
        self.launcher: Launcher = launcher or EmulatorLauncher()

    def __enter__(self) -> EmulatedStream:
        return self

    def __exit__(self, *exc: Any) -> None:
        pass

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Event:
        return _Done()

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = run()

        def replay() -> None:
            result.copy_(run())

        return replay, result

    def synchronize(self) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def relieve(self) -> None:
        pass

    def free_bytes(self) -> int:
        return 1 << 30

    def peak_bytes(self, run: Callable[[], object]) -> int:
        return 0  # CPU memory, which is not counted; a run would take long


class _Done:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

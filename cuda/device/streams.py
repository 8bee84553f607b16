"""`Stream`: enqueues work on a CUDA device, or runs it immediately in the emulator.

Both implementations provide what an executor needs: staging memory for copies, events, and capture
of work as a CUDA graph. The emulator runs the work again instead of replaying a graph.
"""

from __future__ import annotations

import gc
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from gptmanager.cuda.device.device import find_cupy
from gptmanager.cuda.device.launch import DeviceLauncher, EmulatorLauncher, Launcher
from gptmanager.errors import ConfigError

_REPEATS = 5  # repetitions of a timed run


class Event(Protocol):
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Stream(Protocol):
    """A queue of work on one device. `with stream:` makes it the current stream of this thread."""

    name: str  # the device's name, a possible value of `OptionalParams.device`
    device: torch.device
    launcher: Launcher
    token_sizes: Sequence[int]  # numbers of tokens for which steps with contexts may be captured

    def __enter__(self) -> Any: ...

    def __exit__(self, *exc: Any) -> None: ...

    def staging(self, num_bytes: int) -> Tensor:
        """Return CPU memory, uint8 `[num_bytes]`, for asynchronous copies; pinned if possible."""

    def event(self) -> Event: ...

    def capture(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Capture `run`; return a function that replays the captured work, and the result of `run`.

        Each replay uses the same memory, and overwrites the result.
        """

    def synchronize(self) -> None:
        """Wait for all enqueued work."""

    def catch_up(self) -> None:
        """Wait for the work that is enqueued on this thread's current stream of the device."""

    def relieve(self) -> None:
        """Give the allocator's unused cached memory back to the device."""

    def free_bytes(self) -> int:
        """Return the free memory of the device in bytes, after `relieve`."""

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """Call `run`, and return by how many bytes the memory in use grew at its peak.

        The emulator returns 0 and does not call `run`.
        """


class DeviceStream:
    """A new stream of a CUDA device. Raises ConfigError without CuPy, or without this device."""

    token_sizes: Sequence[int] = (64, 128, 256, 512)
    # While a stream captures, no thread may empty the memory cache or synchronize the whole device.
    # Each capture does both at its start, so all streams of the process share this lock.
    _device_lock = threading.RLock()

    def __init__(self, device: torch.device | str) -> None:
        find_cupy()
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device='cuda' needs a CUDA build of torch: {torch.__version__} finds no device"
            )
        index = torch.device(device).index
        if index is not None and index >= torch.cuda.device_count():
            raise ConfigError(
                f"device='{device}' does not exist: there are {torch.cuda.device_count()} CUDA "
                "devices, numbered from 0"
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
        graph, result = self._capture(run, self._graph_memory)
        self._graph_memory = graph.pool()  # shared: graphs of one stream run one after another
        return graph.replay, result

    def seconds(self, run: Callable[[], Tensor], is_captured: bool = True) -> float:
        """Return the median time of `run` in seconds, as `timer` measures it."""
        once = self.timer(run, is_captured)
        return statistics.median(once() for _ in range(_REPEATS))

    def timer(self, run: Callable[[], Tensor], is_captured: bool = True) -> Callable[[], float]:
        """Return a function that runs `run` once, and returns the time of this run in seconds.

        If `is_captured`, the function runs a CUDA graph of `run`, in which launches cost almost
        nothing. Otherwise the time includes the launches.
        """
        repeat: Callable[[], object] = run
        if is_captured:
            graph, _ = self._capture(run, None)  # a private pool, which is freed with the graph
            repeat = graph.replay
        else:
            run()
        events: Any = torch.cuda.Event
        begin, end = events(enable_timing=True), events(enable_timing=True)

        def once() -> float:
            begin.record()
            repeat()
            end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return once

    def _capture(
        self, run: Callable[[], Tensor], memory: Any
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        run()  # a first call, because a capture cannot compile, load or choose kernels
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            self._device_lock,
            _without_collection(),
            torch.cuda.graph(
                graph,
                pool=memory,
                stream=self._stream,
                capture_error_mode="thread_local",  # other threads may use the device
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
        with self._device_lock:
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        self.relieve()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def peak_bytes(self, run: Callable[[], object]) -> int:
        with self._device_lock:  # the allocator counts the memory of all streams
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            run()
            self.synchronize()
            return max(0, torch.cuda.max_memory_allocated(self.device) - before)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Disable garbage collection: destroying kernels and CUDA graphs is forbidden in a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class EmulatedStream:
    """CUDA kernels on the CPU, each completed when it is launched. For tests."""

    token_sizes: Sequence[int] = ()  # captured steps save no time here, and padding costs time

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
        return 0  # CPU memory is not counted, and a run would be slow


class _Done:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

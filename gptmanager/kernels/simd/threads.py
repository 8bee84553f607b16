"""`Team`: runs a compiled body in torch's own OpenMP threads. All threads get the same task.

A second pool of threads, such as that of Numba's prange, would compete with torch's pool for the
cores, because waiting threads spin. Without OpenMP, Numba's default layer (workqueue) also aborts
the process when two managers use it from two threads. So bodies run in the OpenMP runtime that
torch has loaded: without another pool or library, and for any number of managers. The caller keeps
the interpreter lock: bodies never need it, and getting it back takes up to 5 ms if another thread
of the application is busy.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from gptmanager.environment.machine.cores import num_cores
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.lanes import loop

logger = logging.getLogger("gptmanager")

Task = TypeVar("Task", bound=ctypes.Structure)

NEXT_PART, NEXT_THREAD = 0, 1  # indices of a task's two counters
COUNTER_BYTES = 16
DEFAULT_SIZE = torch.get_num_threads()  # before the application sets another number of threads


def task_fields(longs: str, reals: str = "") -> list[tuple[str, Any]]:
    """Return a task's fields: two counters, `num_parts`, int64 `longs`, and float64 `reals`."""
    names = ["next_part", "next_thread", "num_parts", *longs.split()]
    return [(n, ctypes.c_int64) for n in names] + [(n, ctypes.c_double) for n in reals.split()]


@loop
def share_of(t: Any, part: int, count: int) -> range:
    """Return which of `count` items a part of a task has: nearly as many as each other part."""
    return range(count * part // t.num_parts, count * (part + 1) // t.num_parts)


def with_first(task: Task, *values: int) -> Task:
    """Return a copy of a task with counters at 0 and these values in the fields after them.

    All are written at once, which takes no longer than to set a single field by name.
    """
    made = type(task).from_buffer_copy(task)
    struct.pack_into(f"{2 + len(values)}q", made, 0, 0, 0, *values)
    return made


def address_of(tensor: Tensor | None, dtype: torch.dtype) -> int:
    """Return the address of the tensor's first element, or 0 for None.

    Raises TypeError as `check_layout` does.
    """
    if tensor is None:
        return 0
    check_layout(tensor, dtype)
    return tensor.data_ptr()


def check_layout(tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError if the tensor has a dtype other than `dtype`, or is not contiguous.

    Compiled bodies get only the address of a tensor, and cannot check this.
    """
    if tensor.dtype is not dtype or not tensor.is_contiguous():
        layout = "contiguous" if tensor.is_contiguous() else "strided"
        raise TypeError(f"expected a contiguous {dtype} tensor, got a {layout} {tensor.dtype} one")


def alike(x: Tensor, *others: Tensor | None, strided: bool = False) -> tuple[Any, ...]:
    """Return the tensors, made contiguous and of one dtype in `DTYPES`; None stays None.

    The tensors become float32 if their dtypes differ or are not in `DTYPES`. If `strided`, rows of
    matrices may be further apart than their length, as in a slice of columns.
    """
    dtype = x.dtype
    for other in others:
        if other is not None and other.dtype is not dtype:
            dtype = torch.float32
    if dtype not in DTYPES:
        dtype = torch.float32
    return tuple(
        it
        if it is None or (it.dtype is dtype and (it.is_contiguous() or (strided and _has_rows(it))))
        else it.to(dtype).contiguous()
        for it in (x, *others)
    )


def _has_rows(x: Tensor) -> bool:
    return x.dim() == 2 and x.stride(1) == 1


def end_threads_of_caller() -> None:
    """End the OpenMP threads that torch keeps for the calling thread.

    torch creates new threads when they are needed. Each thread that uses torch gets OpenMP threads
    of its own. If there are more OpenMP threads than cores, the GNU runtime lets no thread wait
    actively, and each parallel region must wake its threads: a step of a small model took 1.6 times
    as long after another thread had used torch.
    """
    pause = getattr(ctypes.PyDLL(torch._C.__file__), "omp_pause_resource_all", None)
    if pause is not None:
        soft = 1
        pause(soft)


def compute_alone() -> None:
    """Make the calling thread run torch's ops and bodies without other OpenMP threads."""
    set_number = getattr(ctypes.PyDLL(torch._C.__file__), "omp_set_num_threads", None)
    if set_number is not None:
        set_number(1)


def keep_within_quota() -> None:
    """Lower torch's default number of threads to the cores that control groups give this process.

    Under a quota, more threads would wait for each other longer than they work. A number that the
    application or the environment has set is not changed.
    """
    is_default = "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() == DEFAULT_SIZE
    if is_default and num_cores() < DEFAULT_SIZE:
        torch.set_num_threads(num_cores())
        logger.info(
            "the number of compute threads is %d, because the CPU quota allows as many cores; set "
            "OMP_NUM_THREADS to use another number",
            num_cores(),
        )


class Capture(Protocol):
    """Receives the tasks that a team runs, and provides their scratch memory."""

    def add(self, body: int, task: ctypes.Structure, size: int) -> None: ...

    def scratch(self, num_bytes: int) -> int: ...


class _Own(threading.local):
    """The part of a team's state that each calling thread has for itself."""

    capture: Capture | None = None
    size = -1  # bytes of scratch memory; -1: none is allocated yet


class Team:
    """Torch's OpenMP threads, or only the calling thread without `GOMP_parallel`."""

    def __init__(self) -> None:
        # Symbols are looked up in this library and in all libraries that it was linked with.
        runtime = ctypes.PyDLL(torch._C.__file__)
        self._parallel = getattr(runtime, "GOMP_parallel", None)
        if self._parallel is not None:
            self._parallel.restype = None
            self._parallel.argtypes = (
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_uint,
                ctypes.c_uint,
            )
        self._own = _Own()

    @property
    def parallel(self) -> int:
        """The address of OpenMP's `GOMP_parallel`; 0 if there is none."""
        return ctypes.cast(self._parallel, ctypes.c_void_p).value or 0 if self._parallel else 0

    @property
    def max_size(self) -> int:
        """The number of threads that `run` may use."""
        return 1 if self._parallel is None else torch.get_num_threads()

    def scratch(self, num_bytes: int) -> int:
        """Return the address of `num_bytes` of scratch memory for one `run`.

        The memory is private to the calling thread.
        """
        own = self._own
        if own.capture is not None:
            return own.capture.scratch(num_bytes)
        if own.size < num_bytes:
            own.memory = torch.empty(num_bytes, dtype=torch.uint8)
            own.address, own.size = own.memory.data_ptr(), num_bytes
        return cast(int, own.address)

    def run(self, body: int, task: ctypes.Structure, size: int) -> None:
        """Call `body(address of task)` in up to `size` threads; return when all have finished."""
        if self._own.capture is not None:
            self._own.capture.add(body, task, size)
        if size > 1 and self._parallel is not None:
            self._parallel(body, ctypes.addressof(task), size, 0)
        else:
            run_alone(body, task)

    @contextmanager
    def capturing(self, capture: Capture) -> Iterator[None]:
        """Report to `capture` all tasks that the calling thread runs in the `with` block."""
        self._own.capture = capture
        try:
            yield
        finally:
            self._own.capture = None


def run_alone(body: int, task: ctypes.Structure) -> None:
    """Call `body(address of task)` on the calling thread."""
    _function(body)(ctypes.addressof(task))


@functools.cache
def _function(body: int) -> Callable[[int], None]:
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(body)

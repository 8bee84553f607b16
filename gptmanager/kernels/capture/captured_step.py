"""`StepCapture`: generation steps captured as lists of tasks, and replayed without their ops.

Steps with the same number of rows run the same tasks on threads: only the contents of the input
tensors differ. The second step with a number of rows is captured while its ops run. Later steps
with this number of rows replay the list of tasks. A replay saves the time of the Python code of
every op, a third to half of a small model's step. As in the memory pool of CUDA graphs, later ops
reuse the memory of tensors that no op needs any more.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gptmanager.kernels.capture.task_list import TaskList, run_tasks
from gptmanager.kernels.simd.machine_code import compiled
from gptmanager.kernels.simd.threads import COUNTER_BYTES, Team
from gptmanager.kernels.torch_operations import TorchOperations
from gptmanager.lifecycle.clock import perf_counter

Compute = Callable[[Sequence[Tensor]], Tensor]
Begin = Callable[[bool], None]

MAX_CAPTURED_STEPS = 64
# If the last replay of a step took longer, the next replay releases the interpreter lock, so that
# other threads of the host run during the replay. If another thread is busy at the end of the
# replay, the replay needs up to 5 ms to get the lock back. With a smaller LONG_S, shorter steps
# would have this delay, too.
LONG_S = 0.005
TASK_ALIGNMENT = 64
_aten = torch.ops.aten
_NEW = {_aten.empty.memory_format, _aten.empty_like.default, _aten.new_empty.default}


def ignore(is_unlocked: bool) -> None:
    """Do nothing. This is the default `begin`."""


class _Memory:
    """Tensors and scratch that all captured steps share, since only one step runs at a time.

    The bytes of a freed tensor are reused by the next tensor of about the same size.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}
        self._scratch: Tensor | None = None

    def _bytes(self, size: int) -> Tensor:
        """Return new bytes that are never moved: captured steps hold their address."""
        self._kept.append(torch.empty(size, dtype=torch.uint8))
        return self._kept[-1]

    def scratch(self, num_bytes: int) -> int:
        if self._scratch is None or self._scratch.nbytes < num_bytes:
            self._scratch = self._bytes(num_bytes)
        return self._scratch.data_ptr()

    def tensor(self, like: Tensor) -> Tensor:
        """Return an uninitialized tensor of the shape and dtype of `like`, a contiguous tensor."""
        size = 1 << (like.nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        own = free.pop() if free else self._bytes(size)
        array = own.numpy()
        # only the tensor's storage refers to the array, so both are freed together
        weakref.finalize(array, free.append, own).atexit = False
        tensor = torch.from_numpy(array)[: like.nbytes]
        return tensor.view(like.dtype).view(like.shape)


class _Capture(TorchOperations):  # type: ignore[no-untyped-call]
    """Captures the tasks that run in its `with` block.

    `is_whole` becomes False when torch itself computes something.
    """

    def __init__(self, memory: _Memory) -> None:
        super().__init__()
        self.tasks: list[tuple[int, ctypes.Structure, int]] = []
        self.is_whole = True
        self.scratch = memory.scratch
        self._memory = memory

    def see(self, function: Any, args: Sequence[Any], result: Any) -> Any:
        if function in _NEW and result.is_contiguous():
            return self._memory.tensor(result)
        self.is_whole &= function.is_view and not _is_copied(args, result)
        return result

    def add(self, body: int, task: ctypes.Structure, size: int) -> None:
        self.tasks.append((body, task, size))


def _is_copied(args: Sequence[Any], result: Any) -> bool:
    """Return whether an op that may return a view has made a copy, as `contiguous` and `to` may."""
    if not isinstance(result, Tensor):
        return False
    own = result.untyped_storage().data_ptr()
    return all(own != it.untyped_storage().data_ptr() for it in args if isinstance(it, Tensor))


class _CapturedStep:
    """The tasks of a step in one block of memory, with the tensors that they read and write.

    The last task writes the step's result, to a new tensor in each run.
    """

    def __init__(
        self,
        team: Team,
        memory: _Memory,
        tasks: Sequence[tuple[int, ctypes.Structure, int]],
        inputs: Sequence[Tensor],
        result: Tensor,
    ) -> None:
        self._memory, self._inputs = memory, inputs
        self._shape, self._dtype = result.shape, result.dtype
        sizes = [-(-ctypes.sizeof(task) // TASK_ALIGNMENT) * TASK_ALIGNMENT for _, task, _ in tasks]
        self._fresh, self._tasks = torch.zeros(2, sum(sizes), dtype=torch.uint8)
        calls = []
        offset, address, fresh = 0, self._tasks.data_ptr(), self._fresh.data_ptr()
        for (body, task, size), num_bytes in zip(tasks, sizes, strict=True):
            ctypes.memmove(fresh + offset, ctypes.addressof(task), ctypes.sizeof(task))
            ctypes.memset(fresh + offset, 0, COUNTER_BYTES)
            calls.append((body, address + offset, size))
            offset += num_bytes
        kind, start = type(tasks[-1][1]), fresh + offset - sizes[-1]
        self._last: Any = kind.from_address(start)
        self._copy = address, fresh, offset
        self._calls = torch.tensor(calls, dtype=torch.int64)
        self._list = TaskList(
            calls=self._calls.data_ptr(), count=len(calls), parallel=team.parallel
        )
        self._seconds = 0.0  # duration of the last run

    def run(self, inputs: Sequence[Tensor], begin: Begin) -> Tensor:
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        result = torch.empty(self._shape, dtype=self._dtype)
        self._last.result = result.data_ptr()
        ctypes.memmove(*self._copy)
        is_long = self._seconds > LONG_S
        run = _run_unlocked if is_long else _run_locked
        begin(is_long)
        start = perf_counter()
        run()(ctypes.addressof(self._list))
        self._seconds = perf_counter() - start
        return result


@functools.cache
def _run_locked() -> Callable[[int], None]:
    return ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(compiled(run_tasks))


@functools.cache
def _run_unlocked() -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(compiled(run_tasks))


class StepCapture:
    """Captured steps by number of rows. The second step with a number of rows is captured.

    A step in which torch itself computes something is never captured. All steps are of one model
    over one KV cache, and only one step runs at a time. The least recently used step is evicted.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._known: OrderedDict[tuple[int, int], _CapturedStep | None] = OrderedDict()
        self._seen: set[tuple[int, int]] = set()
        self._constant: object = None
        self._memory = _Memory()

    def run(
        self,
        inputs: Sequence[Tensor],
        constant: object,
        compute: Compute,
        begin: Begin = ignore,
    ) -> Tensor:
        """Return `compute(inputs)`, by replaying a captured step if there is one.

        `inputs` are all tensors that differ between steps; their shapes depend only on the length
        of the first input. `constant` holds other tensors that captured steps read. If a call
        passes another object as `constant`, all captured steps are dropped. `begin` is called once,
        right before the computation; its argument is whether the computation releases the
        interpreter lock.
        """
        if constant is not self._constant:
            self._known.clear()
            self._constant, self._memory = constant, _Memory()
        key = len(inputs[0]), self._team.max_size
        step = self._known.get(key)
        if step is not None:
            self._known.move_to_end(key)
            return step.run(inputs, begin)
        begin(False)
        if key in self._known:
            return compute(inputs)
        if key not in self._seen:
            self._seen.add(key)
            return compute(inputs)
        return self._capture(key, inputs, compute)

    def _capture(self, key: tuple[int, int], inputs: Sequence[Tensor], compute: Compute) -> Tensor:
        capture, own = _Capture(self._memory), [given.clone() for given in inputs]
        with self._team.capturing(capture), capture:
            result = compute(own)
        step, tasks = None, capture.tasks
        if capture.is_whole and tasks:
            last = getattr(tasks[-1][1], "result", None)
            if last == result.data_ptr() and result.is_contiguous():
                step = _CapturedStep(self._team, self._memory, tasks, own, result)
        self._known[key] = step
        if len(self._known) > MAX_CAPTURED_STEPS:
            old, _ = self._known.popitem(last=False)
            self._seen.discard(old)
        return result.clone()  # in a replay, an earlier op may write to the memory of `result`

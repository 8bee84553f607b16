"""A logits post-processor given as CUDA C++ source.

The module decides when the kernel is compiled, and launches the kernel once per step for all its
rows. CuPy runs the kernel on a CUDA device. On the CPU the emulator runs it, or a Python function
(a twin) runs in its place.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gptmanager.arguments import at_least
from gptmanager.config import DEVICE
from gptmanager.cuda import emulator
from gptmanager.cuda.device.device import find_cupy
from gptmanager.cuda.device.launch import DeviceLauncher
from gptmanager.cuda.device.streams import Stream
from gptmanager.cuda.device.uploads import Layout, Uploads
from gptmanager.decoding.processors.kernel_signature import PARAMETERS, difference, with_signature
from gptmanager.decoding.processors.rows import Errors, RowProcessor, Rows, RowSession
from gptmanager.errors import CapacityError, ConfigError, quoted, response_text
from gptmanager.request.post_processor import BoundProcessor

_NUM_BUFFERS = 6  # a step uses at most two buffers, and only a few steps are in flight
# called with (grid, block, arguments), as CuPy's and the emulator's kernels are
Launch = Callable[[tuple[int], tuple[int], tuple[Any, ...]], None]


class RawKernelLogitsPostProcessor(RowProcessor):
    """A kernel over rows of logits; requests pass `processor.bind(...)`.

    `source` is CUDA C++ with a kernel of this signature. It is launched with one block of `block`
    threads for each row, so that `blockIdx.x` is the row's index:

        extern "C" __global__ void kernel_name(
            float* logits,              // [.., vocab_size], of the whole step; changed in place
            const int* rows,            // [gridDim.x] which row of the logits
            const int* slots,           // [gridDim.x] which entry of `params` and `tokens`
            const Params* params,       // by slot: the values passed to `bind`
            const int* lengths,         // [gridDim.x] tokens of the history
            const int* prompt_lengths,  // [gridDim.x] how many of them the host sent
            const int* tokens,          // [.., max_seq_len], by slot: the histories
            int max_seq_len,
            int vocab_size)

    `params_dtype` has the fields of Params. It is a structured dtype with `align=True`; the macro
    PARAMS_SIZE is its size in bytes. `options` are macros, such as `-DNAME=1`. `twin` is a callable
    with the same parameters, which gets NumPy arrays and ints. A manager on the CPU calls `twin`
    instead of emulating the kernel.

    The kernel is compiled once per device, on a separate thread, and requests wait for the
    compilation. If the compilation fails, the requests end with an error that quotes the compiler's
    log, or the first wrong parameter. If memory or disk space was short, later requests try again.
    Call `compile` to compile the kernel before requests need it.
    Raise ConfigError for invalid arguments.
    """

    def __init__(
        self,
        source: str,
        kernel_name: str,
        params_dtype: Any,
        block: int = 256,
        *,
        options: Sequence[str] = (),
        twin: Callable[..., None] | None = None,
    ) -> None:
        if not isinstance(source, str):
            raise ConfigError(f"source must be a string of CUDA C++, got {quoted(source)}")
        if "\n" not in source and source.endswith((".cu", ".cuh")):
            raise ConfigError(f"source = {source!r} is a path: pass the text of the file")
        if isinstance(options, str) or not all(isinstance(one, str) for one in options):
            raise ConfigError(f"options must be a sequence of strings, got {options!r}")
        self.source = source
        self.name = self.kernel_name = kernel_name
        self.params_dtype = _struct(params_dtype)
        self.block = at_least(1, "block", block, 1024)
        self.options = (*options, f"-DPARAMS_SIZE={self.params_dtype.itemsize}")
        self.twin = None if twin is None else _checked_twin(twin)
        self._lock = threading.Lock()
        self._compiled: dict[str, Future[Launch]] = {}  # by device

    def bind(self, **params: Any) -> BoundKernel:
        """Return the processor of a request, with a value for each field of `params_dtype`.

        Raise TypeError for missing or unknown fields, ValueError for a value that does not fit.
        """
        fields = self.params_dtype.names or ()
        if params.keys() != set(fields):
            given = ", ".join(params) or "nothing"
            raise TypeError(f"{self.name} takes {', '.join(fields)}; got {given}")
        return BoundKernel(self, params)

    def compile(self, device: str = "cpu") -> None:
        """Compile the kernel now. Raise ConfigError with the compiler's log if that fails."""
        if not DEVICE.fullmatch(device):
            raise ConfigError(
                f"device = {device!r} must be 'cpu', 'emulator', or 'cuda:N' with a number N"
            )
        self.prepare(device).result()

    def prepare(self, device: str) -> Future[Launch]:
        """Return the future of the function that launches on "cpu", "emulator" or "cuda:N".

        The kernel is compiled in another thread. On "cpu" a `twin` is used without compilation.
        Raise CapacityError if no thread can be started.
        """
        with self._lock:
            future = self._compiled.get(device)
            if future is not None:
                return future
            future = self._compiled[device] = Future()
        if device == "cpu" and self.twin is not None:
            future.set_result(_call_twin(self.twin, self.params_dtype))
        else:
            work = functools.partial(self._compile, device, future)
            try:
                threading.Thread(target=work, name=f"compile {self.name}", daemon=True).start()
            except RuntimeError as error:
                self._forget(device)
                raise CapacityError(f"{self.name} cannot be compiled: {error}") from None
        return future

    def open(self, num_lines: int, stream: Stream | None) -> RowSession:
        launch = self.prepare("cpu" if stream is None else stream.name).result()
        return _Session(launch, self.block, (num_lines, self.params_dtype.itemsize), stream)

    def _compile(self, device: str, future: Future[Launch]) -> None:
        source = with_signature(self.source, self.kernel_name)
        try:
            if device in ("cpu", "emulator"):
                module = emulator.Module(
                    source=source, name_expressions=[self.kernel_name], options=self.options
                )
                future.set_result(module.get_function(self.kernel_name))
            else:
                find_cupy()
                with torch.cuda.device(device):  # a new thread starts with device 0
                    kernel = DeviceLauncher().load(source, self.kernel_name, self.options)
                future.set_result(kernel)
        except BaseException as error:  # noqa: B036 - raised where the future is waited for
            if isinstance(error, OSError | MemoryError):  # not because of the source
                self._forget(device)
            why = response_text(error)
            why = difference(why, self.source, self.kernel_name) or why
            text = f"{self.name} cannot be compiled: {why}"
            future.set_exception(ConfigError(text))

    def _forget(self, device: str) -> None:
        """Let the next request compile the kernel again."""
        with self._lock:
            del self._compiled[device]


class BoundKernel(BoundProcessor):
    """A kernel with a request's parameters."""

    owner: RawKernelLogitsPostProcessor

    def __init__(self, owner: RawKernelLogitsPostProcessor, params: Mapping[str, Any]) -> None:
        super().__init__(owner)
        self.record = np.zeros((), dtype=owner.params_dtype)
        for name, value in params.items():
            kind = owner.params_dtype[name]
            try:
                _check_kind(value, kind)
                with np.errstate(over="raise"):
                    self.record[name] = value
            except (TypeError, ValueError, ArithmeticError) as error:
                raise ValueError(
                    f"{owner.name}: {name} = {value!r} must fit dtype {kind}: {error}"
                ) from None

    def prepare(self, device: str) -> Future[Launch]:
        return self.owner.prepare(device)


class _Session(RowSession):
    """The parameters of each line, and the arguments of a step's rows, in memory that never moves.

    A line is an entry of the kernel's `params` and `tokens`; the kernel calls its index a slot.

    `launch` allocates nothing, reads nothing on the CPU and does not wait. After a first step,
    `launch` can be captured in a CUDA graph. The graph can be replayed after an `update` with at
    most as many rows as were captured.
    """

    def __init__(
        self, launch: Launch, block: int, shape: tuple[int, int], stream: Stream | None
    ) -> None:
        """Allocate memory. `shape`: the number of lines, and the bytes of parameters per line."""
        self._launch = launch
        self._block = block
        device = torch.device("cpu") if stream is None else stream.device
        self._params = torch.zeros(shape, dtype=torch.uint8, device=device)
        self._numbers = torch.zeros((4, shape[0]), dtype=torch.int32, device=device)
        self._uploads = None if stream is None else Uploads(stream, _NUM_BUFFERS)
        self._started: dict[int, npt.NDArray[np.uint8]] = {}  # parameters to upload, by line

    def load(self, line: int, bound: BoundKernel) -> None:
        self._started[line] = np.frombuffer(bound.record.tobytes(), dtype=np.uint8)

    def process(self, rows: Rows) -> Errors:
        self.update(rows)
        self.launch(rows.logits, rows.token_tensor, len(rows.sequences))
        return {}

    def update(self, rows: Rows, spare_row: int = 0) -> None:
        """Write the arguments of the next launch.

        Blocks beyond the rows repeat the work of the first row, on the unused row `spare_row` of
        the logits.
        """
        if self._started:
            self._place_params()
        prompts = [sequence.orig_prompt_len for sequence in rows.sequences]
        own = np.array([rows.index, rows.lines, rows.lengths, prompts], dtype=np.int32)
        numbers = np.empty(self._numbers.shape, dtype=np.int32)
        numbers[:] = own[:, :1] if prompts else [[0], [0], [1], [1]]
        numbers[0] = spare_row
        numbers[:, : len(prompts)] = own
        self._write(self._numbers, numbers)

    def launch(self, logits: Tensor, tokens: Tensor, num_blocks: int) -> None:
        """Launch `num_blocks` blocks, at least one for each row of the last `update`.

        `logits` and `tokens` are the tensors of the step of that `update`.
        """
        index, lines, lengths, prompt_lengths = self._numbers.unbind()
        arguments = (
            *(logits, index, lines, self._params, lengths, prompt_lengths, tokens),
            *(np.int32(tokens.shape[1]), np.int32(logits.shape[1])),
        )
        self._launch((num_blocks,), (self._block,), arguments)

    def _place_params(self) -> None:
        """Upload the parameters of all sequences that have started, in one copy."""
        lines, records = np.array([*self._started]), np.array([*self._started.values()])
        self._started.clear()
        if self._uploads is None:
            self._params.numpy()[lines] = records
        else:
            self._params.index_copy_(0, *self._uploads.upload((lines, records)))

    def _write(self, memory: Tensor, array: npt.NDArray[Any]) -> None:
        """Copy an array to the arguments, without waiting for a device."""
        if self._uploads is None:
            memory.numpy()[:] = array
        else:
            self._uploads.fill(memory.view(-1).view(torch.uint8), Layout([array]), [array])


def _call_twin(twin: Callable[..., None], params_dtype: np.dtype[Any]) -> Launch:
    def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        logits, rows, lines, params, lengths, prompt_lengths, tokens, *sizes = arguments
        records = params.numpy().view(params_dtype)[:, 0]
        rows, lines, lengths, prompt_lengths = (
            numbers.numpy()[: grid[0]] for numbers in (rows, lines, lengths, prompt_lengths)
        )
        arrays = logits.numpy(), rows, lines, records, lengths, prompt_lengths, tokens.numpy()
        twin(*arrays, *map(int, sizes))

    return launch


def _checked_twin(twin: Callable[..., None]) -> Callable[..., None]:
    try:
        inspect.signature(twin).bind(*PARAMETERS)
    except TypeError as error:
        raise ConfigError(
            f"twin = {twin!r} must accept these arguments ({error}): ({', '.join(PARAMETERS)})"
        ) from None
    except ValueError:  # a callable in another language may have no signature
        pass
    return twin


def _check_kind(value: Any, dtype: np.dtype[Any]) -> None:
    """Raise TypeError if NumPy would truncate a fraction, or convert None to NaN."""
    given = np.asarray(value).dtype
    if given.kind == "O" or (given.kind in "fc" and dtype.base.kind in "biu"):
        raise TypeError(f"its dtype is {given}")


def _struct(params_dtype: Any) -> np.dtype[Any]:
    """Return a structured dtype with the memory layout of the C++ struct."""
    try:
        dtype: np.dtype[Any] = np.dtype(params_dtype)
    except (TypeError, ValueError):
        raise ConfigError(
            "params_dtype must be a dtype or a list such as [('token', 'int32')], "
            f"got {quoted(params_dtype)}"
        ) from None
    if not dtype.names:
        raise ConfigError(f"params_dtype = {dtype} is not a structured dtype with fields")
    formats = [dtype[name] for name in dtype.names]
    aligned = np.dtype({"names": dtype.names, "formats": formats}, align=True)
    if dtype.itemsize != aligned.itemsize or dtype.fields != aligned.fields:
        raise ConfigError(
            f"params_dtype = {dtype} does not have the memory layout of a C++ struct: create it "
            "with align=True"
        )
    return dtype

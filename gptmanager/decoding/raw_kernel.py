"""A logits post-processor given as CUDA C++ source.

Decides when it is compiled, what it finds in memory, and how it is launched: once a step for all
its rows. On a CUDA device by CuPy, on the CPU by the emulator, or by a twin in Python. Knows
nothing of what the kernel does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda import emulator
from gptmanager.cuda.device import find_cupy
from gptmanager.decoding.rows import Errors, RowProcessor, Rows, RowSession
from gptmanager.errors import ConfigError, response_text
from gptmanager.post_processor import BoundProcessor

# (grid, block, arguments): CuPy's and the emulator's kernels are called so
Launch = Callable[[tuple[int], tuple[int], tuple[Any, ...]], None]


class RawKernelLogitsPostProcessor(RowProcessor):
    """A kernel over rows of logits; requests bring `processor.bind(...)`.

    `source`: CUDA C++ with a kernel of this signature, launched with one block of `block` threads
    for each row, so that `blockIdx.x` says which:

        extern "C" __global__ void kernel_name(
            float* logits,              // [.., vocab_size], of the whole step; changed in place
            const int* rows,            // [gridDim.x] which row of the logits
            const int* slots,           // [gridDim.x] which entry of `params` and `tokens`
            const Params* params,       // by slot: what `bind` was given
            const int* lengths,         // [gridDim.x] tokens of the history
            const int* prompt_lengths,  // [gridDim.x] how many of them the host sent
            const int* tokens,          // [.., max_seq_len], by slot: the histories
            int max_seq_len,
            int vocab_size)

    `params_dtype`: the fields of Params, a structured dtype with `align=True`; its size is the
    macro PARAMS_SIZE. `options`: macros, as `-DNAME=1`. `twin`: a callable on the same arguments as
    NumPy arrays and ints, which the CPU runs instead of emulating the kernel.

    Compiled once a device, off the loop thread: a request waits for it, or ends with the compiler's
    log. `compile` does it in the caller's line. Raises ConfigError for what cannot be right.
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
        if not 1 <= block <= 1024:
            raise ConfigError(f"block = {block} is outside 1..1024")
        self.source = source
        self.name = self.kernel_name = kernel_name
        self.params_dtype = _struct(params_dtype)
        self.block = block
        self.options = (*options, f"-DPARAMS_SIZE={self.params_dtype.itemsize}")
        self.twin = twin
        self._lock = threading.Lock()
        self._compiled: dict[str, Future[Launch]] = {}  # by type of device

    def bind(self, **params: Any) -> BoundKernel:
        """What a request brings: a value for each field. Raises TypeError, ValueError."""
        fields = self.params_dtype.names or ()
        if params.keys() != set(fields):
            raise TypeError(f"{self.name} takes {', '.join(fields)}; got {', '.join(params)}")
        return BoundKernel(self, params)

    def compile(self, device: str = "cpu") -> None:
        """Compile now, if that has not been done; ConfigError with the compiler's log."""
        self.prepare(device).result()

    def prepare(self, device: str) -> Future[Launch]:
        """Begin to compile, in another thread."""
        kind = torch.device(device).type
        with self._lock:
            future = self._compiled.get(kind)
            if future is not None:
                return future
            future = self._compiled[kind] = Future()
        if kind == "cpu" and self.twin is not None:
            future.set_result(_call_twin(self.twin, self.params_dtype))
        else:
            threading.Thread(
                target=self._compile, args=(kind, future), name=f"compile {self.name}", daemon=True
            ).start()
        return future

    def open(self, num_lines: int, device: torch.device) -> KernelSession:
        launch = self.prepare(str(device)).result()
        return KernelSession(launch, self.block, self.params_dtype, num_lines, device)

    def _compile(self, kind: str, future: Future[Launch]) -> None:
        compile_for = {"cpu": _compile_for_cpu, "cuda": _compile_for_cuda}[kind]
        try:
            future.set_result(compile_for(self.source, self.kernel_name, self.options))
        except BaseException as error:  # noqa: B036 - whoever waits is told
            text = f"{self.name} cannot be compiled: {response_text(error)}"
            future.set_exception(ConfigError(text))


class BoundKernel(BoundProcessor):
    """A request's parameters of a kernel."""

    def __init__(self, owner: RawKernelLogitsPostProcessor, params: Mapping[str, Any]) -> None:
        super().__init__(owner)
        self.record = np.zeros((), dtype=owner.params_dtype)
        for name, value in params.items():
            try:
                self.record[name] = value
            except (TypeError, ValueError, OverflowError) as error:
                kind = owner.params_dtype[name]
                raise ValueError(
                    f"{owner.name}: {name} = {value!r} is no {kind}: {error}"
                ) from None

    def prepare(self, device: str) -> Future[Launch]:
        prepared: Future[Launch] = self.owner.prepare(device)
        return prepared


class KernelSession(RowSession):
    """A kernel's buffers on the device, which stay where they are, and its launch.

    `update` copies what has changed to them, `launch` reads nothing else: it allocates nothing,
    waits for nothing and looks at nothing on the host, so that a CUDA graph may hold it, captured
    after a first step, and be replayed behind any `update` of as many blocks.
    """

    def __init__(
        self,
        launch: Launch,
        block: int,
        params_dtype: np.dtype[Any],
        num_lines: int,
        device: torch.device,
    ) -> None:
        self._launch = launch
        self._block = block
        self._params = torch.zeros(
            (num_lines, params_dtype.itemsize), dtype=torch.uint8, device=device
        )
        # rows, slots, lengths, prompt lengths; where there was never a row, a history of one token
        self._staging = np.zeros((4, num_lines), dtype=np.int32)
        self._staging[2:] = 1
        self._numbers = torch.from_numpy(self._staging).to(device, copy=True)
        self._tokens = torch.zeros((num_lines, 0), dtype=torch.int32, device=device)
        self._known = np.zeros(num_lines, dtype=np.int64)  # tokens of each line that are there

    def load(self, line: int, bound: BoundKernel) -> None:
        raw = np.frombuffer(bound.record.tobytes(), dtype=np.uint8)
        self._send(raw.copy(), self._params[line])
        self._known[line] = 0

    def process(self, rows: Rows) -> Errors:
        self.update(rows)
        self.launch(rows.logits, len(rows.lines))
        return {}

    def update(self, rows: Rows, num_blocks: int | None = None, spare_row: int = 0) -> None:
        """What the next launch of `num_blocks` works on; None: as many as there are rows.

        Blocks beyond them do what the first one does, to the logits' row `spare_row`, which should
        be nobody's.
        """
        self._update_tokens(rows)
        count = len(rows.lines)
        staging = self._staging[:, : count if num_blocks is None else num_blocks]
        if count:
            staging[0, :count], staging[1, :count] = rows.index, rows.lines
            staging[2, :count] = rows.lengths
            staging[3, :count] = [sequence.orig_prompt_len for sequence in rows.sequences]
            staging[1:, count:] = staging[1:, :1]
        staging[0, count:] = spare_row
        self._send(self._staging, self._numbers)

    def launch(self, logits: Tensor, num_blocks: int) -> None:
        """`logits` float32 `[.., vocab]`: those that the rows of `update` are of.

        As many blocks as there are lines at most, else ValueError.
        """
        if num_blocks > len(self._known):
            raise ValueError(f"{num_blocks} blocks for {len(self._known)} lines")
        rows, slots, lengths, prompt_lengths = self._numbers.unbind()
        tokens = self._tokens
        arguments = (
            *(logits, rows, slots, self._params, lengths, prompt_lengths, tokens),
            *(np.int32(tokens.shape[1]), np.int32(logits.shape[1])),
        )
        self._launch((num_blocks,), (self._block,), arguments)

    def _update_tokens(self, rows: Rows) -> None:
        """The last token of each history, or all of one that is new here, or may have forked."""
        lines, lengths, max_seq_len = rows.lines, rows.lengths, rows.tokens.shape[1]
        if self._tokens.shape[1] != max_seq_len:  # the first step of a manager
            self._tokens = self._tokens.new_zeros((len(self._known), max_seq_len))
        ends = lengths - 1
        forks = [sequence.is_searched for sequence in rows.sequences]
        appended = (self._known[lines] == ends) & ~np.array(forks, dtype=bool)
        for place in np.flatnonzero(~appended).tolist():
            line, length = lines[place], lengths[place]
            self._send(rows.tokens[line, :length], self._tokens[line, :length])
        if appended.any():
            lines, ends = lines[appended], ends[appended]
            device = self._tokens.device
            index = _sendable(lines * max_seq_len + ends, device).to(device, non_blocking=True)
            values = _sendable(rows.tokens[lines, ends], device).to(device, non_blocking=True)
            self._tokens.view(-1).index_copy_(0, index, values)
        self._known[rows.lines] = lengths

    def _send(self, values: np.ndarray, there: Tensor) -> None:
        there.copy_(_sendable(values, there.device), non_blocking=True)


def _sendable(values: np.ndarray, device: torch.device) -> Tensor:
    """For an asynchronous copy to `device`, during which `values` may change."""
    tensor = torch.from_numpy(values)
    # torch takes pinned memory back only when the copies from it have ended
    return tensor.pin_memory() if device.type == "cuda" else tensor


def _compile_for_cpu(source: str, kernel_name: str, options: Sequence[str]) -> Launch:
    module = emulator.Module(source=source, name_expressions=[kernel_name], options=options)
    kernel = module.get_function(kernel_name)
    return lambda grid, block, arguments: kernel(grid, block, arguments)


def _compile_for_cuda(source: str, kernel_name: str, options: Sequence[str]) -> Launch:
    cupy = find_cupy()
    kernel = cupy.RawKernel(source, kernel_name, options=("-std=c++17", *options))
    kernel.compile()

    def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        given = (np.uintp(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments)
        stream = torch.cuda.current_stream(arguments[0].device)
        with cupy.cuda.ExternalStream(stream.cuda_stream, stream.device_index):
            kernel(grid, block, tuple(given))

    return launch


def _call_twin(twin: Callable[..., None], params_dtype: np.dtype[Any]) -> Launch:
    def launch(grid: tuple[int], block: tuple[int], arguments: tuple[Any, ...]) -> None:
        logits, rows, slots, params, *rest = arguments
        lengths, prompt_lengths, tokens, max_seq_len, vocab_size = rest
        records = params.numpy().view(params_dtype)[:, 0]
        twin(
            *(logits.numpy(), rows.numpy()[: grid[0]], slots.numpy()[: grid[0]], records),
            *(lengths.numpy()[: grid[0]], prompt_lengths.numpy()[: grid[0]], tokens.numpy()),
            *(int(max_seq_len), int(vocab_size)),
        )

    return launch


def _struct(params_dtype: Any) -> np.dtype[Any]:
    """A structured dtype that lies in memory as the struct in C++ does."""
    dtype: np.dtype[Any] = np.dtype(params_dtype)
    if not dtype.names:
        raise ConfigError(f"params_dtype = {dtype} is not a structured dtype with fields")
    formats = [dtype[name] for name in dtype.names]
    aligned = np.dtype({"names": dtype.names, "formats": formats}, align=True)
    if dtype.itemsize != aligned.itemsize or dtype.fields != aligned.fields:
        raise ConfigError(
            f"params_dtype = {dtype} does not lie in memory as a struct in C++ does: make it with "
            "align=True"
        )
    return dtype

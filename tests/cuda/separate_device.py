"""A device whose tensors are not the host's, for tests where there is no GPU.

Its tensors lie in the CPU's memory and are computed with there. But they say that they lie on
another device, no operation takes some of them and some of the host's, and none can be seen as a
NumPy array: as with a GPU's. Whatever moves between host and device must say so, arrives as late as
it may, and is refused in a recording.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from late_copies import LateCopies, LateEvent
from recorded_work import RecordedWork, leaves_of
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

import gptmanager
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import EmulatedStream

DEVICE = torch.device("meta")  # a device's name that torch knows without its libraries
_CPU = torch.device("cpu")
_INDEXED = ("index", "index_put_")  # by the host's indices, too
_READS = ("_local_scalar_dense", "item", "equal", "nonzero", "masked_select", "is_nonzero")
_PACKAGE = str(Path(gptmanager.__file__).parent)


class DeviceTensor(Tensor):
    """`own`: where it really lies."""

    @staticmethod
    def __new__(cls, own):
        options = {"strides": own.stride(), "dtype": own.dtype, "device": DEVICE}
        with torch.inference_mode(False):
            tensor = Tensor._make_wrapper_subclass(cls, own.shape, **options)
        tensor.own = own
        return tensor

    def __repr__(self):
        return f"DeviceTensor({self.own})"

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {}, None)


class SeparateDevice(TorchDispatchMode):
    """While it is entered, in its thread, what is made on `DEVICE` is made of `DeviceTensor`, and
    what is done with it is enqueued on `stream`, if there is one.
    """

    def __init__(self, stream=None):
        super().__init__()
        self._stream = stream

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # which costs time at each operation, and nothing is compiled here

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {}, self._stream)


def _run(function, args, kwargs, stream):
    name = function._schema.name.partition("::")[2]
    leaves = [*leaves_of((args, kwargs))]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if _is_there(tensor)]
    host = [tensor for tensor in tensors if tensor.dim() and not _is_there(tensor)]
    indexed = name in _INDEXED and bool(host) and _is_there(args[0])
    moves = name in ("_to_copy", "to", "copy_")
    if there and host and not moves and not indexed:
        raise RuntimeError(f"{name} of tensors on two devices")
    to = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    is_there = to == DEVICE if to is not None else bool(there)
    if moves and to is None:
        is_there = _is_there(args[0])
    if there and stream is None and "iterate" in dict(_frames()):
        raise RuntimeError(f"{name} on the default stream")
    crosses = indexed or (moves and is_there != _is_there(args[name == "copy_"]))
    real_args, real_kwargs = real(args), real(kwargs)
    with torch._C._DisableTorchDispatch():
        if stream is not None and (crosses or (name in _READS and there)):
            if kwargs.get("non_blocking") or (name == "copy_" and args[2:] == (True,)):
                source = real_args[name == "copy_"]
                to = real_args[0] if name == "copy_" else stream.memory_for(source, is_there)
                if stream.copy(to, source, is_there):
                    return args[0] if name == "copy_" else DeviceTensor(to) if is_there else to
            stream.wait(name)
        result = function(*real_args, **real_kwargs)
        if name == "to" and crosses:
            result = result.clone()  # another device's memory is another memory
        if stream is not None and stream.recording is not None and is_there:
            stream.recording.add(function, real_args, real_kwargs, result)
    given = {id(_real(tensor)): tensor for tensor in tensors}

    def wrap(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in given:
            return given[id(leaf)]
        return DeviceTensor(leaf) if is_there else leaf

    return _map(wrap, result)


def _frames():
    """Where in the package this is, the innermost first."""
    frame, frames = sys._getframe(1), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            frames.append((frame.f_code.co_name, f"{frame.f_code.co_filename}:{frame.f_lineno}"))
        frame = frame.f_back
    return frames


def _is_there(tensor):
    return isinstance(tensor, DeviceTensor)


def real(tree):
    """The same of tensors as they really are."""
    return _map(_real, tree)


def _map(function, tree):
    """Nested lists, tuples and dicts, with what `function` returns for each value in them."""
    if isinstance(tree, list | tuple) and not isinstance(tree, torch.Size):
        return type(tree)([_map(function, value) for value in tree])
    if isinstance(tree, dict):
        return {name: _map(function, value) for name, value in tree.items()}
    return function(tree)


def _real(leaf):
    if isinstance(leaf, torch.device):
        return _CPU
    return leaf.own if isinstance(leaf, DeviceTensor) else leaf


class SeparateLauncher(EmulatorLauncher):
    """Kernels get the device's memory; the one that copies blocks gets pinned memory, too."""

    def __init__(self, stream, **options):
        super().__init__(**options)
        self._stream = stream

    def kernel(self, program, name, shared_mem=0):
        kernel = super().kernel(program, name, shared_mem)

        def launch(grid, block, args, shared_mem=0):
            assert all(grid), f"{name}: CuPy would launch a block for the grid {grid}"
            for argument in args if program.file != "attention/block_copy.cu" else ():
                is_host = isinstance(argument, Tensor) and not isinstance(argument, DeviceTensor)
                assert not is_host, f"{name} got memory of the host"
            self._stream.launch(kernel, grid, block, real(list(args)), shared_mem)

        return launch


class SeparateStream(EmulatedStream):
    """`waits`: where in the package, and for what, the host waited in a step for its device."""

    def __init__(self, **options):
        super().__init__(SeparateLauncher(self, **options))
        self.device = DEVICE
        self.waits = []
        self.recording = None
        self._copies = LateCopies()
        self._modes = []

    def __enter__(self):
        self._modes.append(SeparateDevice(self))
        self._modes[-1].__enter__()
        return self

    def __exit__(self, *exc):
        self._modes.pop().__exit__(*exc)

    def staging(self, num_bytes):
        return self.pin(super().staging(num_bytes))

    def pin(self, tensor):
        return self._copies.pin(tensor)

    def memory_for(self, source, is_there):
        """Where a copy without a place of its own goes to."""
        to = torch.empty_like(source)
        return to if is_there else self.pin(to)

    def event(self):
        return LateEvent(self)

    def capture(self, run):
        run()
        self.synchronize()
        self.recording = RecordedWork()
        result = run()
        recording, self.recording = self.recording, None
        return recording.replay, result

    def synchronize(self):
        self._refuse_recording("synchronize")
        self._copies.end()

    def mark(self):
        """What has been enqueued until now."""
        assert self._modes, "an event was recorded on another stream"
        return self._copies.count

    def reach(self, mark):
        """Wait for what was enqueued until then."""
        if not self._copies.have_ended(mark):
            self._refuse_recording("waiting for an event")
            self._note_wait("an event")
            self._copies.end(mark)

    def copy(self, to, source, is_there):
        """Enqueue a copy between pinned memory and the device; whether it is one."""
        self._refuse_recording("a copy from or to the host")
        return self._copies.add(to, source, is_there)

    def wait(self, name):
        """The host reads what an operation yields."""
        self._refuse_recording(name)
        self._note_wait(name)
        self._copies.end()

    def _note_wait(self, name):
        frames = _frames()
        if {"forward", "sample"} & dict(frames).keys():
            self.waits.append(f"{name} in {frames[0]}")

    def launch(self, kernel, *given):
        assert self._modes, "a kernel was launched on another stream"
        kernel(*given)
        if self.recording is not None:
            self.recording.add(kernel, given, {}, None)

    def _refuse_recording(self, name):
        if self.recording is not None:
            raise RuntimeError(f"{name} cannot be recorded")


def move_modules(monkeypatch):
    """`Module.to` makes new parameters: a `DeviceTensor` cannot be the data of another."""
    future = torch.__future__
    monkeypatch.setattr(future, "get_overwrite_module_params_on_conversion", lambda: True)


def pin_in(streams, monkeypatch):
    """Memory that torch is to pin, which one for CPUs cannot, is pinned for the last stream."""

    def pinning(make):
        def made(*given, pin_memory=False, **options):
            tensor = make(*given, **options)
            return streams[-1].pin(tensor) if pin_memory and streams else tensor

        return made

    _device_constructors()  # torch lists its functions once: `made` must not be among them
    for name in ("empty", "tensor"):
        monkeypatch.setattr(torch, name, pinning(getattr(torch, name)))

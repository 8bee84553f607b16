"""A device whose tensors are not the host's, for tests where there is no GPU.

Its tensors lie in the CPU's memory and are computed with there. But they say that they lie on
another device, no operation takes some of them and some of the host's, and none can be seen as a
NumPy array: as with a GPU's. Whatever moves between host and device must say so.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from gptmanager.cuda.launch import EmulatorLauncher
from gptmanager.cuda.streams import EmulatedStream

DEVICE = torch.device("meta")  # a device's name that torch knows without its libraries
_CPU = torch.device("cpu")
_MOVES = ("_to_copy", "to", "copy_")
_INDEXED = ("index", "index_put_")  # by the host's indices, too


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
        return self.own.tolist()

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class SeparateDevice(TorchDispatchMode):
    """While it is entered, in its thread, what is made on `DEVICE` is made of `DeviceTensor`."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _run(function, args, kwargs):
    name = function._schema.name.partition("::")[2]
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, DeviceTensor)]
    to = next((leaf for leaf in leaves if isinstance(leaf, torch.device)), None)
    host = [tensor for tensor in tensors if tensor.dim() and not isinstance(tensor, DeviceTensor)]
    indexed = name in _INDEXED and isinstance(args[0], DeviceTensor)
    if there and host and name not in _MOVES and not indexed:
        raise RuntimeError(f"{name} of tensors on two devices")
    is_there = to == DEVICE if to is not None else bool(there)
    if name in _MOVES and to is None:
        is_there = isinstance(args[0], DeviceTensor)
    with _disable_current_modes():
        result = function(*tree_map(_real, args), **tree_map(_real, kwargs))
        if name == "to" and is_there != isinstance(args[0], DeviceTensor):
            result = result.clone()  # another device's memory is another memory
    given = {id(_real(tensor)): tensor for tensor in tensors}

    def wrap(leaf):
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in given:
            return given[id(leaf)]
        return DeviceTensor(leaf) if is_there else leaf

    return tree_map(wrap, result)


def _real(leaf):
    if isinstance(leaf, torch.device):
        return _CPU
    return leaf.own if isinstance(leaf, DeviceTensor) else leaf


class SeparateLauncher(EmulatorLauncher):
    """Kernels get the device's memory; the one that copies blocks gets pinned memory, too."""

    def kernel(self, program, name, shared_mem=0):
        kernel = super().kernel(program, name, shared_mem)

        def launch(grid, block, args, shared_mem=0):
            assert all(grid), f"{name}: CuPy would launch a block for the grid {grid}"
            for argument in args if program.file != "block_copy.cu" else ():
                is_host = isinstance(argument, Tensor) and not isinstance(argument, DeviceTensor)
                assert not is_host, f"{name} got memory of the host"
            kernel(grid, block, [_real(argument) for argument in args], shared_mem)

        return launch


class SeparateStream(EmulatedStream):
    def __init__(self):
        super().__init__(SeparateLauncher())
        self.device = DEVICE
        self._modes = []

    def __enter__(self):
        self._modes.append(SeparateDevice())
        self._modes[-1].__enter__()
        return self

    def __exit__(self, *exc):
        self._modes.pop().__exit__(*exc)

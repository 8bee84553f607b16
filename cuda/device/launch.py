"""`Launcher`: returns the kernels of a `Program`, for a GPU or for the emulator.

A kernel is called in the same way on both: `kernel(grid, block, args, shared_mem=0)`. `args` are
torch tensors, NumPy scalars of the declared types, and None for a null pointer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda import emulator
from gptmanager.cuda.device import compiler, dependent_launch, device
from gptmanager.cuda.device.dependent_launch import DependentLaunch
from gptmanager.cuda.device.thread_contexts import ThreadContexts
from gptmanager.cuda.features import VARIABLE, Features
from gptmanager.errors import ConfigError
from gptmanager.lifecycle.log import logger

NAMES = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
Argument = Tensor | np.generic | None
Expected = tuple[Tensor | None, tuple[int | None, ...], torch.dtype]
_MAX_SHARED_OF_BLOCK = 97  # cudaDevAttrMaxSharedMemoryPerBlockOptin
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent


@dataclass(frozen=True)
class Program:
    """A `.cu` file (path below `cuda/`), and all instantiations of its kernels that are launched.

    In a `dependent` program, each thread calls `ptx::wait_for_previous` before it accesses global
    memory, so that a kernel may begin before the previous kernel of the stream has ended.
    """

    file: str
    kernels: tuple[str, ...]
    dependent: bool = False
    architectures: tuple[str, ...] = compiler.ARCHITECTURES  # to compile for
    at_once: int = 16  # kernels that the emulator compiles as one library, in one run of g++

    @property
    def path(self) -> Path:
        return compiler.FOLDER / self.file


class Kernel(Protocol):
    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Argument],
        shared_mem: int = 0,
    ) -> None: ...


class Launcher(Protocol):
    num_multiprocessors: int
    max_shared_mem: int  # bytes per block
    has_matmuls: bool  # whether to use our matmul kernels
    has_warpgroups: bool  # whether to choose kernels with warpgroup matmuls (wgmma, sm_90a)
    has_fp8: bool  # whether the device converts 8-bit floats (sm_89 and later)
    features: Features

    def kernel(self, program: Program, name: str, shared_mem: int = 0) -> Kernel:
        """Return the kernel `name`. Launches may use up to `shared_mem` bytes of shared memory."""


class DeviceLauncher:
    """Kernels on the current CUDA device, launched on torch's current stream.

    `has_warpgroups` is whether to choose kernels with warpgroup matmuls; by default, whether the
    device is of sm_90a. By default, `features` are read from the environment.
    """

    def __init__(
        self, has_warpgroups: bool | None = None, features: Features | None = None
    ) -> None:
        self.features = features = features or Features.asked()
        self._cupy = device.find_cupy()
        properties = torch.cuda.get_device_properties()
        self.num_multiprocessors: int = properties.multi_processor_count
        attribute = _MAX_SHARED_OF_BLOCK, torch.cuda.current_device()
        self.max_shared_mem: int = self._cupy.cuda.runtime.deviceGetAttribute(*attribute)
        self.arch = architecture(properties.major, properties.minor)
        self._driver = dependent_launch.find_driver(properties.major) if features.early else None
        has_them = self.arch == "sm_90a" if has_warpgroups is None else has_warpgroups
        self.has_warpgroups = has_them and features.warpgroups
        self.has_matmuls = features.products
        self.has_fp8 = (properties.major, properties.minor) >= (8, 9)
        self._contexts = ThreadContexts(self._cupy.cuda.runtime, torch.cuda.current_device())
        if features.words:
            logger.info("%s is set: %s", VARIABLE, ", ".join(features.words))
        self._kernels: dict[tuple[str, str], DeviceKernel] = {}

    def kernel(self, program: Program, name: str, shared_mem: int = 0) -> DeviceKernel:
        known = self._kernels.get((program.file, name))
        if known is None:
            options = self.features.compiler_options
            known = self._kernels[program.file, name] = self.load(program.path, name, options)
            if program.dependent and self._driver is not None:
                known.begin_early(self._driver)
        known.allow(shared_mem, has_carveout=self.features.carveout)
        return known

    def load(self, source: str | Path, name: str, options: Sequence[str] = ()) -> DeviceKernel:
        """Compile and load the kernel `name` of a file, or of CUDA C++ in a string.

        Raises the errors of `compiler.compile`.
        """
        cubin = compiler.compile(source, self.arch, [name], options)
        self._contexts.ensure()
        module = self._cupy.cuda.function.Module()
        module.load(cubin.code)
        function = module.get_function(cubin.lowered[name])
        return DeviceKernel(self._cupy, name, module, function, self._contexts)


class _Stream(NamedTuple):
    """A stream for CuPy's functions. At a launch, these read only the stream's `ptr`."""

    ptr: int


class DeviceKernel:
    """One loaded kernel. `module` owns the kernel's code."""

    def __init__(
        self, cupy: Any, name: str, module: Any, function: Any, contexts: ThreadContexts
    ) -> None:
        self._driver = cupy.cuda.driver
        self._contexts = contexts
        self._name = name
        self._module = module
        self._function = function
        self._allowed = 0
        self._device = torch.cuda.current_device()
        self._dependent: DependentLaunch | None = None

    def begin_early(self, driver: Any) -> None:
        """Let the kernel begin before the previous kernel of the stream has ended.

        The code of this kernel must call `ptx::wait_for_previous`.
        """
        self._dependent = DependentLaunch(driver, self._name, self._function.ptr)

    def allow(self, shared_mem: int, has_carveout: bool = False) -> None:
        """Allow `shared_mem` bytes of dynamic shared memory.

        Without a call, 48 KiB minus the static shared memory are allowed. `has_carveout` is
        `Features.carveout`. Raises ConfigError if the driver refuses, for example because the
        device has less shared memory.
        """
        if shared_mem <= self._allowed:
            return
        self._contexts.ensure()
        try:
            self._driver.funcSetAttribute(self._function.ptr, _MAX_DYNAMIC_SHARED, shared_mem)
            if has_carveout:
                self._driver.funcSetAttribute(self._function.ptr, _CARVEOUT, 100)
        except self._driver.CUDADriverError as error:
            raise ConfigError(
                f"{self._name} needs {shared_mem} bytes of shared memory per block, which the "
                f"driver refuses: {error}"
            ) from error
        self._allowed = shared_mem

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Argument],
        shared_mem: int = 0,
    ) -> None:
        # like `torch.cuda.current_stream().cuda_stream`, but creates no object at each launch
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        values = tuple(map(_plain, args))
        self._contexts.ensure()  # CuPy would set the context itself, cuda-bindings does not
        if self._dependent is not None:
            self._dependent(grid, block, values, shared_mem, stream)
        else:
            self._function(grid, block, values, shared_mem, _Stream(stream))


def _plain(argument: Argument) -> Any:
    if isinstance(argument, Tensor):
        return argument.data_ptr()  # a Python int, which CuPy passes as 8 bytes
    return 0 if argument is None else argument


@functools.cache  # shared by all managers of a process: finding compiled libraries takes time
def _emulated(
    program: Program,
    names: tuple[str, ...],
    check: bool,
    order: str | int,
    toolchain: emulator.Toolchain,
    options: tuple[str, ...],
) -> emulator.Module:
    return emulator.Module(
        path=program.path,
        name_expressions=program.kernels,
        options=(*options, f"-I{compiler.FOLDER}"),
        check=check,
        order=order,
        toolchain=toolchain,
        only=names,
    )


class EmulatorLauncher:
    """Kernels that run on the CPU, one thread after another, for tests.

    `emulator.Module` explains `check` and `order`. `has_matmuls` is off by default, because torch's
    matmuls are much faster than emulated ones. By default, `features` are read from the
    environment. Raises ConfigError if g++ or NVIDIA's headers are missing.
    """

    num_multiprocessors = 4
    max_shared_mem = 227 << 10
    has_fp8 = True

    def __init__(
        self,
        *,
        check: bool = False,
        order: str | int = "forward",
        has_matmuls: bool = False,
        has_warpgroups: bool = False,
        features: Features | None = None,
    ) -> None:
        self.features = features = features or Features.asked()
        self.has_matmuls = has_matmuls and features.products
        self.has_warpgroups = has_warpgroups and features.warpgroups
        self._toolchain = emulator.Toolchain()
        self._toolchain.require_headers()
        self._check = check
        self._order = order

    def kernel(self, program: Program, name: str, shared_mem: int = 0) -> Kernel:
        how = self._check, self._order, self._toolchain, self.features.compiler_options
        index = program.kernels.index(name)
        names = program.kernels[index - index % program.at_once :][: program.at_once]
        kernel = _emulated(program, names, *how).get_function(name)
        kernel.max_dynamic_shared_size_bytes = max(shared_mem, 48 << 10)
        kernel.dependent = program.dependent and self.features.early

        def launch(
            grid: tuple[int, ...],
            block: tuple[int, ...],
            args: Sequence[Argument],
            shared_mem: int = 0,
        ) -> None:
            given = [np.uint64(0) if argument is None else argument for argument in args]
            kernel(grid, block, given, shared_mem=shared_mem)

        return launch


def architecture(major: int, minor: int) -> str:
    """Return the architecture to compile for: `sm_90a` for 9.0 (for wgmma), otherwise `sm_XY`."""
    return f"sm_{major}{minor}a" if (major, minor) == (9, 0) else f"sm_{major}{minor}"


def ints(*values: int) -> tuple[np.int32, ...]:
    """Return the arguments for parameters that a kernel declares as `int`."""
    return tuple(map(np.int32, values))


def check_tensors(**tensors: Expected) -> None:
    """Check the shape and dtype of each tensor, and that it is contiguous.

    A size of None stands for any size. All tensors must be on one device. Tensors that are None are
    skipped. Raises ValueError, with the name of the tensor if its shape, dtype or layout is wrong.
    The check reads only metadata, and so does not wait for the device.
    """
    first = None
    for name, (tensor, shape, dtype) in tensors.items():  # plain loops: this runs at each launch
        if tensor is None:
            continue
        own = tensor.shape
        fits = len(own) == len(shape) and tensor.dtype is dtype
        for size, expected in zip(own, shape, strict=False):
            fits = fits and (expected is None or size == expected)
        if not fits:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(own)}, expected {dtype} {list(shape)}"
            )
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous")
        device = tensor.device
        if first is None:
            first = device
        elif first != device:
            devices = {str(it.device) for it, _, _ in tensors.values() if it is not None}
            raise ValueError(f"all tensors must be on one device, got {sorted(devices)}")

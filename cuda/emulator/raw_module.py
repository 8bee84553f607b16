"""`Module`: kernels in CUDA C++ that run on the CPU, with the interface of CuPy's RawModule.

It rejects arguments that CuPy would silently misinterpret, and launches that a driver would reject.
It does not depend on the kernels of this package: an application's own kernels run as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptmanager.cuda.emulator.arguments import convert
from gptmanager.cuda.emulator.library import Library
from gptmanager.cuda.emulator.reports import EmulatorError
from gptmanager.cuda.emulator.source import (
    compilable,
    compiler_options,
    only_kernels,
    translation_unit,
)
from gptmanager.cuda.emulator.toolchain import Toolchain

_MAX_THREADS = 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_SHARED = 48 << 10
_MAX_SHARED_OPTIN = 227 << 10  # the limit of sm_90


class Kernel:
    """A kernel of a `Module`, called as `kernel(grid, block, args, shared_mem=0, stream=None)`.

    With `dependent`, a launch may begin before the previous kernel has ended (programmatic
    dependent launch): a thread that ends without `ptx::wait_for_previous` is an error. In check
    mode, an access to an argument's memory before `ptx::wait_for_previous` is also an error.
    """

    dependent = False

    def __init__(self, name: str, library: Library, number: int) -> None:
        self.name = name
        self._static_shared = library.static_shared(number)
        if self._static_shared > _MAX_SHARED:
            raise EmulatorError(
                f"{name}: static shared memory must have at most {_MAX_SHARED} bytes, got "
                f"{self._static_shared}; use dynamic shared memory"
            )
        self.max_dynamic_shared_size_bytes = _MAX_SHARED - self._static_shared
        self._library = library
        self._number = number
        self._parameters = library.parameters(number)

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: object = None,
    ) -> None:
        """Run the kernel to its end.

        `grid` and `block` have one to three sizes. `args` are NumPy arrays, CPU tensors of torch or
        addresses for pointers, and NumPy scalars of the declared types for the other parameters.
        `shared_mem` is in bytes. The stream is ignored.
        """
        self._check_shared(shared_mem)
        sizes = self._sizes("block", block, _MAX_BLOCK)
        if np.prod(sizes) > _MAX_THREADS:
            raise EmulatorError(
                f"{self.name}: a block must have at most {_MAX_THREADS} threads, got {sizes}"
            )
        if len(args) != len(self._parameters):
            raise EmulatorError(
                f"{self.name}: the kernel has {len(self._parameters)} parameters, got {len(args)} "
                "arguments"
            )
        arguments = [
            convert(value, parameter, f"{self.name}: argument {index}")
            for index, (value, parameter) in enumerate(zip(args, self._parameters, strict=True))
        ]
        try:
            self._library.launch(
                *(self._number, self._sizes("grid", grid, _MAX_GRID), sizes, arguments, shared_mem),
                dependent=self.dependent,
            )
        except EmulatorError as error:
            raise EmulatorError(f"{self.name}: {error}") from None

    def _sizes(
        self, what: str, given: Sequence[int], most: tuple[int, int, int]
    ) -> tuple[int, int, int]:
        try:
            sizes = [max(1, int(size)) for size in given]  # CuPy does the same
        except (TypeError, ValueError):
            raise EmulatorError(
                f"{self.name}: `{what}` must be a tuple of sizes, got {given!r}"
            ) from None
        x, y, z = [*sizes, 1, 1][:3]
        if not 1 <= len(sizes) <= 3 or any(map(int.__gt__, (x, y, z), most)):
            raise EmulatorError(
                f"{self.name}: `{what}` must be one to three sizes of at most {most}, "
                f"got {tuple(given)}"
            )
        return x, y, z

    def _check_shared(self, shared_mem: int) -> None:
        most = min(self.max_dynamic_shared_size_bytes, _MAX_SHARED_OPTIN - self._static_shared)
        if shared_mem > most:
            raise EmulatorError(
                f"{self.name}: shared_mem = {shared_mem} must be at most {most}: "
                f"max_dynamic_shared_size_bytes is {self.max_dynamic_shared_size_bytes}, and a "
                f"device has {_MAX_SHARED_OPTIN} bytes, {self._static_shared} of them static"
            )


class Module:
    """Kernels in CUDA C++, from the file `path` or the string `source`.

    `name_expressions` are the names of the kernels, such as `decode<128, 4>`. `options` are macros
    and folders as for NVRTC. Options that only concern GPUs are ignored. With `check`, every access
    is checked, and races and uninitialized shared memory are reported, which is slow. The `order`
    of blocks, warps and lanes is "forward", "reverse", or the seed of a shuffle. `only` selects
    some of `name_expressions`: only these kernels are built, and the preprocessed source is kept
    for later modules with `only`. A block that still runs after `block_timeout_s` seconds, or
    at the latest after twice as long, ends with an error, because it may be in an endless loop.
    Only time of the processor counts. None means no limit. Raises `EmulatorError` with g++'s
    messages if the source does not compile, and `ConfigError` if g++ is missing.
    """

    def __init__(
        self,
        *,
        path: str | Path | None = None,
        source: str | None = None,
        name_expressions: Sequence[str],
        options: Sequence[str] = (),
        check: bool = False,
        order: str | int = "forward",
        toolchain: Toolchain | None = None,
        only: Sequence[str] = (),
        block_timeout_s: float | None = 60.0,
    ) -> None:
        if (path is None) == (source is None):
            raise EmulatorError("pass either `path` or `source`, and not both")
        for name, given in (("name_expressions", name_expressions), ("options", options)):
            if isinstance(given, str):
                raise EmulatorError(f"`{name}` must be a sequence of strings, got {given!r}")
        file = Path("kernel.cu" if path is None else path)
        text = file.read_text("utf-8") if source is None else source
        toolchain = toolchain or Toolchain()
        flags = tuple(compiler_options(options, file.parent))
        preprocess = _preprocessed if only else _preprocess
        unit = preprocess(text, str(file), tuple(name_expressions), flags, toolchain)
        self._numbers = {name: number for number, name in enumerate(name_expressions)}
        if only:
            self._numbers = {name: self._number(name) for name in only}
            unit = only_kernels(unit, self._numbers.values())
        library = toolchain.build(unit, file.name, check)
        self._library = Library(library, check, _order(order), _seconds(block_timeout_s))

    def get_function(self, name: str) -> Kernel:
        return Kernel(name, self._library, self._number(name))

    def _number(self, name: str) -> int:
        if name not in self._numbers:
            known = ", ".join(self._numbers)
            raise EmulatorError(f"unknown kernel {name!r}; the name expressions are: {known}")
        return self._numbers[name]


def _preprocess(
    text: str, file: str, names: tuple[str, ...], options: tuple[str, ...], toolchain: Toolchain
) -> str:
    name = Path(file).name
    unit = toolchain.preprocess(translation_unit(text, file, names), name, options)
    return compilable(unit, name)


_preprocessed = functools.lru_cache(32)(_preprocess)


def _seconds(block_timeout_s: float | None) -> float:
    """Return the limit for a block in seconds; 0 for no limit."""
    if block_timeout_s is None:
        return 0.0
    if not isinstance(block_timeout_s, int | float) or not 0 < block_timeout_s < math.inf:
        raise EmulatorError(
            f"`block_timeout_s` must be a positive number or None, got {block_timeout_s!r}"
        )
    return float(block_timeout_s)


def _order(order: str | int) -> int:
    if isinstance(order, str):
        names = {"forward": 0, "reverse": -1}
        if order not in names:
            raise EmulatorError(f"`order` must be 'forward', 'reverse' or a seed, got {order!r}")
        return names[order]
    return order + 1

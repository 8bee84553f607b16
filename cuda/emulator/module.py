"""`Module`: CUDA C++ source as kernels that run on the CPU, launched as CuPy's are.

It refuses what CuPy passes on silently or the driver rejects. It knows nothing of the kernels that
this package has: a host's own work as well.
"""

from __future__ import annotations

import itertools
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
    translation_unit,
)
from gptmanager.cuda.emulator.toolchain import Toolchain

_MAX_THREADS = 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_SHARED = 48 << 10
_MAX_SHARED_OPTIN = 227 << 10  # of sm_90


class Kernel:
    """A kernel of a `Module`, called as `kernel(grid, block, args, shared_mem=0, stream=None)`.

    `dependent`: launched so, it may begin before the kernel before it has ended; what it touches
    before `ptx::wait_for_previous` is an error.
    """

    dependent = False

    def __init__(self, name: str, library: Library, number: int) -> None:
        self.name = name
        self._static_shared = library.static_shared(number)
        if self._static_shared > _MAX_SHARED:
            raise EmulatorError(
                f"{name}: {self._static_shared} bytes of static shared memory are more than "
                f"{_MAX_SHARED}; beyond these it must be dynamic"
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
        """Run to the end. `grid`, `block`: one to three sizes. `args`: NumPy arrays, CPU tensors of
        torch, and NumPy scalars of the declared types. The stream is ignored.
        """
        self._check_shared(shared_mem)
        sizes = self._sizes("block", block, _MAX_BLOCK)
        if np.prod(sizes) > _MAX_THREADS:
            raise EmulatorError(f"{self.name}: block {sizes} has more than {_MAX_THREADS} threads")
        if len(args) != len(self._parameters):
            expected = f"takes {len(self._parameters)} arguments"
            raise EmulatorError(f"{self.name} {expected}, and was given {len(args)}")
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
            sizes = [max(1, int(size)) for size in given]  # as CuPy does
        except (TypeError, ValueError):
            raise EmulatorError(f"{self.name}: {what} {given!r} is no tuple of sizes") from None
        x, y, z = [*sizes, 1, 1][:3]
        if not 1 <= len(sizes) <= 3 or any(map(int.__gt__, (x, y, z), most)):
            raise EmulatorError(f"{self.name}: {what} {tuple(given)} is not within {most}")
        return x, y, z

    def _check_shared(self, shared_mem: int) -> None:
        room = _MAX_SHARED_OPTIN - self._static_shared
        if shared_mem > min(self.max_dynamic_shared_size_bytes, room):
            raise EmulatorError(
                f"{self.name}: shared_mem={shared_mem} is more than max_dynamic_shared_size_bytes="
                f"{self.max_dynamic_shared_size_bytes}, or than the {_MAX_SHARED_OPTIN} of a device"
                f" less {self._static_shared} of static shared memory"
            )


class Module:
    """The kernels `name_expressions` (as `decode<128, 4>`) of CUDA C++ in a file or a string.

    `options`: macros and folders as for NVRTC; what concerns the GPU alone is ignored. `check`: see
    every access, and report races, uninitialized shared memory and misaligned vectors; slow.
    `order`: of blocks, warps and lanes: "forward", "reverse", or the seed of a shuffle.
    `EmulatorError` with g++'s words for a source that does not compile; `ConfigError` without g++.
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
    ) -> None:
        if (path is None) == (source is None):
            raise EmulatorError("give either path= or source=")
        for name, given in (("name_expressions", name_expressions), ("options", options)):
            if isinstance(given, str):
                raise EmulatorError(f"{name}={given!r} is to be a sequence of strings")
        file = Path("kernel.cu" if path is None else path)
        text = file.read_text("utf-8") if source is None else source
        toolchain = toolchain or Toolchain()
        unit = translation_unit(text, str(file), name_expressions)
        unit = toolchain.preprocess(unit, file.name, compiler_options(options, file.parent))
        built = toolchain.build(compilable(unit, file.name), file.name, check)
        self._library = Library(built, check, _order(order))
        self._names = dict(zip(name_expressions, itertools.count()))

    def get_function(self, name: str) -> Kernel:
        if name not in self._names:
            known = ", ".join(self._names)
            raise EmulatorError(f"{name!r} is not among the name expressions: {known}")
        return Kernel(name, self._library, self._names[name])


def _order(order: str | int) -> int:
    if isinstance(order, str):
        names = {"forward": 0, "reverse": -1}
        if order not in names:
            raise EmulatorError(f"order={order!r} is neither 'forward', 'reverse' nor a seed")
        return names[order]
    return order + 1

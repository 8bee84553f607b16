"""Load a compiled library: describe its kernels, and run them."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gptmanager.cuda.emulator.reports import EmulatorError, with_lines

_REPORT = 8192


class _Parameter(ctypes.Structure):  # export.h
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("kind", ctypes.c_char),
        ("pointee_kind", ctypes.c_char),
        ("pointee_size", ctypes.c_size_t),
    )


class _Descriptor(ctypes.Structure):  # export.h
    _fields_ = (
        ("parameters", ctypes.POINTER(_Parameter)),
        ("count", ctypes.c_size_t),
        ("body", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
    )


class _Region(ctypes.Structure):  # state.h
    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("argument", ctypes.c_int))


class _Arena(ctypes.Structure):  # state.h
    _fields_ = (
        ("stacks", ctypes.c_void_p),
        ("num_stacks", ctypes.c_size_t),
        ("dynamic", ctypes.c_void_p),
        ("user", ctypes.c_void_p),
    )


class _Launch(ctypes.Structure):  # state.h
    _fields_ = (
        ("body", ctypes.c_void_p),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
        ("arena", ctypes.POINTER(_Arena)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("dynamic_shared", ctypes.c_size_t),
        ("regions", ctypes.POINTER(_Region)),
        ("num_regions", ctypes.c_int),
        ("order", ctypes.c_int),
        ("checking", ctypes.c_int),
        ("dependent", ctypes.c_int),
        ("closed", ctypes.c_int),
        ("report", ctypes.c_char_p),
        ("report_size", ctypes.c_size_t),
        ("block_timeout_s", ctypes.c_double),
    )


@dataclass(frozen=True)
class Parameter:
    """A kernel's parameter; sizes are in bytes.

    A kind is p (pointer), i (signed), u (unsigned), f (float), b (bool) or V (struct).
    """

    size: int
    kind: str
    pointee_kind: str
    pointee_size: int  # 0: unknown


@dataclass(frozen=True)
class Argument:
    """The value of one parameter: its bytes, and the memory that it points to, if any."""

    value: bytes
    memory: tuple[int, int] | None = None  # address, bytes
    unknown: bool = False  # True: the value is an address of memory of unknown size


class _Symbol(NamedTuple):
    name: str
    kind: str  # nm's letter
    address: int  # in the file
    size: int


@functools.cache  # one arena for all libraries of the process
def _arena() -> _Arena:
    return _Arena()


def _encoding(function: str) -> str:
    """Return the function's name as the mangled names of its static variables contain it."""
    return function[2:] if function.startswith("_Z") else f"{len(function)}{function}"


class Library:
    """A loaded library. It runs blocks, warps and lanes in an `order`.

    The order is 0 for forward, -1 for reverse, otherwise the seed of a shuffle. A block may run for
    `block_timeout_s` seconds of the processor; 0 means no limit.
    """

    def __init__(self, path: Path, checked: bool, order: int, block_timeout_s: float) -> None:
        self._path = path
        self._block_timeout_s = block_timeout_s
        self._checked = checked
        self._order = order
        self._static_shared: dict[int, int] = {}
        # The emulator has global state: a call must keep the interpreter lock, so PyDLL is used.
        try:
            self._library = ctypes.PyDLL(str(path))
        except OSError as error:  # the kernel calls a function that is declared but not defined
            raise EmulatorError(f"the compiled kernel cannot be loaded: {error}") from None

    def _descriptor(self, number: int) -> _Descriptor:
        function = getattr(self._library, f"emulator_kernel_{number}")
        function.restype = ctypes.POINTER(_Descriptor)
        descriptor: _Descriptor = function().contents
        return descriptor

    def parameters(self, number: int) -> tuple[Parameter, ...]:
        """Return the parameters of a kernel.

        `number` is the index of the kernel's name in the `name_expressions` of its `Module`.
        """
        descriptor = self._descriptor(number)
        return tuple(
            Parameter(it.size, it.kind.decode(), it.pointee_kind.decode(), it.pointee_size)
            for it in descriptor.parameters[: descriptor.count]
        )

    def static_shared(self, number: int) -> int:
        """Return the size in bytes of the kernel's own `__shared__` variables; 0 without binutils.

        Variables of functions that the kernel calls are not counted.
        """
        if number not in self._static_shared:
            self._static_shared[number] = self._find_static_shared(number)
        return self._static_shared[number]

    def _find_static_shared(self, number: int) -> int:
        export = f"emulator_kernel_{number}"
        addresses = {symbol.name: symbol.address for symbol in self._symbols}
        if export not in addresses:
            return 0
        loaded = ctypes.cast(getattr(self._library, export), ctypes.c_void_p).value or 0
        own = (self._descriptor(number).kernel or 0) - loaded + addresses[export]
        functions = (it.name for it in self._symbols if it.address == own and it.kind in "tTwW")
        prefixes = tuple(f"_ZZ{_encoding(name)}E" for name in functions)
        return sum(
            it.size for it in self._symbols if it.kind in "bBdD" and it.name.startswith(prefixes)
        )

    @functools.cached_property
    def _symbols(self) -> tuple[_Symbol, ...]:
        if shutil.which("nm") is None:
            return ()
        command = ["nm", "--print-size", "--defined-only", str(self._path)]
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        fields = (line.split() for line in listed.splitlines())
        return tuple(
            _Symbol(name, kind, int(address, 16), int(size, 16))
            for address, size, kind, name in (it for it in fields if len(it) == 4)
        )

    def launch(
        self,
        number: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        arguments: Sequence[Argument],
        dynamic_shared: int,
        dependent: bool = False,
    ) -> None:
        """Run all blocks of a launch. Raise `EmulatorError` with the kernel's error and its line.

        `dynamic_shared` is in bytes. If `dependent`, the launch may begin before the previous
        kernel has ended.
        """
        values = [ctypes.create_string_buffer(it.value, len(it.value)) for it in arguments]
        pointers = (ctypes.c_void_p * max(1, len(values)))(*map(ctypes.addressof, values))
        regions = [
            _Region(it.memory[0], it.memory[0] + it.memory[1], index)
            for index, it in enumerate(arguments)
            if it.memory is not None and it.memory[1]
        ]
        report = ctypes.create_string_buffer(_REPORT)
        launch = _Launch(
            body=self._descriptor(number).body,
            arguments=ctypes.cast(pointers, ctypes.POINTER(ctypes.c_void_p)),
            arena=ctypes.pointer(_arena()),
            grid=(ctypes.c_uint * 3)(*grid),
            block=(ctypes.c_uint * 3)(*block),
            dynamic_shared=dynamic_shared,
            regions=(_Region * max(1, len(regions)))(*regions),
            num_regions=len(regions),
            order=self._order,
            checking=self._checked,
            dependent=dependent,
            closed=not any(it.unknown for it in arguments),
            report=ctypes.cast(report, ctypes.c_char_p),
            report_size=_REPORT,
            block_timeout_s=self._block_timeout_s,
        )
        if self._library.emulator_launch(ctypes.byref(launch)):
            raise EmulatorError(with_lines(report.value.decode(errors="replace"), self._path))

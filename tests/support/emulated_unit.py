"""A matrix unit (Intel AMX) in NumPy, so that what is compiled for one runs on any processor.

It is a plugin of pytest: it must be loaded before the kernels are compiled. The machine code holds
addresses in this process, so it must not be kept on disk.
"""

from __future__ import annotations

import ctypes

import numpy as np
from llvmlite import ir

from gptmanager.environment.machine import cpu_features
from gptmanager.kernels.gemm import matmul_plan, matrix_tiles
from gptmanager.kernels.gemm.unit import int8_unit_tiles
from gptmanager.kernels.simd.threads import Team

_FEATURES = ("amx-tile", "amx-bf16", "amx-int8")
_LONG, _ROWS, _LINE = ir.IntType(64), 16, 64


class MatrixUnit:
    """Eight registers of 16 rows of 64 bytes. What a processor refuses is an AssertionError."""

    def __init__(self):
        self.tiles = np.zeros((8, _ROWS, _LINE), dtype=np.uint8)
        self.rows = self.widths = None  # registers, while they are configured
        self.errors = []

    def ldtilecfg(self, address):
        table = self._at(address, 64)[0]
        assert table[0] == 1 and not table[1:16].any() and not table[32:48].any()
        self.widths, self.rows = table[16:32].view(np.uint16).tolist(), table[48:56].tolist()
        assert max(self.widths) <= _LINE and max(self.rows) <= _ROWS
        self.tiles[:] = 0

    def tilerelease(self):
        self.rows = self.widths = None
        self.tiles[:] = 0

    def tilezero(self, number):
        assert self.rows[number]
        self.tiles[number] = 0

    def tileloadd64(self, number, address, stride):
        self.tilezero(number)
        rows, width = self.rows[number], self.widths[number]
        self.tiles[number, :rows, :width] = self._at(address, width, rows, stride)

    def tilestored64(self, number, address, stride):
        rows, width = self.rows[number], self.widths[number]
        self._at(address, width, rows, stride)[:] = self.tiles[number, :rows, :width]

    def tdpbf16ps(self, to, left, right):
        """Subnormal factors and sums count as zero. A processor rounds after each product."""
        a, b, c = self._factors(to, left, right, np.uint16)
        a, b = (_normal((it.astype(np.uint32) << 16).view(np.float32)) for it in (a, b))
        sums = c.view(np.float32)
        products = np.einsum("mkn,kcn->mc", a.astype(np.float64), b.astype(np.float64))
        sums[:] = _normal((sums + products).astype(np.float32))

    def tdpbssd(self, to, left, right):
        a, b, c = self._factors(to, left, right, np.int8)
        c.view(np.int32)[:] += np.einsum("mkn,kcn->mc", a.astype(np.int32), b.astype(np.int32))

    def _factors(self, to, left, right, dtype):
        assert len({to, left, right}) == 3
        rows, depth, columns = self.rows[to], self.widths[left] // 4, self.widths[to]
        assert self.rows[left] == rows and self.rows[right] == depth
        assert self.widths[right] == columns and self.widths[left] % 4 == columns % 4 == 0
        a = self.tiles[left, :rows, : 4 * depth].view(dtype).reshape(rows, depth, -1)
        b = self.tiles[right, :depth, :columns].view(dtype).reshape(depth, columns // 4, -1)
        return a, b, self.tiles[to, :rows, :columns]

    @staticmethod
    def _at(address, width, rows=1, stride=0):
        """Return the bytes of rows that begin `stride` bytes apart."""
        memory = (ctypes.c_uint8 * ((rows - 1) * stride + width)).from_address(address)
        return np.ndarray((rows, width), np.uint8, memory, strides=(stride, 1))


def _normal(values):
    return np.where(np.abs(values) < np.finfo(np.float32).tiny, np.float32(0.0), values)


UNIT = MatrixUnit()
_NAMES = [name for name in vars(MatrixUnit) if name.startswith("t") or name == "ldtilecfg"]
_COUNTS = {"ldtilecfg": 1, "tilerelease": 0, "tilezero": 1}


@ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
def _run(number, *values):
    name = _NAMES[number]
    try:
        getattr(UNIT, name)(*values[: _COUNTS.get(name, 3)])
    except Exception as error:  # compiled code cannot raise
        UNIT.errors.append(f"{name}{values}: {error!r}")


_call = matrix_tiles.call


def _emit(builder, name, result, *values):
    name_of_unit = name.removeprefix("llvm.x86.")
    if name_of_unit not in _NAMES:
        return _call(builder, name, result, *values)
    wide = [
        builder.ptrtoint(it, _LONG) if isinstance(it.type, ir.PointerType)
        else it if it.type == _LONG else builder.zext(it, _LONG)
        for it in values
    ]  # fmt: skip
    wide += [ir.Constant(_LONG, 0)] * (3 - len(wide))
    kind = ir.FunctionType(ir.VoidType(), [_LONG] * 4).as_pointer()
    address = ir.Constant(_LONG, ctypes.cast(_run, ctypes.c_void_p).value)
    number = ir.Constant(_LONG, _NAMES.index(name_of_unit))
    return builder.call(builder.inttoptr(address, kind), [number, *wide])


def install():
    """Give this process a matrix unit."""
    found = cpu_features.cpu_features
    matrix_tiles.call = _emit
    Team.max_size = 1  # other threads cannot get the interpreter lock while a body runs
    int8_unit_tiles.cpu_features = lambda: found() | dict.fromkeys(_FEATURES, True)
    for module in (matrix_tiles, int8_unit_tiles, matmul_plan):
        module.has_matrix_unit = lambda: True


def pytest_runtest_teardown():
    errors, UNIT.errors[:] = UNIT.errors[:], []
    assert not errors, errors[0]


install()

"""`MatrixFinder`: finds the quantized matrices of a checkpoint by the endings of tensor names.

The names and dtypes of a module's tensors show whether the module is quantized, so the config's
list of unquantized modules is not needed. The shape of a tensor is checked before the tensor is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from gptmanager.errors import ConfigError
from gptmanager.kernels.gemm.int4_groups import GROUP
from gptmanager.kernels.gemm.panels.word_loops import AWQ_ORDER
from gptmanager.memory.checkpoint.safetensors_reader import FLOATS
from gptmanager.memory.checkpoint.tensor_sources import TensorInfo, tensor_name
from gptmanager.models.quantized.codebooks import codebook_matrix, has_codebook
from gptmanager.models.quantized.float4 import ExpertBlocks, Float4Matrix, kept_groups
from gptmanager.models.quantized.given_tensors import SCALES, GivenTensors, ceil_div
from gptmanager.models.quantized.matrices import (
    Grid,
    IntegerMatrix,
    Read,
    ScaledExperts,
    ScaledMatrix,
    StoredMatrix,
)
from gptmanager.models.quantized.mlx import mlx_matrix
from gptmanager.models.quantized.modelopt import InputScaledMatrix, RowPairs, float4_experts
from gptmanager.models.quantized.scheme_fields import Block, Scheme

_FLOAT8, _CT = "float8_e4m3fn", "compressed-tensors"
_WITH_INT8 = (_CT, "modelopt", "quark")  # methods with 8-bit integers in `weight`
_POWERS = ("uint8", "float8_e8m0fnu")  # dtypes of scales that are powers of two
_ZEROS = {*FLOATS.values(), _FLOAT8, "int8"}
# Endings of ignored tensors. Most are scales and zeros of activations, which gptmanager quantizes
# in its own way, if at all. bitsandbytes writes `weight_format`.
_IGNORED = (
    ".input_scale",
    ".input_scale_ub",
    ".input_zero_point",
    ".input_global_scale",
    ".output_scale",
    ".output_zero_point",
    ".activation_scale",
    ".weight_format",
    ".q_scale",
    "_proj_input_scale",
)
# Endings of scales of the KV cache, and of numbers that are subtracted before it is quantized.
_CACHE_SCALES, _CACHE_BIASES = (".k_scale", ".v_scale"), (".k_bias", ".v_bias")
_INT8_FACTOR = 7.874015718698502e-3  # bitsandbytes' 1 / 127
_NVFP4, _MXFP4 = (16, 32), 32  # numbers of columns that may share a scale


_Describe = Callable[[str, TensorInfo], StoredMatrix | ExpertBlocks | None]


class MatrixFinder(GivenTensors):
    """Describes the quantized matrices of a checkpoint.

    `matrices`: name of the weight -> its description. `used`: the names of all tensors of these
    matrices, and of ignored tensors. The constructor raises ConfigError if a tensor is missing, or
    does not have the shape, dtype or values that its matrix needs.
    """

    def __init__(self, scheme: Scheme, given: Mapping[str, TensorInfo], read: Read) -> None:
        super().__init__(given, read)
        self._scheme = scheme
        self.matrices: dict[str, StoredMatrix | ExpertBlocks] = {}
        self.used |= {name for name in given if name.endswith((*_IGNORED, *_CACHE_BIASES))}
        # our KV cache of 8 bits has no biases
        if not scheme.cache_scales or any(name.endswith(_CACHE_BIASES) for name in given):
            self.used |= {name for name in given if name.endswith(_CACHE_SCALES)}
        endings: Mapping[str, Sequence[tuple[str, _Describe]]] = {
            "compressed-tensors": ((".weight_packed", self._packed), (".weight", self._scaled)),
            "fp8": ((".weight", self._scaled), ("_proj", self._scaled_experts)),
            "modelopt": ((".weight", self._scaled_or_pairs), ("_proj", self._scaled_experts)),
            "quark": ((".weight", self._quark),),
            "mxfp4": (("_blocks", self._experts),),
            "gptq": ((".qweight", self._gptq),),
            "awq": ((".qweight", self._awq),),
            "bitsandbytes": ((".weight", self._bitsandbytes),),
            "torchao": (("._weight_qdata", self._torchao),),
            "mlx": ((".weight", self._mlx),),
        }
        for name, info in given.items():
            for ending, describe in endings[scheme.method]:
                if name.endswith(ending) and (matrix := describe(name, info)) is not None:
                    module = name.removesuffix(ending)
                    own = {"_blocks": module, "_proj": name}.get(ending, f"{module}.weight")
                    if own != name and own in given:
                        raise ConfigError(
                            f"tensors {tensor_name(own)} and {tensor_name(name)} are the same "
                            "matrix, in floats and quantized: only one of them may be given"
                        )
                    self.matrices[own] = matrix
                    self.used.add(name)

    def _scaled(self, name: str, info: TensorInfo) -> StoredMatrix | None:
        """Describe an 8-bit matrix with scales in a tensor; None for a matrix of floats."""
        is_int8 = info.dtype == "int8" and self._scheme.method in _WITH_INT8
        if info.dtype != _FLOAT8 and not is_int8:
            return None
        shape = self._matrix_shape(name, info)
        names = [f"{name}_scale_inv", f"{name}_scale"][:: 1 if self._scheme.method == "fp8" else -1]
        own = next((it for it in names if it in self._given), names[0])
        zeros = f"{name}_zero_point"
        if self._scheme.asymmetric and info.dtype == "int8" and zeros not in self._given:
            self._missing(zeros)
        return self._with_zeros(name, own, zeros, shape, self._scheme.blocks)

    def _with_zeros(
        self,
        name: str,
        scales_name: str,
        zeros_name: str,
        shape: tuple[int, int],
        blocks: Sequence[Block],
    ) -> ScaledMatrix:
        """Describe a matrix of 8-bit numbers. It has no zero points if their tensor is missing."""
        scales = self._grid(scales_name, shape, blocks)
        if zeros_name not in self._given:
            return ScaledMatrix(name, shape, scales)
        block = scales.height, scales.width
        return ScaledMatrix(
            name, shape, scales, self._grid(zeros_name, shape, [block], dtypes=_ZEROS)
        )

    def _scaled_experts(self, name: str, info: TensorInfo) -> StoredMatrix | None:
        """Describe the 8-bit matrices of all experts, or those in NVFP4; None for floats."""
        if info.dtype == "uint8" and self._scheme.method == "modelopt":
            return float4_experts(name, info, self._take)
        if info.dtype != _FLOAT8 or len(info.shape) != 3 or 0 in info.shape:
            return None
        endings = ("_scale_inv", "_weight_scale", "_scale")
        own = name + next((it for it in endings if name + it in self._given), endings[0])
        found = self._take(own, SCALES)
        count, shape, blocks = info.shape[0], info.shape[1:], self._scheme.blocks
        if found.shape in ((), (1,)):
            return ScaledExperts(name, info.shape, Grid(own, found.shape, *shape), is_shared=True)
        if len(found.shape) != 3 or found.shape[0] != count:
            raise ConfigError(
                f"tensor {tensor_name(own)} has shape {list(found.shape)}: it must have scales for "
                f"each of {count} experts"
            )
        # Llama 4 has matrices [in, out] with a scale for each column
        column = [(shape[0], 1)] if own.endswith(endings[2]) else []
        grid = self._fitted(own, found.shape[1:], shape, [*blocks, *column])
        return ScaledExperts(name, info.shape, grid)

    def _scaled_or_pairs(self, name: str, info: TensorInfo) -> StoredMatrix | None:
        """Describe a matrix of 8-bit numbers, or of 4-bit ones in pairs; None for floats."""
        matrix = self._pairs(name, info) if info.dtype == "uint8" else self._scaled(name, info)
        if matrix is None:
            return None
        return self._with_inputs(matrix, f"{name.removesuffix('weight')}pre_quant_scale")

    def _with_inputs(self, matrix: StoredMatrix, inputs: str) -> StoredMatrix:
        """Return the matrix with scales of its inputs, if the tensor `inputs` is given."""
        if inputs not in self._given:
            return matrix
        self._take(inputs, {*FLOATS.values()}, matrix.shape[1:])
        return InputScaledMatrix(matrix, inputs)

    def _pairs(self, name: str, info: TensorInfo) -> StoredMatrix:
        """Describe a matrix with two numbers in a byte: NVFP4, MXFP4, or integers of ModelOpt."""
        rows, columns = self._matrix_shape(name, info)
        own = self._given.get(f"{name}_scale", info)
        if own.dtype in FLOATS.values() and self._scheme.method == "modelopt":
            shape, width = (2 * rows, columns), max(1, columns // max(1, *own.shape[1:], 1))
            self.used.add(f"{name}_scale_2")  # W4A8 on a GPU scales 8-bit floats by it
            return RowPairs(name, shape, self._grid(f"{name}_scale", shape, [(1, width)]))
        shape = rows, 2 * columns
        if f"{name}_scale" in self._given and own.dtype in _POWERS:
            return self._float4(name, shape, f"{name}_scale")
        self._take(f"{name}_scale_2", "float32", (), (1,))
        scales = self._grid(f"{name}_scale", shape, [(1, it) for it in _NVFP4])
        return Float4Matrix(name, shape, scales, f"{name}_scale_2", is_factor=True)

    def _float4(self, name: str, shape: tuple[int, int], scales: str) -> Float4Matrix:
        """Describe a matrix of MXFP4."""
        matrix = Float4Matrix(name, shape, self._grid(scales, shape, [(1, _MXFP4)]))
        if shape[1] % _MXFP4 or self._given[scales].dtype not in _POWERS:
            return matrix
        return replace(matrix, groups_of=kept_groups(self._read(scales)))

    def _packed(self, name: str, info: TensorInfo) -> StoredMatrix:
        """Describe a packed matrix of compressed-tensors: integers, NVFP4 or MXFP4."""
        base = name.removesuffix("_packed")
        if info.dtype != "uint8":
            return self._packed_integers(base, info)
        rows, half = self._matrix_shape(name, info)
        shape, global_scale = (rows, 2 * half), f"{base}_global_scale"
        if global_scale not in self._given:
            return self._float4(name, shape, f"{base}_scale")
        self._take(global_scale, "float32", (), (1,))
        scales = self._grid(f"{base}_scale", shape, [(1, _NVFP4[0])])
        return Float4Matrix(name, shape, scales, global_scale)

    def _packed_integers(self, base: str, info: TensorInfo) -> StoredMatrix:
        name = f"{base}_packed"
        rows, words = self._matrix_shape(name, info, "int32")
        self._take(f"{base}_shape", {"int64", "int32"}, (2,))
        given_rows, columns = self._read(f"{base}_shape").tolist()
        fitting = [it for it in self._scheme.bits if ceil_div(columns * it, 32) == words]
        if given_rows != rows or columns < 1 or len(fitting) != 1:
            raise ConfigError(
                f"tensor {tensor_name(name)} is int32 {list(info.shape)}: it does not fit a matrix "
                f"of {[given_rows, columns]} ({tensor_name(base)}_shape) in "
                f"{self._scheme.bits} bits"
            )
        shape, bits, blocks = (rows, columns), fitting[0], self._scheme.blocks
        scales = self._grid(f"{base}_scale", shape, blocks)
        zeros: Grid | None = None
        if f"{base}_zero_point" in self._given:
            zeros = self._grid(f"{base}_zero_point", shape, [(1, scales.width)], bits)
        elif self._scheme.asymmetric:
            self._missing(f"{base}_zero_point")
        column_groups = self._column_groups(f"{base}_g_idx", columns, scales.width)
        return self._with_groups(
            IntegerMatrix(*(name, shape, bits, scales), zeros=zeros, column_groups=column_groups)
        )

    def _gptq(self, name: str, info: TensorInfo) -> StoredMatrix:
        module = name.removesuffix(".qweight")
        words, rows = self._matrix_shape(name, info, "int32")
        shapes = {it: (rows, words * 32 // it) for it in self._scheme.bits if words * 32 % it == 0}
        if not shapes:
            raise ConfigError(
                f"tensor {tensor_name(name)} is int32 {list(info.shape)}: it must have whole words "
                f"of {' or '.join(map(str, self._scheme.bits))} bits"
            )
        bits, scales, zeros = self._transposed_grids(f"{module}.scales", f"{module}.qzeros", shapes)
        shape = rows, words * 32 // bits
        return self._with_groups(
            IntegerMatrix(
                *(name, shape, bits, scales, zeros),
                offset=self._scheme.offset,
                middle=self._scheme.symmetric,
                transposed=True,
                column_groups=self._column_groups(f"{module}.g_idx", shape[1], scales.width),
            )
        )

    def _awq(self, name: str, info: TensorInfo) -> StoredMatrix:
        module, [bits] = name.removesuffix(".qweight"), self._scheme.bits
        columns, words = self._matrix_shape(name, info, "int32")
        shape = words * 32 // bits, columns
        _, scales, zeros = self._transposed_grids(
            f"{module}.scales", f"{module}.qzeros", {bits: shape}, AWQ_ORDER
        )
        matrix = IntegerMatrix(
            *(name, shape, bits, scales, zeros), transposed=True, order=AWQ_ORDER
        )
        return self._with_groups(matrix)

    def _torchao(self, name: str, info: TensorInfo) -> StoredMatrix:
        """Describe a matrix of torchao. The shape of its scales shows which block has one."""
        base = name.removesuffix("qdata")
        if info.dtype not in (_FLOAT8, "int8"):
            raise ConfigError(
                f"tensor {tensor_name(name)} is {info.dtype}: of torchao's formats, only int8 and "
                f"{_FLOAT8} are supported; quantize the model to one of them, or pass it in floats"
            )
        rows, columns = self._matrix_shape(name, info)
        scales = self._given.get(f"{base}scale", info).shape
        given = [max(1, size) for size in (scales if len(scales) == 2 else (rows, 1))]
        height = max(1, rows // given[0]) if info.dtype == _FLOAT8 else 1
        blocks = [(height, max(1, columns // given[1]))]
        zeros = f"{base}zero_point"
        matrix = self._with_zeros(name, f"{base}scale", zeros, (rows, columns), blocks)
        return self._with_inputs(matrix, f"{base}act_pre_scale")

    def _quark(self, name: str, info: TensorInfo) -> StoredMatrix | None:
        """Describe a matrix of Quark; None for a matrix of floats."""
        if info.dtype != "int32":
            return self._scaled_or_pairs(name, info)
        columns, words = self._matrix_shape(name, info)
        shape, order, offset = (words * 8, columns), self._scheme.order, self._scheme.offset
        if not order:
            raise ConfigError(
                f"tensor {tensor_name(name)} is int32: the config must have 'int4' or 'uint4' as "
                "the dtype of weights"
            )
        _, scales, zeros = self._transposed_grids(
            f"{name}_scale", f"{name}_zero_point", {4: shape}, order
        )
        matrix = IntegerMatrix(
            *(name, shape, 4, scales, zeros),
            offset=offset,
            transposed=True,
            order=order,
            signed=offset > 0,
        )
        return self._with_groups(matrix)

    def _transposed_grids(
        self,
        scales_name: str,
        zeros_name: str,
        shapes: Mapping[int, tuple[int, int]],
        order: tuple[int, ...] = (),
    ) -> tuple[int, Grid, Grid]:
        """Return the bits of a transposed matrix, and the grids of its scales and zeros.

        `shapes` has the shape of the matrix for each allowed number of bits. Both tensors have a
        row for each group of columns of the matrix. Their shapes show the bits and the groups.
        """
        options: dict[tuple[tuple[int, ...], tuple[int, ...]], set[tuple[int, int]]] = {}
        for bits, (rows, columns) in shapes.items():
            for width in (min(width, columns) for _, width in self._scheme.blocks):
                groups = ceil_div(columns, width)
                key = (groups, rows), (groups, ceil_div(rows * bits, 32))
                options.setdefault(key, set()).add((bits, width))
        scales = self._take(scales_name, {*FLOATS.values()}, *{it for it, _ in options})
        fitting = {it for own, it in options if own == scales.shape}
        zeros = self._take(zeros_name, "int32", *fitting)
        if len(found := options[scales.shape, zeros.shape]) > 1:
            raise ConfigError(
                f"tensor {tensor_name(scales_name)} has shape {list(scales.shape)}, which "
                f"fits several of the config's packings: (bits, columns of a group) {sorted(found)}"
            )
        [(bits, width)] = found
        grid = partial(Grid, height=1, width=width, transposed=True)
        return (
            bits,
            grid(scales_name, scales.shape),
            grid(zeros_name, zeros.shape, bits=bits, order=order),
        )

    def _column_groups(self, name: str, count: int, width: int) -> Tensor | None:
        """Return the group of each column, int32 `[count]`; None if the groups are in order."""
        if name not in self._given:
            if self._scheme.reordered and width < count:
                self._missing(name)
            return None
        self._take(name, {"int32", "int64"}, (count,))
        found = self._read(name)
        if self._scheme.method == _CT and (found == -1).any():  # the index is unused
            return None
        if not ((found >= 0) & (found < ceil_div(count, width))).all():
            raise ConfigError(
                f"tensor {tensor_name(name)} must have numbers of groups, 0 to "
                f"{ceil_div(count, width) - 1}"
            )
        found = found.int()
        in_order = torch.arange(count, dtype=torch.int32) // width
        return None if torch.equal(found, in_order) else found

    def _with_groups(self, matrix: IntegerMatrix) -> IntegerMatrix:
        """Return the matrix, with `groups_of` set if its method `groups` can be called.

        `groups` needs 4 bits, columns in order, scales that are exact in float16, and groups that
        have a multiple of 32 columns or are whole rows.
        """
        width, columns = matrix.scales.width, matrix.shape[1]
        if matrix.bits != 4 or matrix.column_groups is not None:
            return matrix
        if width < columns and width % GROUP:
            return matrix
        scales = self._given[matrix.scales.name]
        if scales.dtype != "float16":
            given = self._read(matrix.scales.name).float()
            if not torch.equal(given.half().float(), given):
                return matrix
        return replace(matrix, groups_of="int4")

    def _experts(self, name: str, info: TensorInfo) -> ExpertBlocks:
        """Describe a gpt-oss layer's tensor of blocks, which has the matrices of all experts."""
        module = name.removesuffix("_blocks")
        if info.dtype != "uint8" or len(info.shape) != 4 or info.shape[3] != _MXFP4 // 2:
            raise ConfigError(
                f"tensor {tensor_name(name)} is {info.dtype} {list(info.shape)}: it must be uint8 "
                f"[experts, rows, groups, {_MXFP4 // 2}]"
            )
        scales = f"{module}_scales"
        self._take(scales, "uint8", info.shape[:3])
        return ExpertBlocks(name, scales, info.shape, kept_groups(self._read(scales)))

    def _bitsandbytes(self, name: str, info: TensorInfo) -> StoredMatrix | None:
        if info.dtype == "int8":
            scales, shape = name.removesuffix("weight") + "SCB", self._matrix_shape(name, info)
            self._take(scales, "float32", shape[:1])
            grid = self._grid(scales, shape, ())
            return ScaledMatrix(name, shape, grid, factor=_INT8_FACTOR)
        if not has_codebook(name, self._given):
            return None
        return codebook_matrix(name, self._given, self._take, self._read)

    def _mlx(self, name: str, info: TensorInfo) -> StoredMatrix | None:
        return mlx_matrix(name, self._scheme.packings, self._given, self._take, self._read)

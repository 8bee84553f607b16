"""Checkpoints of every family in every format, packed here by the definitions of the formats.

A format packs the matrices that a library of that format packs: those of linear modules in the
layers, except routers; MLX packs all. Every seventh of them stays in floats, as modules may that a
config lists as not converted, so matrices that a network joins are partly packed.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from family_runs import family_folder
from mlx_folders import dequantize, mlx_folder, quantize
from safetensors.torch import load_file
from torch import Tensor

GROUP = 32
_AWQ_ORDER = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
_E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
_KEPT = re.compile(
    r"gate\.weight|router|embed|wte|wpe|lm_head|conv1d|expert_gate|in_proj_b|put_linear"
)
_KEPT_BY_MLX = re.compile(r"conv1d|norm")  # it packs embeddings and routers, too
Packed = tuple[dict[str, Tensor], Tensor]  # a module's tensors by ending, and its floats


class Format(NamedTuple):
    """`field`: the field of config.json, and its value. `pack`: packs a matrix `[out, in]`."""

    field: tuple[str, dict[str, Any]]
    pack: Callable[[Tensor], Packed]


def _words(integers: Tensor) -> Tensor:
    """Pack the 4-bit integers of each row, the first one in the lowest bits of a word."""
    own = integers.long().unflatten(-1, (-1, 8)) << torch.arange(0, 32, 4)
    return own.sum(-1).to(torch.uint32).view(torch.int32)


def _grouped(matrix: Tensor, zeros: Tensor | int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return integers from 0 to 15, scales and zeros `[rows, groups]`; None: zeros that fit."""
    groups = matrix.unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if zeros is None:
        scales = ((high - low) / 15).half()
        zeros = (-low / scales.float()).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(-1) / 7).half()
        zeros = torch.full_like(low, float(zeros))
    steps = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return steps.clamp(0, 15).flatten(1).int(), scales, zeros.int()


def _floats(integers: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    groups = integers.unflatten(1, (-1, GROUP)) - zeros[..., None]
    return (groups * scales.float()[..., None]).flatten(1)


def _gptq(matrix: Tensor) -> Packed:
    integers, scales, zeros = _grouped(matrix, 8)
    tensors = {
        "qweight": _words(integers).t(),
        "qzeros": _words(zeros.t() - 1),
        "scales": scales.t(),
        "g_idx": torch.arange(matrix.shape[1], dtype=torch.int32) // GROUP,
    }
    return tensors, _floats(integers, scales, zeros)


def _awq(matrix: Tensor) -> Packed:
    integers, scales, zeros = _grouped(matrix, None)
    own, other = (it.t().unflatten(1, (-1, 8))[..., _AWQ_ORDER] for it in (integers, zeros))
    tensors = {
        "qweight": _words(own.flatten(1)),
        "qzeros": _words(other.flatten(1)),
        "scales": scales.t(),
    }
    return tensors, _floats(integers, scales, zeros)


def _compressed(matrix: Tensor) -> Packed:
    integers, scales, zeros = _grouped(matrix, 8)
    shape = torch.tensor(matrix.shape)
    packed = {"weight_packed": _words(integers), "weight_scale": scales, "weight_shape": shape}
    return packed, _floats(integers, scales, zeros)


def _fp8(matrix: Tensor) -> Packed:
    rows, columns = matrix.shape
    whole = torch.zeros(-(-rows // GROUP) * GROUP, -(-columns // GROUP) * GROUP)
    whole[:rows, :columns] = matrix
    blocks = whole.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    numbers = (blocks / scales).to(torch.float8_e4m3fn)
    floats = (numbers.float() * scales).flatten(2).flatten(0, 1)[:rows, :columns]
    own = numbers.flatten(2).flatten(0, 1)[:rows, :columns]
    return {"weight": own, "weight_scale_inv": scales.squeeze(3).squeeze(1)}, floats


def _modelopt(matrix: Tensor) -> Packed:
    """Wide matrices as NVFP4, others as 8-bit floats with one scale."""
    if matrix.shape[0] > matrix.shape[1]:
        scale = matrix.abs().max() / 448
        own = (matrix / scale).to(torch.float8_e4m3fn)
        return {"weight": own, "weight_scale": scale}, own.float() * scale
    groups, whole = matrix.unflatten(1, (-1, 16)), matrix.abs().max() / (448 * 6)
    scales = (groups.abs().amax(-1) / (6 * whole)).to(torch.float8_e4m3fn)
    real = (scales.float() * whole)[..., None]
    places = (groups.abs() / real.clamp(min=1e-30))[..., None].sub(_E2M1).abs().argmin(-1)
    floats = (_E2M1[places] * groups.sign() * real).flatten(1)
    codes = (places + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    packed = {"weight": codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
    return packed | {"weight_scale_2": whole, "input_scale": torch.ones(())}, floats


def _mlx(matrix: Tensor) -> Packed:
    packed = quantize(matrix, 4, GROUP)
    return packed, dequantize(packed, 4, GROUP)


_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_GROUPS = {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}}
_FIELD = "quantization_config"
FORMATS: Mapping[str, Format] = {
    "GPTQ": Format(
        (_FIELD, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}), _gptq
    ),
    "AWQ": Format(
        (_FIELD, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}), _awq
    ),
    "compressed-tensors": Format(
        (
            _FIELD,
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": _GROUPS,
            },
        ),
        _compressed,
    ),
    "fp8": Format((_FIELD, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}), _fp8),
    "ModelOpt": Format((_FIELD, {"quant_method": "modelopt", "quant_algo": "NVFP4"}), _modelopt),
    "MLX": Format(("quantization", {"group_size": GROUP, "bits": 4}), _mlx),
}
Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


def separated(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write experts that a layer has in one tensor as modules, which libraries do to pack them."""
    found: dict[str, Tensor] = {}
    embedding = re.compile("(embed_tokens|word_embeddings).weight$")
    hidden = next((it.shape[1] for key, it in state.items() if embedding.search(key)), 0)
    for key, tensor in state.items():
        match = re.fullmatch(r"(.*experts)\.(gate_up|down)_proj(_bias)?", key)
        if match is None:
            found[key] = tensor
            continue
        module, kind, is_bias = match.groups()
        is_out_in = is_bias or tensor.shape[1 if kind == "down" else 2] == hidden
        own = tensor if is_out_in else tensor.mT
        is_mixed = f"{module}.gate_up_proj_bias" in state  # gpt-oss
        halves = (own[:, ::2], own[:, 1::2]) if is_mixed else own.chunk(2, 1)
        named = {"down": own} if kind == "down" else dict(zip(("gate", "up"), halves, strict=True))
        for (name, part), number in itertools.product(named.items(), range(len(own))):
            ending = "bias" if is_bias else "weight"
            found[f"{module}.{number}.{name}_proj.{ending}"] = part[number]
    return found


def packed_checkpoint(name: str, format_: str, target: Path) -> tuple[Checkpoint, Checkpoint, int]:
    """Return a family's checkpoint in a format, its floats, and the number of packed matrices."""
    is_mlx = format_ == "MLX"
    folder = mlx_folder(name, target) if is_mlx else family_folder(name)
    config = json.loads((folder / "config.json").read_text())
    (field, value), pack = FORMATS[format_]
    state = load_file(folder / "model.safetensors")
    state, kept = (state, _KEPT_BY_MLX) if is_mlx else (separated(state), _KEPT)
    packed, floats, count = {}, {}, 0
    for number, (key, tensor) in enumerate(state.items()):
        # GPT-2 has [in, out]; libraries pack [out, in]
        is_turned = name == "gpt2" and key.startswith("transformer.h.")
        own = tensor.t() if is_turned and tensor.dim() == 2 else tensor
        packed[key] = floats[key] = tensor.contiguous()
        fits = own.dim() in (2, 3 if is_mlx else 2) and own.shape[-1] % GROUP == 0
        fits = fits and own.shape[0] % (1 if is_mlx else 8) == 0
        if not fits or not key.endswith(".weight") or kept.search(key) or number % 7 == 3:
            continue
        tensors, matrix = pack(own)
        floats[key] = matrix.t().contiguous() if is_turned else matrix
        module = key.removesuffix("weight")
        del packed[key]
        packed |= {module + ending: it.contiguous() for ending, it in tensors.items()}
        count += 1
    return ({**config, field: value}, packed), (config, floats), count

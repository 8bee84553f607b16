"""Packs the fixtures of this folder with the libraries that own the formats.

Needs torch, transformers, compressed-tensors 0.20 and bitsandbytes 0.50, and the unpacked sources
of auto-gptq 0.7.1 and autoawq 0.2.9. Their packing functions are plain torch (the packages
cannot be imported without a GPU or with this release of transformers):

    python pack_fixtures.py AUTO_GPTQ_FOLDER AUTOAWQ_FOLDER [NAME...]

packs all fixtures, or those named. `ct-int4-reordered` needs compressed-tensors 0.10, the last
release that can write it, so it is packed only when named.

Each fixture has the packed linears of one tiny Llama as NAME.safetensors. `floats.safetensors` has
the tensors that no format packs. `expected.json` has the `quantization_config` of each fixture, and
the SHA-256 digest of each matrix as its library dequantizes it in float32.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

HERE = Path(__file__).parent
HIDDEN, INNER, VOCABULARY = 64, 32, 32
LAYER = "model.layers.0."
SHAPES = {
    "self_attn.q_proj": (INNER, HIDDEN),
    "self_attn.k_proj": (INNER, HIDDEN),
    "self_attn.v_proj": (INNER, HIDDEN),
    "self_attn.o_proj": (HIDDEN, INNER),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
KEPT = ["lm_head", "model.layers.0.mlp.up_proj"]  # modules that no format converts
Packed = tuple[dict[str, Tensor], Tensor]  # a module's tensors by suffix, and its floats


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in SHAPES.items()}


def ct(
    format_: str, args: Mapping[str, Any], state: Mapping[str, Tensor], weight: Tensor
) -> Packed:
    compressor = BaseCompressor.get_value_from_registry(format_)
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    packed = compressor.compress({"weight": weight.clone(), **state}, scheme)
    floats = compressor.decompress(dict(packed), scheme)["weight"].float()
    return {name: it.contiguous() for name, it in packed.items() if it is not None}, floats


def ct_config(format_: str, *groups: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "ignore": KEPT,
        "config_groups": {
            f"group_{n}": {"targets": ["Linear"], "weights": dict(it), "input_activations": None}
            for n, it in enumerate(groups)
        },
    }


INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {**INT8, "type": "float"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
FP4 = {**INT4, "type": "float"}
BLOCK = [32, 32]


def ct_int8(name: str, weight: Tensor) -> Packed:
    if "mlp" in name:  # with a zero point for each row
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scale = (high - low) / 255
        zero = (-128 - low / scale).round().clamp(-128, 127).to(torch.int8)
        state = {"weight_scale": scale, "weight_zero_point": zero}
        return ct("int-quantized", {**INT8, "symmetric": False}, state, weight)
    scale = weight.abs().amax(1, keepdim=True) / 127
    return ct("int-quantized", INT8, {"weight_scale": scale}, weight)


def ct_fp8(name: str, weight: Tensor) -> Packed:
    if "v_proj" in name or "o_proj" in name:
        scale = (weight.abs().max() / 448).view(1)
        return ct("float-quantized", {**FP8, "strategy": "tensor"}, {"weight_scale": scale}, weight)
    if "mlp" in name:
        scale = weight.view(len(weight) // 32, 32, -1, 32).abs().amax((1, 3)) / 448
        args = {**FP8, "strategy": "block", "block_structure": BLOCK}
        return ct("float-quantized", args, {"weight_scale": scale}, weight)
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16().float()
    return ct("float-quantized", FP8, {"weight_scale": scale}, weight)


def ct_int4(name: str, weight: Tensor) -> Packed:
    scale = (weight.view(len(weight), -1, 32).abs().amax(-1) / 7).half().float()
    return ct("pack-quantized", INT4, {"weight_scale": scale}, weight)


def ct_int4_asymmetric(name: str, weight: Tensor) -> Packed:
    groups = weight.view(len(weight), -1, 32)
    scale = ((groups.amax(-1) - groups.amin(-1)) / 15).half().float()
    zero = (-8 - groups.amin(-1) / scale).round().clamp(-8, 7).to(torch.int8)
    state = {"weight_scale": scale, "weight_zero_point": zero}
    return ct("pack-quantized", {**INT4, "symmetric": False}, state, weight)


def ct_int4_reordered(name: str, weight: Tensor) -> Packed:
    index = shuffled_groups(weight).int()
    parts = [weight[:, index == it].abs().amax(1) / 7 for it in range(weight.shape[1] // 32)]
    scale = torch.stack(parts, dim=1).bfloat16().float()
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import (
        pack_to_int32,
    )

    own = QuantizationArgs(**INT4, actorder="group")
    integers = quantize(weight, scale, None, own, dtype=torch.int8, g_idx=index)
    floats = dequantize(integers, scale, None, own, g_idx=index)
    packed = {
        "weight_scale": scale,
        "weight_g_idx": index,
        "weight_packed": pack_to_int32(integers, 4),
        "weight_shape": torch.tensor(weight.shape),
    }
    return packed, floats.float()


def ct_fp4(name: str, weight: Tensor) -> Packed:
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8

    if "mlp" in name:
        scale = torch.exp2((weight.view(len(weight), -1, 32).abs().amax(-1) / 6).log2().ceil())
        return ct("mxfp4-pack-quantized", FP4, {"weight_scale": scale}, weight)
    whole = (448 * 6 / weight.abs().max()).view(1)
    groups = weight.view(len(weight), -1, 16).abs().amax(-1) / 6 * whole
    state = {
        "weight_scale": groups.to(torch.float8_e4m3fn).float(),
        "weight_global_scale": whole,
    }
    args = {**FP4, "strategy": "tensor_group", "group_size": 16}
    packed, _ = ct("nvfp4-pack-quantized", args, state, weight)
    # as `decompress` does it, but not in bfloat16
    numbers = unpack_fp4_from_uint8(packed["weight_packed"], *weight.shape, torch.float32)
    scale, own = packed["weight_scale"].float(), QuantizationArgs(**args)
    floats = dequantize(numbers, scale, None, own, global_scale=whole, dtype=torch.float32)
    return packed, floats


def shuffled_groups(weight: Tensor) -> Tensor:
    """Return the group of each column, as act-order leaves them: not next to each other."""
    generator = torch.Generator().manual_seed(len(weight))
    return torch.randperm(weight.shape[1], generator=generator) // 32


def fine_grained(name: str, weight: Tensor) -> Packed:
    options = types.SimpleNamespace(weight_block_size=BLOCK, scale_fmt=None)
    owner = types.SimpleNamespace(quantization_config=options)
    found = Fp8Quantize(owner)._quantize_one("a.weight", weight)
    packed = {key.removeprefix("a."): value for key, value in found.items()}
    floats = Fp8Dequantize(owner)._dequantize_one(
        packed["weight"], packed["weight_scale_inv"], torch.float32
    )
    return packed, floats


def gptq(source: Path, symmetric: bool) -> Callable[[str, Tensor], Packed]:
    path = source / "auto_gptq/nn_modules/qlinear/qlinear_cuda.py"
    spec = importlib.util.spec_from_file_location("qlinear_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def pack(name: str, weight: Tensor) -> Packed:
        linear = nn.Linear(weight.shape[1], len(weight), bias=False)
        linear.weight.data = weight
        columns = weight.shape[1]
        index = torch.arange(columns) // 32 if symmetric else shuffled_groups(weight)
        parts = [weight[:, index == it] for it in range(columns // 32)]
        if symmetric:
            scale = torch.stack([it.abs().amax(1) / 7 for it in parts], 1).half().float()
            zero = torch.full_like(scale, 8)
        else:
            scale = torch.stack([(it.amax(1) - it.amin(1)) / 15 for it in parts], 1).half().float()
            low = torch.stack([it.amin(1) for it in parts], 1)
            zero = (-low / scale).round().clamp(1, 15)
        own = module.QuantLinear(4, 32, columns, len(weight), False, weight_dtype=torch.float32)
        own.pack(linear, scale, zero, index.to(torch.int32))
        floats = own(torch.eye(columns)).t()  # sums of one number and zeros are exact
        packed = {it: getattr(own, it) for it in ("qweight", "qzeros", "g_idx")}
        return {**packed, "scales": own.scales.half()}, floats

    return pack


def awq(source: Path) -> Callable[[str, Tensor], Packed]:
    for name in ("awq", "awq.utils", "awq.modules"):  # without their __init__
        own = types.ModuleType(name)
        own.__path__ = [str(source / name.replace(".", "/"))]
        sys.modules[name] = own
    module_utils = types.ModuleType("awq.utils.module")
    module_utils.try_import = lambda name: (None, "")
    utils = types.ModuleType("awq.utils.utils")
    utils.get_best_device = lambda: "cpu"
    sys.modules |= {"awq.utils.module": module_utils, "awq.utils.utils": utils}
    sys.modules["awq.modules.triton"] = types.ModuleType("awq.modules.triton")
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    def pack(name: str, weight: Tensor) -> Packed:
        linear = nn.Linear(weight.shape[1], len(weight), bias=False)
        linear.weight.data = weight
        groups = weight.view(len(weight), -1, 32)
        scale = ((groups.amax(-1) - groups.amin(-1)) / 15).half().float()
        zero = (-groups.amin(-1) / scale).round().clamp(0, 15)
        # `from_linear` does not clamp
        own = WQLinear_GEMM.from_linear(
            linear, 4, 32, scales=scale.t().contiguous(), zeros=zero.t().contiguous()
        )
        packed = {it: getattr(own, it) for it in ("qweight", "qzeros", "scales")}
        floats = dequantize_gemm(own.qweight, own.qzeros, own.scales.float(), 4, 32).t()
        return packed, floats

    return pack


def bnb8(name: str, weight: Tensor) -> Packed:
    integers, scale, _ = torch.ops.bitsandbytes.int8_vectorwise_quant(weight.half())
    floats = bitsandbytes.functional.int8_vectorwise_dequant(integers, scale)
    packed = {"weight": integers, "SCB": scale, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return packed, floats


def bnb4(name: str, weight: Tensor) -> Packed:
    kind = "fp4" if "v_proj" in name else "nf4"
    functional = bitsandbytes.functional
    packed, state = functional.quantize_4bit(
        weight, quant_type=kind, compress_statistics="mlp" in name, blocksize=64
    )
    tensors = {f"weight.{it}": value for it, value in state.as_dict(packed=True).items()}
    # 0.50 dequantizes rows that are shorter than a block wrongly on a CPU
    state.shape = torch.Size((weight.numel() // 64, 64))
    floats = functional.dequantize_4bit(packed, state).view(weight.shape)
    return {"weight": packed, **tensors}, floats


def main() -> None:
    gptq_source, awq_source = map(Path, sys.argv[1:3])
    named = sys.argv[3:]
    group = {"bits": 4, "group_size": 32}
    block_fp8 = {**FP8, "strategy": "block", "block_structure": BLOCK}
    formats: Mapping[str, tuple[Any, dict[str, Any]]] = {
        "ct-int8": (ct_int8, ct_config("int-quantized", INT8, {**INT8, "symmetric": False})),
        "ct-fp8": (
            ct_fp8,
            ct_config("float-quantized", {**FP8, "strategy": "tensor"}, FP8, block_fp8),
        ),
        "ct-int4": (ct_int4, ct_config("pack-quantized", INT4)),
        "ct-int4-asymmetric": (
            ct_int4_asymmetric,
            ct_config("pack-quantized", {**INT4, "symmetric": False}),
        ),
        "ct-int4-reordered": (
            ct_int4_reordered,
            ct_config("pack-quantized", {**INT4, "actorder": "group"}),
        ),
        "ct-fp4": (
            ct_fp4,
            ct_config(
                "mixed-precision", {**FP4, "strategy": "tensor_group", "group_size": 16}, FP4
            ),
        ),
        "fp8": (
            fine_grained,
            {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": BLOCK,
                "modules_to_not_convert": KEPT,
            },
        ),
        "gptq": (
            gptq(gptq_source, True),
            {"quant_method": "gptq", **group, "sym": True, "desc_act": False},
        ),
        "gptq-reordered": (
            gptq(gptq_source, False),
            {"quant_method": "gptq", **group, "sym": False, "desc_act": True},
        ),
        "awq": (
            awq(awq_source),
            {"quant_method": "awq", **group, "version": "gemm", "zero_point": True},
        ),
        "bnb8": (bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "bnb4": (bnb4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    }
    named = named or [name for name in formats if name != "ct-int4-reordered"]
    file = HERE / "expected.json"
    expected = json.loads(file.read_text()) if file.exists() else {}
    for name in named:
        pack, config = formats[name]
        tensors, digests = {}, {}
        for module, weight in weights().items():
            packed, floats = pack(module, weight)
            tensors |= {f"{LAYER}{module}.{it}": value.contiguous() for it, value in packed.items()}
            error = (floats - weight).norm() / weight.norm()
            assert floats.dtype is torch.float32 and error < 0.15, (name, module, error)
            own = floats.detach().contiguous().numpy().tobytes()
            digests[f"{LAYER}{module}.weight"] = hashlib.sha256(own).hexdigest()
        save_file(tensors, HERE / f"{name}.safetensors")
        expected[name] = {"config": config, "digests": digests}
    file.write_text(json.dumps(expected, indent=1) + "\n")
    generator = torch.Generator().manual_seed(6)

    def half(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) * 0.3).half()

    floats = {
        "model.embed_tokens.weight": half(VOCABULARY, HIDDEN),
        "lm_head.weight": half(VOCABULARY, HIDDEN),
        f"{LAYER}mlp.up_proj.weight": half(INNER, HIDDEN),
        "model.norm.weight": 1 + half(HIDDEN),
        f"{LAYER}input_layernorm.weight": 1 + half(HIDDEN),
        f"{LAYER}post_attention_layernorm.weight": 1 + half(HIDDEN),
    }
    save_file(floats, HERE / "floats.safetensors")


if __name__ == "__main__":
    main()

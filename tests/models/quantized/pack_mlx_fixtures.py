"""Packs the fixtures of MLX with MLX itself, which has wheels for Linux:

    pip install "mlx[cpu]==0.32.4"
    python pack_mlx_fixtures.py

Each fixture has the packed linears of one tiny Llama as NAME.safetensors. Their options, and the
SHA-256 digest of each matrix as MLX dequantizes it in float32, are added to `expected.json`.
The experts of `mlx-experts.safetensors` have a global scale each, next to their floats.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import mlx.core as mx
import numpy as np

HERE = Path(__file__).parent
LAYER = "model.layers.0."
SHAPES = {
    "self_attn.q_proj": (32, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 32),
    "mlp.gate_proj": (32, 64),
    "mlp.down_proj": (64, 32),
}
FOUR_BITS = [("affine", 4, 32, mx.bfloat16), ("affine", 4, 32, mx.float16)]
FORMATS = {
    "mlx": FOUR_BITS * 3,
    "mlx-mixed": [
        ("affine", 8, 64, mx.float16),
        ("affine", 3, 32, mx.bfloat16),
        ("affine", 6, 64, mx.bfloat16),
        ("affine", 5, 32, mx.float16),
        ("affine", 2, 64, mx.bfloat16),
        ("affine", 8, 32, mx.bfloat16),
    ],
    "mlx-floats": [
        ("mxfp4", 4, 32, mx.bfloat16),
        ("nvfp4", 4, 16, mx.bfloat16),
        ("mxfp8", 8, 32, mx.bfloat16),
    ]
    * 2,
}


def main() -> None:
    file = HERE / "expected.json"
    expected = json.loads(file.read_text())
    for name, formats in FORMATS.items():
        generator = np.random.default_rng(7)
        tensors, digests, config = {}, {}, {"group_size": 32, "bits": 4}
        for (module, shape), (mode, bits, size, dtype) in zip(SHAPES.items(), formats, strict=True):
            own = f"{LAYER}{module}"
            weight = mx.array(generator.normal(scale=0.2, size=shape)).astype(dtype)
            options = {"group_size": size, "bits": bits, "mode": mode}
            packed = mx.quantize(weight, **options)
            tensors |= dict(
                zip((f"{own}.{it}" for it in ("weight", "scales", "biases")), packed, strict=False)
            )
            wide = packed
            if mode == "affine":
                wide = (packed[0], *(it.astype(mx.float32) for it in packed[1:]))
            floats = mx.dequantize(*wide, **options, dtype=mx.float32)
            digests[f"{own}.weight"] = hashlib.sha256(np.array(floats).tobytes()).hexdigest()
            if name != "mlx":
                config[own] = options
        mx.save_safetensors(str(HERE / f"{name}.safetensors"), tensors, {"format": "mlx"})
        expected[name] = {"config": config, "digests": digests}
    file.write_text(json.dumps(expected, indent=1) + "\n")
    pack_experts()


def pack_experts() -> None:
    """Pack experts as mlx_lm does with the option `global_scale`."""
    weights = mx.array(np.random.default_rng(8).normal(scale=0.2, size=(3, 8, 64)))
    largest = mx.max(mx.abs(weights), axis=(-2, -1)).astype(mx.float32)
    options = {"group_size": 16, "bits": 4, "mode": "nvfp4"}
    parts = [[], [], []]
    for weight, own in zip(weights.astype(mx.float32), largest, strict=True):
        words, scales = mx.quantize(weight, global_scale=own, **options)
        floats = mx.dequantize(words, scales, global_scale=own, dtype=mx.float32, **options)
        for found, tensor in zip(parts, (words, scales, floats), strict=True):
            found.append(tensor)
    names = [f"switch_mlp.up_proj.{it}" for it in ("weight", "scales", "global_scale")]
    words, scales, floats = map(mx.stack, parts)
    tensors = dict(zip(names, (words, scales, largest), strict=True)) | {"floats": floats}
    mx.save_safetensors(str(HERE / "mlx-experts.safetensors"), tensors, {"format": "mlx"})


if __name__ == "__main__":
    main()

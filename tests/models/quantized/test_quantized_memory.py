"""Quantized matrices that are loaded in pieces: their rows, and how much of a file is resident."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from mapped_files import resident_bytes
from quantized_config import CONFIG
from safetensors.torch import save_file
from torch import Tensor

from gptmanager.kernels.gemm.packed_matrix import PackedMatrix
from gptmanager.memory import Place, Weights
from gptmanager.memory.checkpoint.tensor_sources import StateDict
from gptmanager.memory.places import Run
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import as_floats

LAYERS, EXPERTS, WIDTH = 2, 8, 512
PIECE_BYTES = 1 << 20  # the file of a small model is mapped again after this number of bytes
GPT_OSS = {
    **CONFIG,
    "model_type": "gpt_oss",
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 1,
    "sliding_window": 8,
    "layer_types": ["full_attention"] * LAYERS,
    "quantization_config": {"quant_method": "mxfp4"},
}


def tensors_of_layer(layer: int) -> dict[str, Tensor]:
    own = f"model.layers.{layer}."
    found = {f"{own}self_attn.sinks": torch.zeros(2)}
    for norm in ("input_layernorm", "post_attention_layernorm"):
        found[f"{own}{norm}.weight"] = torch.ones(WIDTH)
    shapes = {"q": (32, WIDTH), "k": (32, WIDTH), "v": (32, WIDTH), "o": (WIDTH, 32)}
    modules = {f"self_attn.{it}_proj": shape for it, shape in shapes.items()}
    for module, shape in {**modules, "mlp.router": (EXPERTS, WIDTH)}.items():
        found[f"{own}{module}.weight"] = torch.zeros(shape)
        found[f"{own}{module}.bias"] = torch.zeros(shape[0])
    for part, rows in (("gate_up_proj", 2 * WIDTH), ("down_proj", WIDTH)):
        shape, name = (EXPERTS, rows, WIDTH // 32), f"{own}mlp.experts.{part}"
        found[f"{name}_blocks"] = torch.full((*shape, 16), 7, dtype=torch.uint8)
        found[f"{name}_scales"] = torch.full(shape, 120, dtype=torch.uint8)
        found[f"{name}_bias"] = torch.zeros(EXPERTS, rows)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_small_part_of_the_experts_is_resident_at_a_time(tmp_path: Path) -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(32, WIDTH),
        "lm_head.weight": torch.zeros(32, WIDTH),
        "model.norm.weight": torch.ones(WIDTH),
    }
    for layer in range(LAYERS):
        tensors |= tensors_of_layer(layer)
    file, found = tmp_path / "model.safetensors", [0]
    save_file(tensors, file)
    (tmp_path / "config.json").write_text(json.dumps(GPT_OSS))
    calls = itertools.count()

    def look(*_: object) -> None:
        if next(calls) % 4 == 0:  # a look takes 15 ms
            found.append(resident_bytes(file))

    load_model(tmp_path, weights_dtype="file", on_progress=look)
    assert 0 < max(found) < 2 * PIECE_BYTES < file.stat().st_size / 3


def test_every_second_row_is_written_from_all_pieces() -> None:
    """The second piece of the odd rows begins with an even one."""
    rows, columns = 4100, 512  # two pieces of 1 MiB, and four rows
    channels = {"weights": {"type": "int", "num_bits": 8, "strategy": "channel"}}
    scheme = {"quant_method": "compressed-tensors", "config_groups": {"all": channels}}
    given = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
    scales = torch.rand(rows, 1) + 0.1
    source = as_floats(
        {"quantization_config": scheme},
        StateDict({"a.weight": given, "a.weight_scale": scales}),
    )
    place = Place("a", runs=(Run(range(0, rows, 2), 0), Run(range(1, rows, 2), rows // 2)))
    weights = Weights(
        {"a": (rows, columns)},
        lambda _: {"a.weight": place},
        matrices=["a"],
        new_matrix=lambda *own: PackedMatrix(*own[:3], quantized=True),
        quantized={"a": "int8"},
    )
    weights.load(source)
    expected = PackedMatrix(rows, columns, torch.float32, quantized=True)
    exact = given.float() * scales
    expected.copy_(torch.cat((exact[::2], exact[1::2])))

    found = weights["a"]
    assert isinstance(found, PackedMatrix)
    assert torch.equal(found.unpacked(), expected.unpacked())

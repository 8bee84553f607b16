"""GGUF files as models: the logits of transformers, block types, memory, and what is refused."""

from __future__ import annotations

import logging
import re
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, PagedDriver, expected_logits, random_model
from gguf_files import (
    model_metadata,
    model_tensors,
    random_blocks,
    save_gguf,
    write_gguf,
)
from packed_logits import packed_logits, random_tokens, reference

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams
from gptmanager.assembly import loading
from gptmanager.callbacks import RequestQueue
from gptmanager.errors import ConfigError
from gptmanager.kernels import CpuKernels, PackedMatrix, plain
from gptmanager.kernels.gemm import matmul_plan
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import open_tensors, read_config
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.models.gguf.blocks.block_types import BLOCK_TYPES
from gptmanager.ranks.layout import RankLayout

SIZES = {number: (block.size, block.num_bytes) for number, block in BLOCK_TYPES.items()}
LOW_BITS = {41: 1, 42: 2}  # type -> bits of an element, of types that PyPI's gguf does not know
# the architecture of a file -> a config of a family
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", CONFIGS["llama"]),
    "llama_biased": ("llama", CONFIGS["llama_biased"]),
    "mistral": ("llama", {**CONFIGS["mistral"], "sliding_window": None}),
    "qwen2": ("qwen2", CONFIGS["qwen2"]),
    "qwen3": ("qwen3", CONFIGS["qwen3"]),
    "gpt2": ("gpt2", CONFIGS["gpt2"]),
}


def logits_error(path: Path, model: Any, **options: Any) -> float:
    sequences = random_tokens(1, 5, 23, 40, 8)
    driver = PagedDriver(load_model(path, **options), 5)
    pairs = zip(packed_logits(driver, sequences), sequences, strict=True)
    return max((ours - expected_logits(model, tokens)).abs().max().item() for ours, tokens in pairs)


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    architecture, config = CASES[name]
    model = random_model(config)
    path = save_gguf(tmp_path / "model.gguf", architecture, model)

    assert logits_error(path, model) < 1e-4
    assert logits_error(tmp_path, model) < 1e-4  # a folder with one


def test_rope_factors_of_llama_3_are_honored(tmp_path: Path) -> None:
    model = reference("llama3")
    config = model.config.to_dict()
    tensors = model_tensors("llama", config, model.state_dict())
    plain = 500.0 ** (-torch.arange(0, 8, 2).float() / 8)
    factors = (plain / model.model.rotary_emb.inv_freq).numpy()
    metadata = {**model_metadata("llama", config), "llama.rope.freq_base": 500.0}
    path = write_gguf(tmp_path / "a.gguf", metadata, {**tensors, "rope_freqs.weight": (0, factors)})

    assert factors.max() > 3
    assert logits_error(path, model) < 1e-4

    scaled = {**tensors, "rope_freqs.weight": (0, factors / 4)}
    for kind in ("linear", None, "longrope"):  # the frequencies are divided by the factor, too
        own = {"llama.rope.scaling.factor": 4.0}
        own |= {} if kind is None else {"llama.rope.scaling.type": kind}
        path = write_gguf(tmp_path / "b.gguf", {**metadata, **own}, scaled)
        assert logits_error(path, model) < 1e-4
    for own, told in (
        ({"llama.rope.scaling.type": "yarn"}, "scaling.type = 'yarn': not supported with rope_fr"),
        ({"llama.rope.scaling.factor": "4"}, "scaling.factor = '4': must be a number"),
    ):
        path = write_gguf(tmp_path / "b.gguf", {**metadata, **own}, scaled)
        with pytest.raises(ConfigError, match=told):
            load_model(path)
    own = {"llama.rope.scaling.attn_factor": 1.5}
    path = write_gguf(tmp_path / "b.gguf", {**metadata, **own}, tensors)
    with pytest.raises(ConfigError, match="attn_factor = 1.5: not supported without factors"):
        load_model(path)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("linear", {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}),
        ("linear", {"rope.scale_linear": 4.0}),
        ("linear", {"rope.scale_linear": 8.0, "rope.scaling.factor": 4.0}),
        ("default", {"rope.scaling.type": "none", "rope.scaling.factor": 4.0}),
        (
            "yarn",
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 40,
            },
        ),
    ],
)
def test_scaled_ropes_are_honored(kind: str, keys: dict[str, Any], tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0}
    if kind != "default":
        rope["factor"] = 4.0
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 40
    model = random_model({**CONFIGS["llama"], "rope_parameters": rope})
    own = {f"llama.{key}": value for key, value in keys.items()}

    assert logits_error(save_gguf(tmp_path / "a.gguf", "llama", model, **own), model) < 1e-4


def test_the_numbers_of_types_are_those_of_ggml() -> None:
    gguf = pytest.importorskip("gguf.constants", reason="PyPI's gguf is not installed")
    integers = {*range(24, 29), gguf.GGMLQuantizationType.Q8_1, gguf.GGMLQuantizationType.Q8_K}
    known = {int(one): one.name for one in gguf.GGMLQuantizationType if one <= 40}
    expected = {number: name for number, name in known.items() if number not in integers}
    assert {number: BLOCK_TYPES[number].name for number in expected} == expected


@pytest.mark.parametrize("number", BLOCK_TYPES, ids=lambda number: BLOCK_TYPES[number].name)
def test_blocks_unpack_as_llama_cpp_unpacks_them(number: int) -> None:
    # not `gguf` alone: that is also the folder of these tests
    quants = pytest.importorskip("gguf.quants", reason="PyPI's gguf is not installed")
    block = BLOCK_TYPES[number]
    raw = random_blocks(torch.Generator().manual_seed(number), 50, 3 * block.num_bytes)
    given = raw.view(block.dtype) if block.dtype in ("float16",) or number == 0 else raw
    with np.errstate(all="ignore"):  # some scales are not finite
        if number in LOW_BITS:
            expected = low_bits(raw.reshape(-1, block.num_bytes), LOW_BITS[number])
        else:
            expected = quants.dequantize(given, quants.GGMLQuantizationType(number))

    blocks = torch.from_numpy(raw).view(-1, block.num_bytes)
    ours = block.unpack(blocks).float()

    alone = block.unpack(blocks[1:2]).float()  # may begin where no number of 32 bits does
    assert np.array_equal(alone, ours[1:2], equal_nan=True)
    assert ours.shape == (50 * 3, block.size)
    assert np.array_equal(ours.numpy().reshape(expected.shape), expected, equal_nan=True)


def low_bits(blocks: np.ndarray, count: int) -> np.ndarray:
    """Q1_0 and Q2_0, which PyPI's gguf does not unpack: a scale, and numbers of 1 or 2 bits."""
    bits = np.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(np.int32)
    numbers = 2 * bits - 1 if count == 1 else bits[:, ::2] + 2 * bits[:, 1::2] - 1
    return blocks[:, :2].copy().view(np.float16).astype(np.float32) * numbers.astype(np.float32)


def test_scales_next_to_matrices_multiply_them(tmp_path: Path) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": 1}
    state = random_model(config).state_dict()
    tensors = with_experts(model_tensors("llama", config, state), joined=True)
    keys = {**model_metadata("llama", config), **EXPERTS}
    scales = {
        "blk.0.attn_q": [3.0],
        "blk.0.attn_v": [0.5],
        "blk.0.ffn_gate_up_exps": [4.0, 0.25],
        "blk.0.ffn_down_exps": [1.0, -2.0],
    }
    more = {f"{name}.scale": (0, np.float32(own)) for name, own in scales.items()}
    more["blk.0.attn_q.input_scale"] = 0, np.float32([7.0])
    plain, scaled = (
        open_tensors(write_gguf(tmp_path / f"{name}.gguf", keys, content))
        for name, content in (("a", tensors), ("b", {**tensors, **more}))
    )
    experts = "model.layers.0.block_sparse_moe.experts"
    factors = {
        f"model.layers.0.self_attn.{it}_proj.weight": by for it, by in (("q", 3), ("v", 0.5))
    }
    factors |= {
        f"{experts}.{n}.{it}.weight": by for n, by in ((0, 4), (1, 0.25)) for it in ("w1", "w3")
    }
    factors |= {f"{experts}.1.w2.weight": -2}
    assert plain.describe() == scaled.describe()
    for name in plain.describe():
        whole, own = (torch.cat([it for _, it in one.pieces(name, 999)]) for one in (plain, scaled))
        assert torch.equal(own, whole * factors.get(name, 1)), name
        if ".w1." in name:  # the upper half of a matrix for both modules
            below = torch.cat([it for _, it in plain.pieces(name.replace("w1", "w3"), 999)])
            stored = tensors["blk.0.ffn_gate_up_exps.weight"][1][int(name.split(".")[-3])]
            assert np.array_equal(torch.cat((whole, below)).numpy(), stored)

    for name, shape, told in (
        ("blk.0.ffn_down_exps", 1, r"F32, shape \[1\]: must be F32 \[2\], a scale for each matrix"),
        ("blk.0.attn_norm", 1, r"attn_norm.scale of shape \[1\] is unknown"),
    ):
        own = {**tensors, f"{name}.scale": (0, np.ones(shape, np.float32))}
        with pytest.raises(ConfigError, match=told):
            open_tensors(write_gguf(tmp_path / "c.gguf", keys, own))
    name = "blk.0.ffn_gate_up_exps.weight"
    own = {**tensors, name: (0, tensors[name][1][:, 1:])}
    with pytest.raises(ConfigError, match="gate_exps and ffn_up_exps have 111 rows together"):
        open_tensors(write_gguf(tmp_path / "c.gguf", keys, own))


EXPERTS = {"llama.expert_count": 2, "llama.expert_used_count": 1}


def with_experts(given: Mapping[str, Any], joined: bool = False) -> dict[str, Any]:
    """Replace the MLP of layer 0 by two experts, maybe with gate and up in one tensor."""
    found, layer = dict(given), "blk.0.ffn_"
    gate, up, down = (found.pop(f"{layer}{it}.weight")[1] for it in ("gate", "up", "down"))
    found[f"{layer}gate_inp.weight"] = 0, np.zeros((2, up.shape[1]), np.float32)
    own = {"gate": gate, "up": up, "down": down}
    if joined:
        own = {"gate_up": np.concatenate((gate, up)), "down": down}
    exps = {f"{layer}{it}_exps.weight": (0, np.stack([one, 2 * one])) for it, one in own.items()}
    return found | exps


def quantized_llama(
    path: Path,
    given: int,
    sparse: bool = False,
    scale: float = 0.001,
    others: Mapping[str, int] = MappingProxyType({}),
    **metadata: Any,
) -> Path:
    """A Llama with matrices of random blocks, in which the float16 numbers are `scale`.

    `given` is the type of its matrices, and `others` has the types of some of them by name.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    config = {**CONFIGS["llama"], **sizes}
    tensors = model_tensors("llama", config, random_model(config).state_dict())
    if sparse:
        tensors, metadata = with_experts(tensors), {**metadata, **EXPERTS}
    for name, (_, values) in tensors.items():
        if values.ndim > 1:
            number = others.get(name, given)
            block = BLOCK_TYPES[number]
            raw = random_blocks(generator, values.size // block.size, block.num_bytes)
            scales = [208] if block.name == "Q6_K" else [0, 2][: 2 if "_1" in block.name else 1]
            ends = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "TQ1_0": [52]}
            scales = ends.get(block.name, scales)
            if block.name == "MXFP4":  # half of the power of two is the scale of the codebook
                raw[:, 0] = np.round(np.log2(scale) + 128 + np.arange(len(raw)) % 3)
                scales = []
            for at in scales:
                raw[:, at : at + 2] = np.float16([scale]).view(np.uint8)
            tensors[name] = number, raw.reshape(*values.shape[:-1], -1)
    keys = {**model_metadata("llama", config), **metadata}
    return write_gguf(path, keys, tensors, sizes=SIZES)


@pytest.mark.parametrize("number", [2, 3, 6, 7, 8, 12, 13, 14])
def test_a_model_of_any_type_has_the_logits_of_its_floats(number: int, tmp_path: Path) -> None:
    """In slices of any rows, and with the rows of queries and keys in their order."""
    path = quantized_llama(tmp_path / "a.gguf", number)
    source, config = open_tensors(path), read_config(path)
    whole = {
        name: torch.cat([piece for _, piece in source.pieces(name, 1 << 40)])
        for name in source.describe()
    }
    name = "model.layers.0.self_attn.q_proj.weight"
    pieces = list(source.pieces(name, 5000, [range(3, 200), range(32, 96)]))

    assert len(pieces) > 10 and [start for start, _ in pieces][:2] == [0, len(pieces[0][1])]
    assert torch.equal(torch.cat([it for _, it in pieces]), whole[name][3:200, 32:96])
    ours, floats = load_model(path), load_model((config, whole))
    for parameter in floats.weights:
        assert _equal(ours.weights[parameter], floats.weights[parameter])


def _equal(ours: Any, expected: Any) -> bool:
    if not isinstance(ours, torch.Tensor):
        ours, expected = ours.values, expected.values
    return torch.equal(ours, expected)


def test_a_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    path = quantized_llama(tmp_path / "a.gguf", 8)
    source = open_tensors(path)
    size = max(np.prod(info.shape) for info in source.describe().values()) * 4
    tracemalloc.start()
    largest = 0
    for name in source.describe():
        for _, piece in source.pieces(name, size // 16):
            largest = max(largest, piece.nbytes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert largest <= size // 16
    assert peak < path.stat().st_size / 4  # Python's objects, but no copy of the file


def manager(path: Path, **options: Any) -> GptManager:
    queue = RequestQueue.for_checkpoint(path)
    params = OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=256), **options)
    callbacks = queue.get_inference_requests, queue.send_response
    return GptManager(
        path, ModelType.INFLIGHT_FUSED_BATCHING, 1, None, *callbacks, optional_params=params
    )


@pytest.mark.parametrize(
    ("number", "options", "stored"),
    [
        (3, {}, torch.uint8),  # 4 bits, two in a byte
        (2, {}, torch.uint8),
        (8, {}, torch.int8),
        (8, {"weights_dtype": "int4"}, torch.uint8),
        (3, {"weights_dtype": "int8"}, torch.int8),
        (3, {"dtype": "float32"}, torch.float32),
    ],
)
def test_quantized_files_are_kept_in_few_bits_unless_a_dtype_is_given(
    number: int,
    options: dict[str, Any],
    stored: torch.dtype,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = quantized_llama(tmp_path / "a.gguf", number)
    caplog.set_level(logging.INFO, logger="gptmanager")
    loaded: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> Any:
        loaded.append(load_model(*args, **kwargs))
        return loaded[-1]

    monkeypatch.setattr(loading, "load_model", load)
    manager(path, **options).shutdown()

    dtypes = {getattr(matrix, "values", matrix).dtype for matrix in loaded[0].weights.matrices}
    heads = {torch.int8} if options == {"weights_dtype": "int4"} else set()
    assert dtypes == {stored} | heads
    kinds = {torch.uint8: "in 4 bits", torch.int8: "in 8 bits", torch.float32: "in float32"}
    assert re.search(rf"from quantized weights; matrices: .*[1-9]\d* {kinds[stored]}", caplog.text)


@pytest.mark.parametrize(
    ("number", "weights_dtype", "sparse"),
    [
        (2, "file", False),
        (2, "int4", True),
        (3, "file", True),
        (3, "int4", False),
        (12, "file", True),
        (34, "file", False),
        (20, "file", False),
        (23, "int4", False),
        (39, "file", True),
        (39, "int4", False),
    ],
)
def test_matrices_in_4_bits_keep_their_numbers(
    number: int, weights_dtype: Any, sparse: bool, tmp_path: Path
) -> None:
    """Also the rows of queries and keys that are stored in pairs, and in a converted folder."""
    path = quantized_llama(tmp_path / "a.gguf", number, sparse)
    exact = load_model(path, dtype="float32").weights
    # scales and minima become float16: at most 63 x 0.001 of Q4_K, 32 x 0.001 of IQ4_XS
    error = {12: 0.063 * 16 / 2**11, 23: 0.032 * 127 / 2**12}.get(number, 0)
    folder = convert_checkpoint(path, tmp_path / "folder", weights_dtype="int4")
    codebook = BLOCK_TYPES[number].codebook
    for source in (path, folder):
        weights = load_model(source, dtype="float32", weights_dtype=weights_dtype).weights
        kept = [name for name in weights if isinstance(weights[name], Int4Matrix)]
        # with the embedding, and without the router, which is floats
        assert len(kept) == len(weights.matrices) + 1 - sparse
        for name in kept:
            assert (weights[name].unpacked() - plain(exact[name])).abs().max() <= error
            assert weights[name].codebook == codebook


@pytest.mark.parametrize(
    ("number", "small", "large"),
    [(12, 5e-7, 60000), (23, 1e-7, 60000), (39, 2.0**-17, 2.0**16)],
)
def test_matrices_with_scales_beyond_float16_are_stored_in_8_bits(
    number: int, small: float, large: float, tmp_path: Path
) -> None:
    """The largest scale must be at least 2^-14; one of Q4_K is up to 63 times its number."""
    path = quantized_llama(tmp_path / "small.gguf", number, scale=small)
    weights = load_model(path, weights_dtype="file").weights
    assert {matrix.values.dtype for matrix in weights.matrices} == {torch.int8}
    path = quantized_llama(tmp_path / "large.gguf", number, scale=large)
    name = BLOCK_TYPES[number].name
    with pytest.raises(ConfigError, match=f"weight of {name} has a scale .*at most 65504"):
        load_model(path, weights_dtype="file")
    load_model(path, weights_dtype="int8")


@pytest.mark.parametrize("other", [2, 8, 39])
@pytest.mark.parametrize("weights_dtype", ["file", "int4"])
def test_matrices_of_two_types_that_are_one_matrix_share_a_format(
    other: int, weights_dtype: Any, tmp_path: Path
) -> None:
    """Queries and keys are IQ4_NL, and values Q4_0, Q8_0 or MXFP4."""
    path = quantized_llama(tmp_path / "a.gguf", 20, others={"blk.0.attn_v.weight": other})
    exact = load_model(path, dtype="float32").weights
    weights = load_model(path, dtype="float32", weights_dtype=weights_dtype).weights
    joined, alone = weights["layers.0.qkv.weight"], weights["layers.0.up.weight"]
    assert isinstance(alone, Int4Matrix) and alone.codebook == "iq4"
    if weights_dtype == "file":
        assert joined.values.dtype is torch.int8
    else:
        assert isinstance(joined, Int4Matrix) and joined.codebook is None
    floats, error = plain(exact["layers.0.qkv.weight"]), 0.01 if weights_dtype == "file" else 0.1
    assert (joined.unpacked() - floats).norm() < error * floats.norm()


@pytest.mark.parametrize("number", [2, 20])
def test_a_processor_that_cannot_convert_float16_has_8_bits_instead(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul_plan, "HAS_FLOAT16", False)
    path = quantized_llama(tmp_path / "a.gguf", number)
    weights = load_model(path, weights_dtype="file").weights
    assert {matrix.values.dtype for matrix in weights.matrices} == {torch.int8}


@pytest.mark.parametrize("weights_dtype", ["file", "int8", "int4"])
@pytest.mark.parametrize(("number", "stored"), [(14, torch.int8), (1, None)])
def test_an_embedding_is_quantized_if_the_file_has_it_quantized(
    number: int, stored: torch.dtype | None, weights_dtype: Any, tmp_path: Path
) -> None:
    """The output matrix is another one. Type 14 is Q6_K, and 1 float16."""
    path = quantized_llama(tmp_path / "a.gguf", number)
    exact = load_model(path, dtype="float32").weights["embedding.weight"]
    folder = convert_checkpoint(path, tmp_path / "folder", weights_dtype="int8")
    ids, kernels = torch.tensor([5, 0, 31]), CpuKernels()
    for source in (path, folder):
        table = load_model(source, dtype="float32", weights_dtype=weights_dtype).weights[
            "embedding.weight"
        ]
        assert (table.values.dtype if isinstance(table, PackedMatrix) else None) is stored
        steps = exact[ids].abs().amax(1, keepdim=True) / 127 * 0.51
        error = (kernels.embedding(ids, table) - exact[ids]).abs()
        assert (error <= (steps if stored else 0)).all()


@pytest.mark.parametrize("number", [2, 20])
def test_a_file_in_4_bits_is_converted_to_8_bits_if_asked(number: int, tmp_path: Path) -> None:
    path = quantized_llama(tmp_path / "a.gguf", number)
    folder = convert_checkpoint(path, tmp_path / "folder", weights_dtype="int8")
    weights = load_model(folder, weights_dtype="file").weights
    assert {matrix.values.dtype for matrix in weights.matrices} == {torch.int8}


@pytest.mark.parametrize("number", [2, 3])
def test_ranks_keep_the_numbers_of_matrices_in_4_bits(number: int, tmp_path: Path) -> None:
    """A share of columns begins with a group, or is rounded again."""
    path = quantized_llama(tmp_path / "a.gguf", number)
    whole = load_model(path, dtype="float32").weights["layers.0.down.weight"].unpacked()
    width = whole.shape[1] // 2
    for rank in range(2):
        collectives: Any = SimpleNamespace(layout=RankLayout(rank, 2))
        model = load_model(path, dtype="float32", weights_dtype="file", collectives=collectives)
        own = model.weights["layers.0.down.weight"]
        wanted = whole[:, rank * width : (rank + 1) * width]
        assert isinstance(own, Int4Matrix)
        if width % 32 == 0:
            assert torch.equal(own.unpacked(), wanted)
        else:
            assert (own.unpacked() - wanted).norm() <= 0.1 * wanted.norm()


def test_a_window_of_zero_is_none(tmp_path: Path) -> None:
    keys = {**model_metadata("phi3", CONFIGS["llama"]), "phi3.attention.sliding_window": 0}
    table = 0, np.zeros((4, 32), np.float32)
    path = write_gguf(tmp_path / "a.gguf", keys, {"token_embd.weight": table})

    assert "sliding_window" not in read_config(path)


@pytest.mark.parametrize(
    ("architecture", "layers", "scalar"),
    [("gemma2", 46, 8), ("gemma2", 26, 16), ("gemma3", 62, 8), ("gemma3", 34, 16)],
)
def test_the_largest_gemma_scales_scores_by_its_size(
    architecture: str, layers: int, scalar: int, tmp_path: Path
) -> None:
    config = {**CONFIGS["llama"], "num_hidden_layers": layers, "head_dim": 16}
    table = 0, np.zeros((4, 32), np.float32)
    keys = model_metadata(architecture, config)
    path = write_gguf(tmp_path / "a.gguf", keys, {"token_embd.weight": table})

    assert read_config(path)["query_pre_attn_scalar"] == scalar


SMALL = {**CONFIGS["llama"], "head_dim": 16}
WINDOWED = {**SMALL, "sliding_window": 7, "tie_word_embeddings": True}
OTHERS: dict[str, dict[str, Any]] = {
    "gemma": {**SMALL, "model_type": "gemma", "tie_word_embeddings": True},
    "gemma2": {**WINDOWED, "model_type": "gemma2", "query_pre_attn_scalar": 16},
    "gemma3": {
        **WINDOWED,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16,
    },
    "phi3": {**CONFIGS["llama"], "model_type": "phi3", "sliding_window": 7},
}


@pytest.mark.parametrize("architecture", OTHERS)
def test_logits_of_other_families_equal_transformers(architecture: str, tmp_path: Path) -> None:
    model = random_model(OTHERS[architecture])
    path = save_gguf(tmp_path / "a.gguf", architecture, model)
    assert logits_error(path, model) < 1e-4


@pytest.mark.parametrize("architecture", OTHERS)
def test_config_and_tensors_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Other tests cover the networks. Models with equal config and tensors have equal logits."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model = random_model(OTHERS[architecture])
    path = save_gguf(tmp_path / "a.gguf", architecture, model)
    config, source = dict(read_config(path)), open_tensors(path)
    state = {
        name: torch.cat([piece.clone() for _, piece in source.pieces(name, 4096)])
        for name in source.describe()
    }

    own = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(config.pop("model_type"), pad_token_id=0, **config),
        attn_implementation="eager",
    ).eval()
    missing, unexpected = own.load_state_dict(state, strict=False)
    assert not unexpected and {*missing} <= {"lm_head.weight"}
    own.tie_weights()
    tokens = torch.tensor(random_tokens(40))
    with torch.inference_mode():
        assert torch.allclose(own(tokens).logits, model(tokens).logits, atol=1e-4)

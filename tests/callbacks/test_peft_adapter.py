"""Folders of PEFT: ranks and scales by its rules, and what is no plain LoRA."""

import json
import math
import os
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from adapter_folders import save_adapter
from fuzz import FUZZ
from safetensors.torch import save_file

from gptmanager.callbacks import load_peft_adapter
from gptmanager.callbacks.adapters import peft_adapter
from gptmanager.callbacks.adapters.name_pattern import NamePattern, Steps
from gptmanager.errors import ConfigError
from gptmanager.memory.checkpoint import safetensors_reader
from gptmanager.request.adapter_modules import LORA_MODULE_IDS

ARCEE = {
    **{"model_type": "arcee", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 64, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
}
Q, K = "model.layers.1.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


def pair(rank=8, inputs=4, outputs=6, dtype=torch.float32):
    return torch.ones(rank, inputs, dtype=dtype), torch.ones(outputs, rank, dtype=dtype)


def spoil(folder, change):
    """Save the adapter again with other tensors."""
    tensors = save_adapter(folder, {Q: pair()})
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def scales(folder):
    """Row -> what B was multiplied with, if A and B are ones."""
    weights, config = load_peft_adapter(folder)
    return [row[rank * 4] for row, (_, _, rank) in zip(weights, config.tolist(), strict=True)]


def test_rows_ascend_and_have_one_width(tmp_path):
    ranks = {f"{Q}_": 3, "k_proj": 2}  # the first matches no name
    save_adapter(tmp_path, {Q: pair(8), K: pair(2)}, rank_pattern=ranks, lora_alpha=4)

    weights, config = load_peft_adapter(tmp_path)

    assert (weights.dtype, config.dtype) == (np.float32, np.int32)
    assert config.tolist() == [[2, 0, 2], [1, 1, 8]]
    assert weights.tolist() == [
        [1.0] * 8 + [2.0] * 12 + [0.0] * 60,
        [1.0] * 32 + [0.5] * 48,
    ]
    again, _ = load_peft_adapter(str(tmp_path))
    assert np.array_equal(again, weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_any_float_dtype_becomes_float32_before_the_scale_is_in_it(tmp_path, dtype):
    a, b = (torch.rand(3, 4).to(dtype), torch.rand(6, 3).to(dtype))
    save_adapter(tmp_path, {Q: (a, b)}, r=3, lora_alpha=10)

    (row,), _ = load_peft_adapter(tmp_path)

    np.testing.assert_array_equal(row[:12], a.float().reshape(-1))
    np.testing.assert_array_equal(row[12:], (b.float().double() * (10 / 3)).float().reshape(-1))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [2.0, 2.0]),
        ({"use_rslora": True}, [16 / math.sqrt(8)] * 2),
        ({"lora_alpha": 0.5}, [1 / 16] * 2),
        ({"lora_alpha": None}, [1.0] * 2),
        ({"alpha_pattern": {"k_proj": 8}}, [1.0, 2.0]),
        ({"alpha_pattern": {"proj": 8}}, [2.0, 2.0]),  # no whole part of a name
        ({"alpha_pattern": {".*proj": 8}}, [1.0, 1.0]),
        ({"alpha_pattern": {"self_attn": 8}}, [2.0, 2.0]),  # not its end
        ({"alpha_pattern": {"^model.layers.1.*": 8}}, [2.0, 1.0]),
        ({"alpha_pattern": {r"layers\.0\..*": 8, ".*": 24}}, [1.0, 3.0]),
        ({"alpha_pattern": {"q_proj|k_proj": 24}}, [3.0, 3.0]),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers"}, [2.0, 2.0]),
        ({"layers_to_transform": [0, 1], "layers_pattern": ["h", "layers"]}, [2.0, 2.0]),
        ({"layers_to_transform": [0, 1], "layers_pattern": "model.layers"}, [2.0, 2.0]),
        ({"layers_to_transform": [1, 0]}, [2.0, 2.0]),
        ({"target_modules": r".*\.(q|k)_proj"}, [2.0, 2.0]),
        ({"target_modules": "all-linear"}, [2.0, 2.0]),
        ({"target_modules": None}, [2.0, 2.0]),
        ({"target_modules": [Q, K], "layers_to_transform": 7}, [2.0, 2.0]),
        ({"exclude_modules": ["v_proj"], "fan_in_fan_out": True}, [2.0, 2.0]),
        ({"init_lora_weights": "gaussian", "target_parameters": []}, [2.0, 2.0]),
        (
            {"target_modules": r"^(?!.*vision).*layers\.\d{1,2}\.(?:self_attn)\.(?P<n>[qk]_proj)$"},
            [2] * 2,
        ),
        ({"alpha_pattern": {"layers.0.self_attn.k_proj": 8}}, [1.0, 2.0]),
        ({"alpha_pattern": {"layers.[^1]+.k.proj": 8}}, [1.0, 2.0]),
        ({"alpha_pattern": {"self_attn.k.proj": 8}}, [1.0, 2.0]),  # a dot is any letter
        ({"alpha_pattern": {"ayers.0.self_attn.k_proj": 8, "": 8}}, [2.0, 2.0]),
    ],
)
def test_scales_and_targets_are_those_of_peft(tmp_path, fields, expected):
    save_adapter(tmp_path, {Q: pair(), K: pair()}, **fields)
    assert scales(tmp_path) == pytest.approx(expected, rel=1e-7)


def test_names_may_lack_the_prefix_of_their_family(tmp_path):
    names = ("h.0.mlp.c_proj", "h.0.attn.c_proj", "transformer.h.1.attn.c_attn", "h.0.mlp.c_fc")
    save_adapter(tmp_path, {name: pair() for name in names}, fan_in_fan_out=True)
    assert load_peft_adapter(tmp_path)[1].tolist() == [[4, 0, 8], [5, 0, 8], [6, 0, 8], [0, 1, 8]]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"peft_type": "LOHA"}, """peft_type = 'LOHA': only "LORA" is"""),
        ({"peft_type": None}, "peft_type = None"),
        (
            {"use_dora": True},
            "use_dora = True: not supported: only plain LoRA is; merge the adapter",
        ),
        ({"bias": "lora_only"}, "bias = 'lora_only': only \"none\""),
        ({"lora_bias": True}, "lora_bias = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices = [3]"),
        ({"loftq_config": {"loftq_bits": 4}}, "loftq_config = {'loftq_bits': 4}"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights = 'loftq'"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"layer_replication": [[0, 2]]}, "layer_replication = [[0, 2]]"),
        (
            {"target_parameters": ["experts.up"]},
            "target_parameters = ['experts.up']: not supported: the tensors",
        ),
        ({"use_qalora": True}, "use_qalora = True"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora = {'nblocks': 2}"),
        ({"some_new_field": 0.5}, "some_new_field = 0.5: not supported"),
        ({"\x1b[31m\ud800": 0.5}, "'\\x1b[31m\\ud800' = 0.5: not supported"),
        ({"r": 0}, "r = 0: 0 must be an integer from 1 to 2147483647"),
        ({"r": True}, "r = True"),
        ({"r": 4}, "in adapter_config.json the rank of model.layers.1.self_attn.q_proj is 4"),
        ({"rank_pattern": {"q_proj": 9}}, "q_proj is 9"),
        (
            {"rank_pattern": {"q_proj": "8"}},
            "rank_pattern = {'q_proj': '8'}: '8' must be an integer",
        ),
        ({"rank_pattern": [8]}, "rank_pattern = [8]: must be an object"),
        ({"lora_alpha": "16"}, "lora_alpha = '16'"),
        ({"lora_alpha": math.nan}, "lora_alpha = nan: nan must be a finite number"),
        ({"lora_alpha": 10**400}, "must be a finite number"),
        ({"use_rslora": 1}, "use_rslora = 1: must be true or false"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern = {'(': 3}: '(.*\\\\.)?(()$': missing ')'"),
        ({"target_modules": r"(\w)\1.*"}, "is not supported"),
        ({"target_modules": "(?i)Q_PROJ"}, "'(?i)Q_PR' at position 0 is not supported"),
        ({"target_modules": "(?<=a)b"}, "is not supported"),
        ({"target_modules": "a**"}, "'**' at position 1 is not supported"),
        ({"target_modules": "a{2,1}"}, "{2,1} is not a repeat"),
        ({"target_modules": "[z-a]"}, "bad character range"),
        ({"target_modules": "a)"}, "unbalanced ')' at position 1"),
        ({"target_modules": "(" * 60 + ")" * 60}, "more than 50 groups are nested"),
        ({"target_modules": "a" * 10_001}, "it has 10001 characters, 10000 are allowed"),
        ({"layers_to_transform": [1], "layers_pattern": "(a*)*"}, "must be a name such as"),
        (
            {"target_modules": ["v_proj", "proj"]},
            "the file also has tensors of model.layers.1.self",
        ),
        ({"target_modules": "q_proj"}, "target_modules = 'q_proj': the file also has tensors"),
        ({"target_modules": [3]}, "target_modules = [3]"),
        ({"exclude_modules": ["q_proj"]}, "exclude_modules = ['q_proj']"),
        ({"exclude_modules": ".*q_proj"}, "exclude_modules = '.*q_proj'"),
        (
            {"layers_to_transform": [0]},
            "layers_to_transform = [0]: the file also has tensors of model",
        ),
        ({"layers_to_transform": 1, "layers_pattern": "h"}, "layers_to_transform = 1"),
        ({"layers_to_transform": 1, "layers_pattern": "ayers"}, "layers_to_transform = 1"),
        ({"layers_to_transform": 1, "layers_pattern": "h" * 100_000}, "layers_to_transform = 1"),
        ({"layers_to_transform": ["1"]}, "layers_to_transform = ['1']"),
    ],
)
def test_variants_of_lora_are_refused_by_name(tmp_path, fields, text):
    save_adapter(tmp_path, {Q: pair()}, **fields)
    with pytest.raises(ConfigError, match=re.escape(text)):
        load_peft_adapter(tmp_path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            f"{Q}.lora_magnitude_vector",
            "lora_magnitude_vector does not belong to a plain LoRA adapter",
        ),
        (f"{Q}.lora_B.bias", "lora_B.bias does not belong"),
        (f"{Q}.lora_A.default.weight", "lora_A.default.weight does not belong"),
        ("model.embed_tokens.lora_embedding_A", "lora_embedding_A does not belong"),
        ("model.embed_tokens.weight", "embed_tokens.weight does not belong"),
        (
            "lm_head.lora_A.weight",
            "lm_head is not supported: a module must be one of ['attention.dense",
        ),
        (
            "model.layers.0.mlp.experts.1.up_proj.lora_A.weight",
            "not the experts that a router chooses",
        ),
        ("vision.model.layers.0.mlp.up_proj.lora_A.weight", "is not supported: a module must"),
        ("transformer.h.0.attn.query_key_value.lora_A.weight", "query_key_value is not supported"),
        (
            "model.layers.01.mlp.up_proj.lora_A.weight",
            "model.layers.01.mlp.up_proj is not supported",
        ),
        ("model.layers.1.mlp.up_proj.lora_A.weight", "but not base_model.model.model.l"),
        ("layers.1.self_attn.q_proj.lora_A.weight", "are the same module of layer 1"),
    ],
)
def test_tensors_of_something_else_are_refused_by_name(tmp_path, name, text):
    spoil(tmp_path, lambda tensors: tensors.update({f"base_model.model.{name}": pair()[0]}))
    with pytest.raises(ConfigError, match=re.escape(text)):
        load_peft_adapter(tmp_path)


@pytest.mark.parametrize(
    ("part", "tensor", "text"),
    [
        ("A", torch.ones(7, 4), "lora_A.weight has shape [7, 4] and lora_B [6, 8]"),
        ("B", torch.ones(6, 7), "has shape [8, 4] and lora_B [6, 7]"),
        ("A", torch.ones(8), "is float32 [8]: it must be a matrix"),
        ("B", torch.ones(0, 8), "is float32 [0, 8]: it must be a matrix"),
        ("B", torch.ones(6, 8, dtype=torch.int8), "is int8 [6, 8]: it must be a matrix of one"),
    ],
)
def test_tensors_of_other_shapes_and_dtypes_are_refused(tmp_path, part, tensor, text):
    name = f"base_model.model.{Q}.lora_{part}.weight"
    spoil(tmp_path, lambda tensors: tensors.update({name: tensor}))
    with pytest.raises(ConfigError, match=re.escape(text)):
        load_peft_adapter(tmp_path)


def test_a_folder_without_its_files_says_what_it_needs(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is not a folder"):
        load_peft_adapter(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"adapter_config\.json does not exist"):
        load_peft_adapter(tmp_path)
    save_adapter(tmp_path, {Q: pair()})
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    text = r"holds no adapter_model.safetensors; adapter_model.bin is a pickle, .* safetensors$"
    with pytest.raises(ConfigError, match=text):
        load_peft_adapter(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match=r"safetensors has no tensors"):
        load_peft_adapter(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match=r"must be a JSON object"):
        load_peft_adapter(tmp_path)


def test_the_widths_of_a_model_are_compared_where_it_is_given(tmp_path):
    model = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"
    save_adapter(tmp_path, {Q: pair(inputs=128, outputs=128)})
    weights, _ = load_peft_adapter(tmp_path, model=model)
    assert weights.shape == (1, 8 * 256)
    for inputs, outputs in [(64, 192), (128, 256), (256, 128)]:
        save_adapter(tmp_path, {Q: pair(inputs=inputs, outputs=outputs)})
        told = rf"{Q} has {inputs} inputs and {outputs} outputs.* it has 128 and 128"
        with pytest.raises(ConfigError, match=told):
            load_peft_adapter(tmp_path, model=model)


def test_modules_that_the_given_model_lacks_are_refused(tmp_path):
    model = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"
    name = "model.layers.77.self_attn.q_proj"
    save_adapter(tmp_path, {name: pair(inputs=128, outputs=128)})
    with pytest.raises(ConfigError, match=f"for another model: .*tiny_llama does not have {name}"):
        load_peft_adapter(tmp_path, model=model)


def test_a_matrix_of_two_halves_must_have_an_even_number_of_rows(tmp_path):
    save_adapter(tmp_path, {"model.layers.0.mlp.gate_up_proj": pair(outputs=7)})
    with pytest.raises(ConfigError, match="lora_B.weight has 7 rows, which must be an even number"):
        load_peft_adapter(tmp_path)


def test_a_file_that_is_written_while_it_is_read_is_refused(tmp_path, monkeypatch):
    save_adapter(tmp_path, {Q: pair()})
    status = os.fstat

    def status_before_a_write(file):
        found = status(file)
        os.utime(file, ns=(found.st_atime_ns, found.st_mtime_ns + 1))
        return found

    monkeypatch.setattr(safetensors_reader.os, "fstat", status_before_a_write)
    with pytest.raises(ConfigError, match="was changed while it was read"):
        load_peft_adapter(tmp_path)


def test_the_file_is_not_mapped(tmp_path, monkeypatch):
    """If another program truncated a mapped file, reading it would end the process."""
    save_adapter(tmp_path, {Q: pair()})
    monkeypatch.delattr(safetensors_reader, "safe_open")
    check = peft_adapter._find_pairs

    def truncate(*given):
        os.truncate(tmp_path / "adapter_model.safetensors", 0)
        return check(*given)

    monkeypatch.setattr(peft_adapter, "_find_pairs", truncate)
    assert load_peft_adapter(tmp_path)[0].sum() == 8 * 4 + 2 * 6 * 8


def test_a_tensor_of_the_file_is_dropped_when_it_is_copied(tmp_path, monkeypatch):
    """Otherwise loading would need the memory of the file in addition to that of the result."""
    save_adapter(tmp_path, {Q: pair(), "model.layers.0.mlp.gate_up_proj": pair()})
    take, left = safetensors_reader.SafetensorsCopy.take, []

    def taken(source, name):
        left.append(len(source.describe()))
        return take(source, name)

    monkeypatch.setattr(safetensors_reader.SafetensorsCopy, "take", taken)
    load_peft_adapter(tmp_path)
    assert left == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            safetensors_reader,
            r"has \d+ bytes: to read it takes twice as much memory, and \d+ bytes",
        ),
        (peft_adapter, "no memory for 1 rows of 80 elements"),
    ],
)
def test_the_memory_must_suffice(tmp_path, monkeypatch, module, text):
    save_adapter(tmp_path, {Q: pair()})
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    free = 2 * size - 1 if module is safetensors_reader else 100
    monkeypatch.setattr(module, "free_memory_bytes", lambda: free)
    with pytest.raises(ConfigError, match=text):
        load_peft_adapter(tmp_path)


def test_a_dense_mlp_of_a_family_without_gates_needs_the_model(tmp_path):
    up, model = "model.layers.0.mlp.up_proj", tmp_path / "model"
    save_adapter(tmp_path, {up: pair(inputs=32, outputs=64)})
    model.mkdir()
    (model / "config.json").write_text(json.dumps(ARCEE))
    (own,), (other,) = (load_peft_adapter(tmp_path, model=it)[1] for it in (model, None))
    assert own[0] == LORA_MODULE_IDS["mlp_h_to_4h"] and other[0] == LORA_MODULE_IDS["mlp_gate"]


# Patterns in a bounded number of steps ------------------------------------------------------------

SLOW = "(?:(?!(?:(?!(?:(?!(?:a|.)*x)a|.)*y)a|.)*z).)*x"  # nested look-aheads: a power of the length


@pytest.mark.parametrize("pattern", [r"(.*a)*(.*b)*(.*)*!", "((((a|.)*)*)*)*!", "(.|..)*!"])
@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern"])
def test_a_pattern_that_backtracking_never_ends_is_decided_at_once(tmp_path, field, pattern):
    save_adapter(tmp_path, {Q: pair()}, **{field: {pattern: 4} if "rank" in field else pattern})
    if field == "target_modules":
        with pytest.raises(ConfigError, match="the file also has tensors of"):
            load_peft_adapter(tmp_path)
    else:
        assert load_peft_adapter(tmp_path)[1].tolist() == [[1, 1, 8]]


def test_the_steps_of_a_file_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("gptmanager.callbacks.adapters.peft_config._MAX_STEPS", 3000)
    told = "the patterns of the file take more than 3000 steps"
    for fields in (
        {"target_modules": SLOW},
        {"rank_pattern": {f"name_{i}": 4 for i in range(4000)}},
        {"alpha_pattern": {f"x*{i:0100}": 4 for i in range(40)}},
        {"rank_pattern": {"()" * 900: 4}},
        {"rank_pattern": {"(" + "|" * 1500 + ")": 4}},
    ):
        save_adapter(tmp_path, {Q: pair()}, **fields)
        with pytest.raises(ConfigError, match=told):
            load_peft_adapter(tmp_path)


def random_pattern(chance, depth=4):
    kind = chance.random()
    if not depth or kind < 0.4:
        return chance.choice(["a", "b", r"\.", ".", "[ab]", "[^a]", r"\w", "^", "$", r"\d", "c"])
    inner = random_pattern(chance, depth - 1)
    if kind < 0.55:
        return f"({inner}|{random_pattern(chance, depth - 1)})"
    if kind < 0.7:
        repeats = ["*", "+", "?", "{2}", "{1,3}", "*?", "{,2}", "{2,}"]
        return f"(?:{inner}){chance.choice(repeats)}"
    if kind < 0.8:
        return f"{chance.choice(['(?=', '(?!'])}{inner})"
    return inner + random_pattern(chance, depth - 1)


def test_random_patterns_match_as_those_of_python():
    chance = random.Random(1)
    names = ["".join(chance.choices("ab.1", k=chance.randrange(5))) for _ in range(300)]
    for _ in range(200 * FUZZ):
        pattern = random_pattern(chance)
        own = NamePattern(pattern, Steps(100_000))
        for name in chance.sample(names, 20):
            assert own.matches(name) == bool(re.fullmatch(pattern, name)), (pattern, name)


def test_modules_of_a_multimodal_checkpoint_are_those_of_its_text_model(tmp_path):
    layer = "layers.0.self_attn.q_proj"
    save_adapter(tmp_path, {f"model.language_model.{layer}": pair()})
    wrapped, _ = load_peft_adapter(tmp_path)
    save_adapter(tmp_path, {f"model.{layer}": pair()})
    np.testing.assert_array_equal(wrapped, load_peft_adapter(tmp_path)[0])

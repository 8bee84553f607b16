"""Configs and tensors that cannot be, of every family: refused by ConfigError, soon, by name.

GPTMANAGER_FUZZ multiplies the number of random configs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from bounded import bounded
from family_configs import FAMILY_CONFIGS, VARIANTS
from family_runs import family_folder
from fuzz import FUZZ
from odd_configs import (
    ODD_NUMBERS,
    ROPES,
    SENSIBLE,
    family_config,
    numeric_fields,
    odd_configs,
)
from safetensors.torch import load_file

from gptmanager.errors import ConfigError
from gptmanager.kernels import Kernels
from gptmanager.models import load_model
from gptmanager.models.families import FAMILIES
from gptmanager.models.read_spec import read_spec
from gptmanager.models.rope_scaling import Rope, rope_table

ALL = [*FAMILY_CONFIGS, *VARIANTS]
POSITIVE = "a positive number from 1.2e-38 to"
LONG = "9" * 5000
NAMES = [*map(str, range(1000))]  # names of tensors
ALPHA = {"rope_type": "dynamic", "rope_theta": 1e30, "alpha": 1e30}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1e30}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("minimax_m2", {"attn_type_list": [[1]]}, r"attn_type_list = \[\[1\]\]: must be a list of on"),
    ("gemma4_text", {"per_layer_config": {LONG: {}}}, "per_layer_config = .* must be an object of"),
    (
        "qwen3_next",
        {"linear_num_key_heads": 2**31 - 1, "linear_num_value_heads": 2**31 - 1},
        "4294967294 linear_num_key_heads in all layers: at most 100000",
    ),
    ("hunyuan_v1_dense", {"rope_parameters": ALPHA}, r"alpha = 1e\+30: leads to the base .* 3.4e"),
    ("deepseek_v3", {"rope_parameters": YARN}, r"mscale_all_dim = 1e\+30: scales attention by"),
    ("cohere2", {"layer_types": None, "sliding_window_pattern": "x"}, "sliding_window_pattern ="),
    ("minimax_m2", {"rotary_dim": 99}, "rotary_dim = 99: 99 of 16 dimensions would rotate"),
    ("phi", {"partial_rotary_factor": 0.2}, r"3 of 16 .* rotate \(partial_rotary_factor 0.2\)"),
    ("qwen3_moe", {"mlp_only_layers": ["1"]}, "mlp_only_layers = .'1'.: must be a list of layers"),
    ("granite", {"logits_scaling": 5e-324}, rf"scaling = 5e-324: must be {POSITIVE} 3.4e\+38"),
    ("gemma", {"rms_norm_eps": 2**31}, f"rms_norm_eps = 2147483648: must be {POSITIVE} 1.0"),
    ("llama4_text", {"rope_theta": 0.0}, f"config.json: rope_theta = 0.0: must be {POSITIVE}"),
    ("gemma3_text", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping = 5.0: not supported"),
    ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act = 'gelu': must be 'silu' with linear atten"),
    (
        "gemma4_text",  # transformers changes the last layer to full attention
        {"layer_types": ["sliding_attention"] * 4},
        "must be 'full_attention' for the last layer",
    ),
    (
        "qwen2_moe",  # transformers gives every second layer a window, others the last layers
        {"use_sliding_window": True, "sliding_window": 8},
        "layer_types = None: must list the type of each layer",
    ),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0: must be a positive integer"),
    ("gpt_neox", {"rotary_emb_base": 1}, "config.json: rotary_emb_base = 1: must be more than 1"),
    ("exaone4", {"sliding_window_pattern": "LLX"}, "pattern = 'LLX': must be a number, or letters"),
    ("hunyuan_v1_dense", {"rope_parameters": {"type": "dynamic"}}, "rope_parameters.alpha = None"),
    (
        "llama",
        {"rope_parameters": {**YARN, "beta_slow": 64}},
        "slow = 64: must be at most beta_fast = 32.0",
    ),
    ("gemma4_text", {"num_global_key_value_heads": 0}, "num_global_key_value_heads = 0: must be a"),
    (
        "qwen2_moe",
        {"num_experts": 3, "num_experts_per_tok": 4},
        "_tok = 4: must .* num_experts = 3",
    ),
    ("qwen3_moe", {"num_experts": "4"}, "config.json: num_experts = '4': must be a positive"),
    ("smollm3", {"no_rope_layers": [1, 0, 1, "0"]}, "no_rope_layers = .* must be a list of 4 zero"),
    # fields of other families, which transformers ignores
    ("llama", {"scale_attn_weights": False}, "scale_attn_weights = False: not supported"),
    ("mixtral", {"n_group": 2}, "n_group = 2: not supported"),
    ("llama4_text", {"routed_scaling_factor": 0.5}, "routed_scaling_factor = 0.5: not supported"),
    ("cohere2", {"rope_local_base_freq": 300.0}, "rope_local_base_freq = 300.0: an unknown field"),
    ("gpt_oss", {"sliding_window_pattern": 3}, "sliding_window_pattern = 3: an unknown field"),
    ("llama", {"norm_eps": 1e-5}, "norm_eps = 1e-05: not supported"),
    ("gemma2", {"hidden_act": "silu"}, "hidden_act = 'silu': not supported"),
    ("gpt_neox", {"num_key_value_heads": 2}, "heads = 2: must be num_attention_heads = 4"),
    ("llama", {"rope_parameters": {LONG: 1}}, r"rope_parameters.'9+\.\.\. \(5002 characters\) = 1"),
]


@pytest.mark.parametrize(("name", "fields", "text"), CASES)
def test_an_odd_field_is_named(name: str, fields: dict[str, Any], text: str) -> None:
    config = {**family_config(name), **fields}
    if "partial_rotary_factor" in fields:
        del config["rope_parameters"]
    with bounded(1 << 30, 20), pytest.raises(ConfigError, match=text):
        read_spec(config)


class Watched(dict[str, Any]):
    """A config that notes which of its fields are read."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(4)
def test_a_number_that_makes_no_sense_is_refused_by_its_name(name: str) -> None:
    for field in numeric_fields(name):
        for value in ODD_NUMBERS:
            config = Watched({**family_config(name), field: value})
            if not is_named_in_refusal(config, field):
                is_sensible = field in SENSIBLE.get(repr(value), ())
                assert is_sensible or field not in config.read, f"{field} = {value!r} is accepted"


@pytest.mark.parametrize(("name", "rope"), ROPES)
def test_a_number_of_rope_that_makes_no_sense_is_refused_by_its_name(
    name: str, rope: dict[str, Any]
) -> None:
    config = family_config(name)
    read_spec({**config, "rope_parameters": rope})
    for field in (it for it in rope if isinstance(rope[it], (int, float))):
        for value in ODD_NUMBERS:
            changed = {**config, "rope_parameters": {**rope, field: value}}
            if not is_named_in_refusal(changed, field):
                assert field in SENSIBLE.get(repr(value), ()), f"{field} = {value!r} is accepted"


def is_named_in_refusal(config: dict[str, Any], field: str) -> bool:
    """Read a config. Return whether it is refused, which needs an error with the field's name."""
    try:
        read_spec(config, tensors=NAMES)
    except ConfigError as error:
        assert re.search(rf"\b{field}\b", str(error)), f"{field}: {error}"
        return True
    return False


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(8)
def test_a_config_with_an_odd_field_is_read_or_refused(name: str) -> None:
    with bounded(1 << 30):
        for config in odd_configs(name, 300 * FUZZ):
            try:
                read_spec(config, tensors=NAMES)
            except ConfigError as error:
                assert len(str(error)) < 2500 and "\n" not in str(error)


@pytest.mark.parametrize("name", ["gemma4_text", "llama4_text", "qwen3_moe", "smollm3"])
@pytest.mark.every(4)
def test_lists_of_layers_are_not_read_anew_for_each_layer(name: str) -> None:
    """With 2,000 layers and a list of a million, that would be two thousand million steps."""
    config, count, long = family_config(name), 2000, [*range(1, 10**6)]
    lists = {"moe_layers": long, "mlp_only_layers": long, "no_rope_layers": [1] * count}
    lists["per_layer_config"] = {f"{it}": {} for it in long[:100_000]}
    known = {"gemma4_text": "per_layer_config", "llama4_text": "moe_layers"}
    field = known.get(name, "mlp_only_layers" if name == "qwen3_moe" else "no_rope_layers")
    further = {field: lists[field], "num_hidden_layers": count}
    if "layer_types" in config:
        further["layer_types"] = config["layer_types"] * (count // 4)
    with bounded(2 << 30, 30):
        assert len(read_spec({**config, **further}).layers) == count


def test_the_scale_of_latent_attention_is_in_the_rope_that_transformers_prefers() -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    scaling = {**rope, "mscale_all_dim": 1.0}
    given = {"rope_parameters": scaling}, {"rope_scaling": scaling, "rope_parameters": rope}
    specs = [read_spec({**family_config("deepseek_v3"), **it}) for it in given]
    assert specs[0].layers[0].attention.scale == specs[1].layers[0].attention.scale


def test_angles_beyond_float32_are_refused() -> None:
    rope = Rope("linear", factor=1e-37, dim=8)
    with pytest.raises(ConfigError, match="frequencies of Rope.* overflow float32"):
        rope_table(rope, 1000)


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
@pytest.mark.every(16)
def test_a_tensor_that_is_missing_or_odd_is_named(name: str) -> None:
    folder = family_folder(name)
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    ignored = FAMILIES[config["model_type"]].ignored
    kinds = {re.sub(r"\.\d+\.", ".", key): key for key in state if not ignored.search(key)}
    for key in kinds.values():
        tensor = state.pop(key)
        odd = [tensor.int(), tensor[:-1], tensor[None]]
        for changed in [{}, *({key: it} for it in odd)]:
            if key == "lm_head.weight" and not changed and config.get("tie_word_embeddings"):
                continue
            with pytest.raises(ConfigError, match=re.escape(key)):
                load_model((config, {**state, **changed}), kernels=Kernels())
        state[key] = tensor
    with pytest.raises(ConfigError, match="unknown: model.layers.99.x"):
        load_model((config, {**state, "model.layers.99.x": tensor}), kernels=Kernels())

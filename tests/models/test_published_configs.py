"""Fields as published `config.json`s have them: read as transformers reads them, or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from family_configs import FAMILY_CONFIGS
from odd_configs import family_config

from gptmanager.errors import ConfigError
from gptmanager.memory.kv_pool import PageShape
from gptmanager.models.read_spec import read_spec
from gptmanager.models.recurrent.state_space import StateSpace

EXPERT_LAYERS = [False, True, True, True]
# Fields that change nothing, by family
WITHOUT_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("bamba", {"attn_rotary_emb": 8, "num_logits_to_keep": 1, "z_loss_coefficient": 1e-4}),
    ("exaone_moe", {"is_moe_layer": EXPERT_LAYERS, "first_last_k_dense_replace": 1}),
    ("glm4_moe_lite", {"first_k_dense_replace": 1, "partial_rotary_factor": 1.0}),
    ("gpt2", {"fused_mlp": True, "fused_bias_fc": True, "use_flash_attn": True}),
    ("granitemoehybrid", {"time_step_floor": 1e-4, "time_step_max": 0.1, "time_step_min": 1e-3}),
    ("hy_v3", {"enable_moe_fp32_combine": False, "qk_norm": True, "route_norm": True}),
    ("hunyuan_v1_moe", {"moe_intermediate_size": [96] * 4, "num_shared_expert": [1] * 4}),
    ("hunyuan_v1_moe", {"n_group": False, "routed_scaling_factor": False, "topk_group": False}),
    ("vaultgemma", {"attention_bias": False, "dtype": "float32"}),
    ("youtu", {"mlp_bias": False, "head_dim": 8, "qk_head_dim": 20}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    ("lfm2", {"block_dim": 64, "conv_dim": 64, "conv_dim_out": 64, "num_heads": 4}),
    ("lfm2", {"block_norm_eps": 1e-5, "block_use_swiglu": True, "use_pos_enc": True, "theta": 1e6}),
    ("lfm2", {"block_mlp_init_scale": 1.0, "block_use_xavier_init": True, "full_attn_idxs": [2]}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("apertus", {"qk_norm": True, "post_norm": False, "mlp_bias": False}),
    ("exaone", {"embed_dropout": 0.0, "rope_scaling": None, "head_dim": 16}),
    ("gpt_bigcode", {"pad_key_length": True, "inference_runner": 0, "num_key_value_heads": 1}),
    ("gptj", {"rotary": True, "scale_attn_weights": True, "n_inner": None}),
    ("falcon", {"alibi": False, "apply_residual_connection_post_layernorm": False}),
    ("internlm2", {"attn_implementation": "eager", "rope_scaling": None, "pretraining_tp": 1}),
    ("mimo", {"use_mrope": False, "use_sliding_window": False, "sliding_window": 32768}),
    ("minicpm", {"mup_denominator": 32, "num_experts": 0}),
    ("gpt2", {"n_special": 0, "predict_special_tokens": True, "n_ctx": 1024}),
    ("gpt_neox", {"custom_pipelines": {"text-generation": {"impl": "own.Pipeline"}}}),
    ("gpt_oss", {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
    ("mistral4", {"head_dim": 20, "qk_head_dim": 20}),
    ("nemotron", {"rotary_percentage": 0.5}),
    ("nemotron_h", {"norm_eps": 1e-5, "rope_theta": 10000, "partial_rotary_factor": 1.0}),
    ("nemotron_h", {"rescale_prenorm_residual": True, "residual_in_fp32": False, "expand": 2}),
    ("nemotron_h dense", {"rms_norm_eps": 1e-5, "time_step_rank": 256, "mamba_proj_bias": False}),
    ("nemotron_h", {"time_step_limit": [0.0, float("inf")], "mamba_ssm_cache_dtype": "float32"}),
    ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
    ("stablelm", {"num_heads": 32, "rotary_scaling_factor": 1.0}),
    ("starcoder2", {"activation_function": "gelu", "layer_norm_epsilon": 1e-5}),
]


@pytest.mark.parametrize(("name", "fields"), WITHOUT_EFFECT)
def test_a_published_field_changes_nothing(name: str, fields: dict[str, Any]) -> None:
    config = family_config(name)
    assert read_spec({**config, **fields}) == read_spec(config)


def test_a_pattern_of_windows_without_a_window_changes_nothing() -> None:
    """EXAONE 4.0 1.2B has both fields."""
    config = {**family_config("exaone4"), "sliding_window": None}
    assert read_spec({**config, "sliding_window_pattern": "LLLG"}) == read_spec(config)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("bamba", "attn_layer_indices", [4]),
        ("bamba", "attn_rotary_emb", 16),
        ("bamba", "partial_rotary_factor", 1.0),
        ("gemma", "hidden_act", "silu"),
        ("gemma", "hidden_activation", "silu"),
        ("gpt_oss", "swiglu_alpha", 1.5),
        ("gpt2", "num_key_value_heads", 2),
        ("nemotron_h", "attention_bias", True),
        ("nemotron_h", "mamba_hidden_act", "gelu"),
        ("nemotron_h", "n_shared_experts", 2),
        ("nemotron_h", "time_step_limit", [0.001, 0.1]),
        ("nemotron_h dense", "hybrid_override_pattern", "MM--"),
        ("nemotron_h dense", "hybrid_override_pattern", "M*-X"),
        ("opt", "num_key_value_heads", 2),
        ("exaone_moe", "is_moe_layer", [True, True, False, True]),
        ("glm4_moe_lite", "mlp_layer_types", ["dense", "sparse", "other", "dense"]),
        ("hunyuan_v1_moe", "moe_topk", [2, 2]),
        ("lfm2", "conv_dim", 128),
        ("lfm2", "use_pos_enc", False),
        ("lfm2", "layer_types", ["conv"] * 4),
        ("lfm2_moe", "layer_types", None),
        ("cohere2_moe", "expert_selection_fn", "relu"),
        ("cohere2_moe", "shared_expert_combination_strategy", "max"),
        ("granite_swa", "layer_rope_theta", [5000.0]),
        ("hy_v3", "mlp_bias", True),
        ("hy_v3", "route_norm", False),
        ("hunyuan_v1_moe", "num_shared_expert", [2, 2, 2, 2]),
        ("apertus", "qk_norm", False),
        ("falcon", "alibi", True),
        ("llama", "hidden_act", "xielu"),
        ("falcon sequential", "num_kv_heads", 2),
        ("gptj", "rotary_dim", None),
        ("minicpm", "num_experts", 8),
    ],
)
def test_another_value_is_refused(name: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{field} = {re.escape(repr(value))}: "):
        read_spec({**family_config(name), field: value})


def test_kimi_k2_is_read_as_deepseek_v3() -> None:
    config = {**FAMILY_CONFIGS["deepseek_v3"], "model_type": "deepseek_v3"}
    assert read_spec({**config, "model_type": "kimi_k2"}) == read_spec(config)


def test_iquest_coder_is_read_as_llama_with_its_own_defaults() -> None:
    spec = read_spec({"model_type": "iquestcoder"})
    assert (spec.family, spec.num_layers, spec.norms.eps) == ("llama", 80, 1e-5)
    assert spec.pages[0] == PageShape(8, 128) and spec.max_seq_len == 131072


def test_mistral_4_says_which_share_of_a_key_rotates() -> None:
    config = family_config("mistral4")
    rope = {**config["rope_parameters"], "partial_rotary_factor": 8 / 20}
    assert read_spec({**config, "rope_parameters": rope}) == read_spec(config)
    rope["partial_rotary_factor"] = 0.5
    with pytest.raises(ConfigError, match="rope_parameters.partial_rotary_factor = 0.5: must be"):
        read_spec({**config, "rope_parameters": rope})


def test_greedy_choices_of_experts_have_no_groups() -> None:
    config = {**FAMILY_CONFIGS["deepseek_v2"], "model_type": "deepseek_v2", "topk_method": "greedy"}
    assert config["n_group"] > 1
    assert read_spec(config) == read_spec({**config, "n_group": 1, "topk_group": 1})


def test_exaone_as_transformers_writes_it() -> None:
    """From 5.24 on, its fields are those of Llama."""
    config = {**FAMILY_CONFIGS["exaone"], "model_type": "exaone", "layer_norm_epsilon": 2e-5}
    names = {
        **{"layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act"},
        **{"num_layers": "num_hidden_layers"},
    }
    own = {names.get(key, key): value for key, value in config.items()}
    assert read_spec({**own, "attention_bias": False, "mlp_bias": False}) == read_spec(config)


@pytest.mark.parametrize("name", ["bamba", "granitemoehybrid"])
def test_each_group_of_a_state_space_is_normalized_by_itself(name: str) -> None:
    """As in mamba_ssm, in llama.cpp, and in transformers from 5.23 on."""
    config = {**FAMILY_CONFIGS[name], "model_type": name, "mamba_n_groups": 2}
    spaces = [it.attention.recurrent for it in read_spec(config).layers]
    assert [it.shape.norm_groups for it in spaces if isinstance(it, StateSpace)] == [2, 2]


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_dual_chunk_attention_is_normal_attention_in_the_first_chunk(name: str) -> None:
    config = {**FAMILY_CONFIGS[name], "model_type": name}
    chunks = {"chunk_size": 100, "local_size": 20, "original_max_position_embeddings": 100}
    given = {**config, "dual_chunk_attention_config": chunks}
    assert read_spec(given, max_seq_len=80) == read_spec(config, max_seq_len=80)
    with pytest.raises(
        ConfigError, match="max_seq_len = 81: must be at most 80, because dual_chun"
    ):
        read_spec(given, max_seq_len=81)
    with pytest.raises(ConfigError, match="dual_chunk_attention_config = 3: must be an object"):
        read_spec({**config, "dual_chunk_attention_config": 3})


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({}, 8192),  # LFM2-1.2B
        ({"block_ff_dim": 6656, "hidden_size": 1024}, 4608),  # LFM2-350M
        ({"block_ff_dim": 10752, "block_auto_adjust_ff_dim": False, "tie_embedding": False}, 10752),
        ({"block_ffn_dim_multiplier": None, "block_multiple_of": 100}, 8192),
        ({"block_ffn_dim_multiplier": 1.1, "block_multiple_of": 100}, 9100),
    ],
)
def test_lfm2_computes_its_width_as_transformers(fields: dict[str, Any], width: int) -> None:
    indices = [2, 5, 8, 10, 12, 14]
    given = {
        **{"model_type": "lfm2", "hidden_size": 2048, "num_attention_heads": 32},
        **{"num_hidden_layers": 16, "vocab_size": 65536, "block_ff_dim": 12288},
        **{"block_multiple_of": 256, "full_attn_idxs": indices, "tie_embedding": True, **fields},
    }
    spec = read_spec(given)
    assert {layer.mlp.width for layer in spec.layers} == {width}
    layers = enumerate(layer.attention for layer in spec.layers)
    assert [index for index, own in layers if own.recurrent is None] == indices
    assert spec.tied_embeddings is given["tie_embedding"] and len(spec.states) == 10


def test_a_layer_of_nemotron_3_has_attention_a_state_or_an_mlp() -> None:
    """Nemotron 3 Nano, 30B-A3B."""
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    given = {
        **{"model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32},
        **{"num_hidden_layers": 52, "vocab_size": 131072, "intermediate_size": 1856},
        **{"hybrid_override_pattern": pattern, "num_key_value_heads": 2, "n_groups": 8},
        **{"mamba_num_heads": 64, "mamba_head_dim": 64, "n_routed_experts": 128},
        **{"num_experts_per_tok": 6, "moe_intermediate_size": 1856, "routed_scaling_factor": 2.5},
        **{"moe_shared_expert_intermediate_size": 3712, "max_position_embeddings": 262144},
    }
    spec = read_spec(given)
    kinds = {"M": (True, False, False), "*": (False, True, False), "E": (False, False, True)}
    for letter, layer in zip(pattern, spec.layers, strict=True):
        own = layer.attention
        found = own.recurrent is not None, own.has_pages, layer.experts is not None
        assert found == kinds[letter]
    assert len(spec.pages) == 6 and len(spec.states) == 2 * 23
    names = dict(zip(kinds, ("mamba", "attention", "moe"), strict=True))
    listed = {**given, "layers_block_type": [names[it] for it in pattern]}
    assert read_spec({**listed, "num_hidden_layers": 52, "hybrid_override_pattern": None}) == spec

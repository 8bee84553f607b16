"""Text models inside of multimodal checkpoints, and folders without a usable checkpoint."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PagedDriver, checkpoint, default_config
from family_configs import FAMILY_CONFIGS
from family_runs import LONG, family_folder, family_model
from odd_configs import family_config
from safetensors.torch import load_file, save_file

from gptmanager.errors import ConfigError
from gptmanager.models import load_model
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.models.families import FAMILIES
from gptmanager.models.families.wrappers import TEXT_DEFAULTS, TEXT_FAMILIES
from gptmanager.models.read_spec import read_spec

CASES = [
    ("mistral3", "mistral", {"model.": "language_model.model.", "lm_": "language_model.lm_"}),
    ("mistral3", "mistral4", {"model.": "language_model.model.", "lm_": "language_model.lm_"}),
    ("gemma3", "gemma3_text", {"model.": "model.language_model."}),
    ("gemma4", "gemma4_text", {"model.": "model.language_model."}),
    ("llama4", "llama4_text", {"model.": "language_model.model.", "lm_": "language_model.lm_"}),
    ("qwen2_5_vl", "qwen2", {"model.": "model.language_model."}),
    ("qwen3_vl", "qwen3", {"model.": "model.language_model."}),
    ("glm4v", "glm4", {"model.": "model.language_model."}),
    ("kimi_vl", "deepseek_v3", {"model.": "language_model.model.", "lm_": "language_model.lm_"}),
    ("smolvlm", "llama", {"model.": "model.text_model."}),
    ("lfm2_vl", "lfm2", {"model.": "model.language_model."}),
    (
        "NemotronH_Nano_VL_V2",
        "nemotron_h",
        {"model.": "language_model.backbone.", "lm_": "language_model.lm_"},
    ),
]
TIED = """
    aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid fun_asr_nano gemma3 gemma4
    gemma4_unified glmasr got_ocr2 granite_speech granite_speech_plus hyperclovax_vision_v2 internvl
    janus kimi_k25 lfm2_vl lighton_ocr minicpm_ocr mistral3 ovis2 paddleocr_vl qwen3_asr
    vlm
""".split()  # transformers 5
TIED_BY_TEXT_MODEL = ("internvl_chat", "kimi_vl", "llama4", "qwen2_audio", "voxtral")
# transformers 5.17 does not have them
OWN_CODE = (
    *("hyperclovax_vision_v2", "internvl_chat", "kimi_vl", "minicpm_ocr", "minicpmv4_7"),
    *("nemotron_h_omni", "NemotronH_Nano_VL_V2", "phi4mm", "vlm"),
)
FLAT = ("phi4_multimodal",)  # their configs have no `text_config`
ONE = torch.ones(1)
_MEDIA = """
    vision_tower.patch.weight model.visual.merger.bias model.aligner.fc1.weight
    model.merger.mlp.bias model.generation_head.out.weight model.vqmodel.encoder.bias
    model.high_res_vision_alpha model.vision_encoder.ln.weight model.vision_projection.norm.weight
    model.video_tower.ln.bias sound_encoder.ln.bias mlp_AR.pre_norm.bias
    model.layerwise_projectors.0.norm.bias model.spatial_projectors.0.norm.bias
"""
MEDIA = {name: torch.ones(2) for name in _MEDIA.split()}


def renamed(name: str, prefixes: dict[str, str]) -> str:
    for ours, theirs in prefixes.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


@pytest.mark.parametrize(("wrapper", "family", "prefixes"), CASES)
def test_the_text_model_of_a_wrapper_is_served(
    wrapper: str, family: str, prefixes: dict[str, str]
) -> None:
    config, state = checkpoint(family_model(family))
    wrapped = {
        "model_type": wrapper,
        "text_config": {**config, "model_type": family},
        "vision_config": {"hidden_size": 8},
        "image_token_index": 5,
        "projector_hidden_act": "gelu",
    }
    tensors = {renamed(name, prefixes): tensor for name, tensor in state.items()} | MEDIA
    plain, own = (load_model(it, dtype="float32") for it in ((config, state), (wrapped, tensors)))
    logits = [PagedDriver(model, 1).forward([(0, LONG)]) for model in (plain, own)]
    assert torch.equal(*logits)
    with pytest.raises(ConfigError, match="unknown: audio.weight"):
        load_model((wrapped, {**tensors, "audio.weight": torch.ones(1)}))


@pytest.mark.parametrize("name", [it for it in TEXT_FAMILIES if not it.endswith("_text")])
def test_where_a_wrapper_and_its_text_model_differ_the_files_decide_on_ties(name: str) -> None:
    """transformers 5 reads the wrapper's field, and unties matrices that differ."""
    text = family_config(TEXT_FAMILIES[name].replace("qwen3_vl_moe_text", "qwen3_moe"))
    text["model_type"] = TEXT_FAMILIES[name]
    defaults = {**FAMILIES[TEXT_FAMILIES[name]].defaults, **TEXT_DEFAULTS.get(f"{name}_text", {})}
    default = defaults.get("tie_word_embeddings", False)
    for own, outer in itertools.product((True, False, None), repeat=2):
        config = {"model_type": name, "text_config": {**text, "tie_word_embeddings": own}}
        config["tie_word_embeddings"] = outer
        if own is None:
            del config["text_config"]["tie_word_embeddings"]
        first = default if own is None else own
        second = name in TIED if outer is None else outer
        second = first if name in TIED_BY_TEXT_MODEL else second
        names = [*map(str, range(99))]
        with_head = read_spec(config, tensors=[*names, "language_model.lm_head.weight"])
        assert with_head.tied_embeddings == (first and second)
        assert read_spec(config).tied_embeddings == second
        without_head = read_spec(config, tensors=names)
        assert without_head.tied_embeddings == (first or second)


def test_the_text_model_may_be_in_a_thinker_or_have_another_name(tmp_path: Path) -> None:
    config, state = checkpoint(family_model("qwen2"))
    first = PagedDriver(load_model((config, state), dtype="float32"), 1).forward([(0, LONG)])
    inner = {"model_type": "qwen2_5_omni_thinker", "text_config": config, "audio_config": {}}
    omni = {"model_type": "qwen2_5_omni", "dtype": "float32", "thinker_config": inner}
    media = {it: torch.ones(1) for it in ("thinker.visual.x", "talker.x", "mlp1.0.bias")}
    for given, prefix in (
        (omni, "thinker."),
        ({"model_type": "internvl_chat", "llm_config": config}, "language_model."),
    ):
        tensors = {prefix + name: it.clone() for name, it in state.items()} | media
        folder = tmp_path / prefix
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(given))
        for source in ((given, tensors), folder):
            model = load_model(source, dtype="float32")
            assert torch.equal(PagedDriver(model, 1).forward([(0, LONG)]), first)


def by_expert(stacked: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts [number, out, in] as a tensor for each matrix of each expert."""
    alone = {}
    for name, experts in stacked.items():
        prefix, _, part = name.rpartition(".")
        for number, own in enumerate(experts):
            halves = own.chunk(2) if part == "gate_up_proj" else (own,)
            parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
            for half, matrix in zip(parts, halves, strict=True):
                alone[f"{prefix}.{number}.{half}.weight"] = matrix
    return alone


def test_experts_of_qwen3_vl_moe_have_one_of_three_forms() -> None:
    """Published checkpoints store [in, out], transformers 5 writes [out, in], others by expert."""
    config, state = checkpoint(family_model("qwen3_moe"))
    wrapped = {
        "model_type": "qwen3_vl_moe",
        "text_config": {**config, "model_type": "qwen3_vl_moe_text"},
        "tie_word_embeddings": False,
    }
    tensors = {
        renamed(name, {"model.": "model.language_model."}): it.mT if ".experts." in name else it
        for name, it in state.items()
    }
    fused = {n: it for n, it in tensors.items() if n.endswith(("gate_up_proj", "down_proj"))}
    fused = {name: it.mT for name, it in fused.items() if it.dim() == 3}
    assert len(fused) > 2
    plain = {name: it for name, it in tensors.items() if ".experts." not in name}
    alone = by_expert({name: it.mT for name, it in tensors.items() if ".experts." in name})
    sources = (
        family_folder("qwen3_moe"),
        *((wrapped, own) for own in (tensors, {**tensors, **fused}, {**plain, **alone})),
    )
    models = [load_model(it, dtype="float32") for it in sources]
    first, *others = [PagedDriver(model, 1).forward([(0, LONG)]) for model in models]
    assert all(torch.equal(first, other) for other in others)


def test_experts_of_qwen3_5_moe_may_be_stacked() -> None:
    family = "qwen3_5_moe_text"
    config, state = checkpoint(family_model(family))
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    wrapped = {"model_type": "qwen3_5_moe", "text_config": config, "tie_word_embeddings": False}
    tensors = {renamed(n, {"model.": "model.language_model."}): it for n, it in state.items()}
    tensors["mtp.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(2)  # is ignored
    sources = (config, state), (wrapped, tensors), family_folder(family)
    for options in ({}, {"weights_dtype": "int8"}):
        models = [load_model(it, dtype="float32", **options) for it in sources]
        first, *others = [PagedDriver(model, 1).forward([(0, LONG)]) for model in models]
        assert all(torch.equal(first, other) for other in others)


def test_adapters_of_phi4_for_images_and_sounds_are_not_read() -> None:
    """The config has the fields of the text model itself, and a text uses no adapter."""
    config, state = checkpoint(family_model("phi3"))
    flat = {
        **config,
        **{"model_type": "phi4mm", "full_attn_mod": 1, "interpolate_factor": 1},
        **{"speech_lora": {"r": 2}, "vision_lora": {"r": 2}, "img_processor": None},
        **{"audio_processor": {"name": "cascades"}, "embd_layer": {"embedding_cls": "tokens"}},
    }
    tensors = {
        re.sub(r"(?<=_proj)\.weight", ".base_layer.weight", k): it for k, it in state.items()
    }
    for name in ("lora_A.speech", "lora_B.vision"):
        tensors[f"model.layers.0.self_attn.qkv_proj.{name}.weight"] = torch.ones(2, 2)
    tensors["model.embed_tokens_extend.image_embed.glb_GN"] = ONE
    models = [load_model(it, dtype="float32") for it in ((config, state), (flat, tensors))]
    plain, own = (PagedDriver(model, 1).forward([(0, LONG)]) for model in models)
    assert torch.equal(plain, own)


@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_a_converted_model_is_quantized_whatever_its_tensors_are_called(
    prefix: str, tmp_path: Path
) -> None:
    config, state = checkpoint(family_model("mistral"))
    wrapped = {"model_type": "mistral3", "text_config": config, "tie_word_embeddings": False}
    other = {prefix + (k if prefix else k.removeprefix("model.")): it for k, it in state.items()}
    models, counts = [], []
    for own, tensors in ((config, state), (wrapped if prefix else config, other)):
        folder = tmp_path / str(len(models))
        folder.mkdir()
        whole = {key: it.contiguous() for key, it in tensors.items()}
        save_file(whole, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(own))
        converted = convert_checkpoint(folder, folder / "int8", weights_dtype="int8")
        written = load_file(converted / "model.safetensors")
        counts.append(sum(it.dtype is torch.int8 for it in written.values()))
        models.append(load_model(converted, dtype="float32", weights_dtype="file"))
    assert counts[0] == counts[1] > 20
    logits = [PagedDriver(model, 1).forward([(0, LONG)]) for model in models]
    assert torch.equal(*logits)


def test_a_flat_config_with_mrope_is_that_of_its_text_model() -> None:
    config: dict[str, Any] = json.loads(family_model("qwen2").config.to_json_string())
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    del config["rope_parameters"]
    flat = {**config, **rope, "model_type": "qwen2_vl", "vision_config": {"depth": 2}}
    spec = read_spec(flat)
    assert spec.family == "qwen2"
    assert spec.ropes[0].kind == "default" and spec.ropes[0].theta == 1e6


@pytest.mark.parametrize(
    "wrapper",
    [it for it in TEXT_FAMILIES if not it.endswith("_text") and it not in (*OWN_CODE, *FLAT)],
)
def test_fields_that_a_text_config_leaves_out_have_the_defaults_of_transformers(
    wrapper: str,
) -> None:
    whole = default_config(wrapper)
    full = type(getattr(whole, "thinker_config", whole).text_config)().to_dict() | {"dtype": None}
    text = {"model_type": full["model_type"]}
    if full["hidden_size"] % full["num_attention_heads"]:
        full, text = full | {"num_attention_heads": 32}, text | {"num_attention_heads": 32}
    if text["model_type"] not in TEXT_DEFAULTS:
        sizes = "vocab_size|hidden_size|num_hidden_layers|num_attention_heads|.*intermediate_size.*"
        text |= {key: it for key, it in full.items() if re.fullmatch(sizes, key)}
    if "max_window_layers" in full:
        windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
        full, text = full | windows, text | windows
    given = {"model_type": wrapper, "text_config": text}
    assert read_spec(given) == read_spec({**given, "text_config": full})
    if f"{wrapper}_text" in TEXT_DEFAULTS:
        named = {**text, "model_type": TEXT_FAMILIES[wrapper]}
        assert read_spec({**given, "text_config": named}) == read_spec(given)
    if re.fullmatch("qwen.*_vl", wrapper):  # older configs have no `text_config`
        assert read_spec({**text, "model_type": wrapper}) == read_spec(given)


@pytest.mark.parametrize(
    ("files", "text"),
    [
        ({"adapter_config.json": "{}"}, "holds a PEFT adapter: pass its base model"),
        ({"model_index.json": "{}"}, "a diffusion pipeline"),
        ({"params.json": "{}"}, "pass the Hugging Face version"),
        ({"config.json": '{"model_type": "mllama"}'}, "attention to the embeddings of images"),
        ({"config.json": '{"model_type": "bert"}'}, "this is an encoder, which does not generate"),
        (
            {"config.json": '{"model_type": "t5", "is_encoder_decoder": true}'},
            "an encoder-decoder, and only decoders",
        ),
    ],
)
def test_other_folders_are_described(tmp_path: Path, files: dict[str, str], text: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=text):
        read_spec(json.loads(files["config.json"])) if "config.json" in files else load_model(
            tmp_path
        )


@pytest.mark.parametrize(
    ("family", "change", "text"),
    [
        ("llama", {"attention_sink_size": 4}, "attention_sink_size = 4: an unknown field"),
        ("mistral", {"attention_bias": True}, "attention_bias = True: an unknown field"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit = 5.0: not supported"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9: must be at most num_"),
        ("glm4_moe", {"n_group": 3}, "n_group = 3: must divide n_routed_experts = 8"),
        (
            "glm4_moe",
            {"n_group": 4, "topk_group": 1, "num_experts_per_tok": 3},
            "num_experts_per_tok = 3: must be at most 2, the experts of topk_group groups",
        ),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
        ("gemma4_text", {"enable_moe_block": True}, "num_experts = None: must be a positive"),
        ("llama4_text", {"moe_layers": 3}, "moe_layers = 3: must be a list of layers"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types = .*: must be 4"),
        ("llama4_text", {"no_rope_layers": [1, 0]}, "no_rope_layers = .*: must be a list of 4"),
        ("llama4_text", {"attn_temperature_tuning": "on"}, "attn_temperature_tuning = 'on'"),
        ("gemma4_text", {"num_kv_shared_layers": 3}, "num_kv_shared_layers = 3: no earlier layer"),
        (
            "gemma4_text",
            {"per_layer_config": {"1": {"window": 3}}},
            "per_layer_config = .* may only",
        ),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob = True: must be false: DeepSeek"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc': must be 'greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax': not supported"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "must have 'attention' for at least"),
        ("dots1", {"scoring_func": "softmax"}, "scoring_func = 'softmax': not supported"),
        ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm = False: not supported"),
        ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers = .1.: must be a list of 4"),
        ("opt", {"do_layer_norm_before": False}, "do_layer_norm_before = False: must be true"),
    ],
)
def test_fields_that_would_change_the_computation_are_refused(
    family: str, change: dict[str, Any], text: str
) -> None:
    config = json.loads(family_model(family).config.to_json_string())
    with pytest.raises(ConfigError, match=text):
        read_spec({**config, **change})


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("gpt_oss", "mlp.experts.gate_up_proj_bias"),
        ("gpt_oss", "self_attn.sinks"),
        ("glm4", "post_mlp_layernorm.weight"),
        ("gemma4_text", "layer_scalar"),
        ("gemma4_text experts", "router.per_expert_scale"),
        ("gemma4_text experts", "post_feedforward_layernorm_1.weight"),
        ("llama4_text", "feed_forward.experts.down_proj"),
    ],
)
def test_a_missing_tensor_is_named(family: str, part: str) -> None:
    config, state = checkpoint(family_model(family))
    state = {name: tensor for name, tensor in state.items() if not name.endswith(f"1.{part}")}
    with pytest.raises(ConfigError, match=f"missing: model.layers.1.{part}"):
        load_model((config, state))


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("gpt_oss", {"experts_per_token": 4}),
        ("ernie4_5", {"compression_ratio": 1.0}),
        ("minimax_m2", {"attn_type_list": [1, 1, 1, 1], "use_mtp": True, "num_mtp_modules": 3}),
        ("minimax_m2", {"use_routing_bias": True, "mtp_transformer_layers": 1}),
        (
            "minimax_m2",
            {
                **{f"layernorm_{it}_beta": 1.0 for it in ("full_attention", "linear_attention")},
                **{"layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 8192},
                **{"shared_moe_mode": "sigmoid", "swa_rope_theta": -1.0},
            },
        ),
        ("mistral", {"is_composition": True}),
        ("llama4_text", {"no_rope_layers": [], "attn_temperature_tuning": 4}),
        ("llama", {"is_llama_config": True, "rope_interleaved": False}),  # SmolLM2
        ("gemma2", {"sliding_window_size": 4096, "cache_implementation": "hybrid"}),
        ("starcoder2", {"activation_function": "gelu_pytorch_tanh", "embedding_dropout": 0.1}),
        ("granitemoehybrid", {"normalization_function": "rmsnorm", "init_method": "mup"}),
        ("nemotron", {"kv_channels": 16, "rope_percent": 0.5}),
        ("cohere", {"model_max_length": 131072}),
        ("cohere2", {"use_parallel_embedding": True}),
        ("qwen3_moe", {"use_qk_norm": True, "qkv_bias": False}),  # Qwen3-Coder
        ("granitemoe", {"position_embedding_type": "rope"}),  # transformers 4 writes it
        ("stablelm", {"rope_pct": 0.25}),
        ("dots1", {"scoring_func": "noaux_tc", "moe_layer_freq": 1}),
        ("dots1", {"scoring_func": "sigmoid"}),
        (
            "ernie4_5_moe",
            {
                **{"moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_use_aux_free": True},
                **{"use_rmsnorm": True, "is_quantized": False, "num_nextn_predict_layers": 1},
            },
        ),
        (
            "hunyuan_v1_dense",
            {
                **{"add_classification_head": False, "attention_head_dim": 128, "class_num": 0},
                **{"cla_share_factor": 2, "dense_list": [4096, 0], "eod_token_id": 3},
                **{"im_end_id": 5, "im_newline_id": 11, "im_start_id": 4, "mask_init_id": 12},
                **{"norm_type": "rms", "org_vocab_size": 128167, "pad_id": 127961},
                **{"pool_type": "last", "sep_token_id": 1, "text_end_id": 7, "text_start_id": 6},
                **{"use_cla": False, "use_qk_norm": True, "use_rotary_pos_emb": True},
            },
        ),
    ],
)
def test_fields_of_published_configs_that_change_nothing_are_accepted(
    family: str, fields: dict[str, Any]
) -> None:
    config = {"model_type": family, **FAMILY_CONFIGS[family]}
    assert read_spec({**config, **fields}) == read_spec(config)


def test_layers_that_predict_further_tokens_are_not_read() -> None:
    config, state = checkpoint(family_model("ernie4_5_moe"))
    further = {"model.mtp_block.0.mlp.up_proj.weight": torch.ones(2), "model.mtp_emb_norm.0": ONE}
    further["model.layers.4.mtp.weight"] = ONE
    load_model(({**config, "num_nextn_predict_layers": 2**40}, {**state, **further}))
    further["model.layers.5.mtp.weight"] = ONE
    with pytest.raises(ConfigError, match="unknown: model.layers.5.mtp"):
        load_model(({**config, "num_nextn_predict_layers": 1}, {**state, **further}))
    state = load_file(family_folder("mimo") / "model.safetensors")
    config = family_config("mimo") | {"num_nextn_predict_layers": 1, "use_mrope": False}
    load_model((config, {**state, "model.mtp_layers.0.token_layernorm.weight": ONE}))


def test_linear_attention_is_refused_by_the_name_of_its_field() -> None:
    config = {"model_type": "minimax_m2", **FAMILY_CONFIGS["minimax_m2"]}
    with pytest.raises(ConfigError, match="attn_type_list"):
        read_spec({**config, "attn_type_list": [1, 0, 1, 1]})


def test_a_window_smaller_than_a_chunk_is_refused() -> None:
    folder = family_folder("llama4_text")
    model = load_model(folder, attention_window=8, sink=2)
    assert model.spec.windows == (8, 8, 8, 8) and model.spec.layers[0].attention.chunked
    with pytest.raises(ConfigError, match="max_attention_window = 7: must be at least the .* 8 of"):
        load_model(folder, attention_window=7)

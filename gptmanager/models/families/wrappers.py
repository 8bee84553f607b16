"""Finds the text model in a multimodal checkpoint, and recognizes the tensors of other parts.

Only text is computed. Embeddings of images or sounds can replace tokens: a request passes them as
`prompt_embedding_table`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gptmanager.errors import ConfigError, quoted
from gptmanager.models.checkpoint_parts import OF_WRAPPER, in_usual_form


def _sizes(vocab: int, hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }


# Model type of a wrapper, or of the text model in it -> the family of the text model.
TEXT_FAMILIES: Mapping[str, str] = {
    "aya_vision": "cohere2",
    "cohere2_vision": "cohere2",
    "deepseek_vl": "llama",
    "deepseek_vl_hybrid": "llama",
    "exaone4_5": "exaone4",
    "exaone4_5_text": "exaone4",
    "fast_vlm": "qwen2",
    "fun_asr_nano": "qwen3",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
    "glmasr": "llama",
    "glm_ocr": "glm4",
    "glm_ocr_text": "glm4",
    "glm4v": "glm4",
    "glm4v_text": "glm4",
    "glm46v": "glm4",
    "glm4v_moe": "glm4_moe",
    "glm4v_moe_text": "glm4_moe",
    "got_ocr2": "qwen2",
    "granite4_vision": "granite",
    "granite4_vision_text": "granite",
    "granite_speech": "granite",
    "granite_speech_plus": "granite",
    "hyperclovax_vision_v2": "hyperclovax",
    "idefics2": "mistral",
    "idefics3": "llama",
    "internvl": "qwen2",
    "internvl_chat": "qwen2",
    "janus": "llama",
    "kimi_k25": "deepseek_v3",
    "kimi_vl": "deepseek_v3",
    "lfm2_vl": "lfm2",
    "lighton_ocr": "qwen3",
    "llama4": "llama4_text",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "minicpm_ocr": "qwen3_5_text",
    "minicpmv4_6": "qwen3_5_text",
    "minicpmv4_7": "qwen3_5_text",
    "mistral3": "mistral",
    "NemotronH_Nano_VL_V2": "nemotron_h",
    "nemotron_h_omni": "nemotron_h",
    "ovis2": "qwen2",
    "paddleocr_vl": "llama",
    "paddleocr_vl_text": "llama",
    "perception_lm": "llama",
    "phi4_multimodal": "phi3",
    "phi4mm": "phi3",
    "qianfan_ocr": "qwen3",
    "qwen2_5_omni": "qwen2",
    "qwen2_5_omni_thinker": "qwen2",
    "qwen2_5_omni_text": "qwen2",
    "qwen2_audio": "qwen2",
    "qwen3_asr": "qwen3",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_omni_moe": "qwen3_moe",
    "qwen3_omni_moe_thinker": "qwen3_moe",
    "qwen3_omni_moe_text": "qwen3_moe",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "smolvlm": "llama",
    "video_llama_3": "qwen2",
    "video_llava": "llama",
    "vipllava": "llama",
    "vlm": "hyperclovax",  # HyperCLOVA X SEED Think 32B
    "voxtral": "llama",
}
# Model types of published configs -> the family that these models are of.
_OTHER_NAMES = {"iquestcoder": "llama", "kimi_k2": "deepseek_v3"}
_FAMILIES = {**TEXT_FAMILIES, **_OTHER_NAMES}
_QWEN2_VL: Mapping[str, Any] = {
    **_sizes(152064, 8192, 29568, 80, 64),
    "num_key_value_heads": 8,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
# Type of a text model -> fields that configs may leave out, with the defaults of transformers if
# they are not those of the family. Published Gemma 3 and LLaVA leave out sizes.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma3_text": _sizes(262208, 2304, 9216, 26, 8),
    "gemma4_unified_text": {
        **_sizes(262144, 2304, 9216, 30, 8),
        **{"num_key_value_heads": 4, "max_position_embeddings": 262144, "sliding_window": 1024},
        **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
    },
    "glm4v_text": {
        **_sizes(151552, 4096, 13696, 40, 32),
        **{"head_dim": None, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
        "partial_rotary_factor": 1.0,
    },
    "glm_ocr_text": {
        **_sizes(59392, 1024, 4096, 16, 16),
        **{"num_key_value_heads": 8, "head_dim": None, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "attention_bias": False},
    },
    "glm4v_moe_text": {
        **_sizes(151424, 4096, 10944, 46, 96),
        **{"attention_bias": True, "max_position_embeddings": 65536},
    },
    "iquestcoder": {
        **_sizes(76800, 5120, 27648, 80, 40),
        **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072},
        "rms_norm_eps": 1e-5,
    },
    "lfm2": _sizes(65536, 2560, 12288, 32, 32),
    "llama": _sizes(32000, 4096, 11008, 32, 32),
    "mistral": _sizes(32000, 4096, 14336, 32, 32),
    "paddleocr_vl_text": {
        **_sizes(103424, 1024, 3072, 18, 16),
        **{"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072},
        **{"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True},
    },
    "qwen2": _sizes(151936, 4096, 22016, 32, 32),
    "qwen2_5_omni_text": {
        **_sizes(152064, 3584, 18944, 28, 28),
        **{"num_key_value_heads": 4, "rope_theta": 1e6},
    },
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3_omni_moe_text": {
        **_sizes(3584, 2048, 18944, 28, 28),
        **{"norm_topk_prob": True, "rope_theta": 1e6},
    },
    "qwen3_vl_text": {
        **_sizes(151936, 4096, 22016, 32, 32),
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
    },
}
# Prefix of a text model's tensors in a wrapper -> their prefix without the wrapper.
PREFIXES: Mapping[str, str] = {
    "language_model.model.model.": "model.",  # Voxtral, as transformers 5 saves it
    "language_model.model.": "model.",
    "language_model.backbone.": "backbone.",  # Nemotron Nano VL
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",  # Idefics 3, SmolVLM
    "thinker.": "",
}
MEDIA = re.compile(
    r"^(model\.|thinker\.)?((vision|audio|sound|image|video)_\w+|visual|multi_modal_projector"
    r"|embed_vision|embed_audio|connector|encoder|mlp1|mm_projector|projector|mlp_AR|talker"
    r"|token2wav|code2wav|visual_embeddings_table|aligner|layerwise_projectors|spatial_projectors"
    r"|high_res_vision_\w+|vqmodel|generation_\w+|merger"
    r"|embed_tokens_extend)\b|\.lora_[AB]\.(speech|vision)\."
)
# In transformers 5, `tie_word_embeddings` of these wrappers is true by default.
_TIED_BY_DEFAULT = frozenset(
    """
    aya_vision cohere2_vision deepseek_vl deepseek_vl_hybrid fun_asr_nano gemma3 gemma4
    gemma4_unified glmasr got_ocr2 granite_speech granite_speech_plus hyperclovax_vision_v2 internvl
    janus kimi_k25 lfm2_vl lighton_ocr minicpm_ocr mistral3 ovis2 paddleocr_vl qwen3_asr
    vlm
    """.split()
)
# the wrapper's own field has no effect
_TIED_BY_TEXT_MODEL = ("internvl_chat", "kimi_vl", "llama4", "qwen2_audio", "voxtral")
_MEDIA_FIELDS = re.compile(r"(vision|audio|image|img|video|speech|vit|mm|boi|eoi)_.*")


def without_wrapper(name: str) -> str:
    """Return a tensor's name without the prefix of a wrapper around the model."""
    theirs = next(filter(name.startswith, PREFIXES), "")
    return PREFIXES.get(theirs, "") + name.removeprefix(theirs)


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Return whether a config describes a multimodal model, or the text model in one."""
    name = config.get("model_type")
    return isinstance(name, str) and name in TEXT_FAMILIES


def ties_by_wrapper(config: Mapping[str, Any]) -> Any:
    """Return `tie_word_embeddings` of a wrapper; None if the text model alone decides.

    Until version 4, transformers read the text model's field, and since version 5 it reads the
    wrapper's, so the two fields may differ.
    """
    config = in_usual_form(config)
    name = config.get("model_type")
    if not is_wrapper(config) or "text_config" not in config or name in _TIED_BY_TEXT_MODEL:
        return None
    given = config.get("tie_word_embeddings")
    return name in _TIED_BY_DEFAULT if given is None else given


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text model, or `config` itself without a wrapper.

    Fields that the text model leaves out are those of `TEXT_DEFAULTS`.
    """
    if not is_wrapper(config):
        name = config.get("model_type")
        if isinstance(name, str) and name in _OTHER_NAMES:
            return {**TEXT_DEFAULTS.get(name, {}), **config, "model_type": _OTHER_NAMES[name]}
        return config
    config = in_usual_form(config)
    wrapper, inner = config["model_type"], config.get("text_config")
    of_wrapper = TEXT_DEFAULTS.get(f"{wrapper.removesuffix('_text')}_text")
    if inner is None:  # the wrapper itself has the fields of the text model
        own = {k: value for k, value in config.items() if not _MEDIA_FIELDS.fullmatch(k)}
        return {**(of_wrapper or {}), **own, "model_type": TEXT_FAMILIES[wrapper]}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"config.json: text_config = {quoted(inner)}: must be an object")
    outer = {name: config[name] for name in OF_WRAPPER if config.get(name) is not None}
    name = inner.get("model_type", TEXT_FAMILIES[wrapper])
    family = _FAMILIES.get(name, name) if isinstance(name, str) else name
    given = {key: value for key, value in inner.items() if value is not None or key not in outer}
    if of_wrapper is None and isinstance(name, str):
        of_wrapper = TEXT_DEFAULTS.get(name)
    return {**(of_wrapper or {}), **outer, **given, "model_type": family}

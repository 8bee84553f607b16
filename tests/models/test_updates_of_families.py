"""Updates of weights, by the names of a folder and by those of a model in transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from family_configs import FAMILY_CONFIGS, VARIANTS
from family_runs import family_folder, family_model
from safetensors.torch import load_file
from torch import Tensor

from gptmanager.kernels.gemm.packed_matrix import stored
from gptmanager.memory.checkpoint.tensor_sources import StateDict
from gptmanager.memory.weights import Weights
from gptmanager.models import load_model
from gptmanager.models.families.wrappers import TEXT_FAMILIES
from gptmanager.models.other_layouts import in_expert_order

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
# sizes of encoders, by all names that they have in the configs of wrappers
_ENCODER = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "d_model"), 16),
    **dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
    **dict.fromkeys(("image_size", "encoder_ffn_dim", "num_position_embeddings"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "num_key_value_heads"), 2),
    **{"encoder_attention_heads": 2, "head_dim": 8, "patch_size": 8, "out_hidden_size": 64},
    **{"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]},
}
# transformers does not have them, saves other names than it reads, or builds large parts
_LEFT_OUT = {"internvl_chat", "kimi_vl", "kimi_k25", "exaone4_5", "qwen2_5_omni", "qwen3_omni_moe"}
_LEFT_OUT |= {"qwen2_5_omni_thinker", "qwen3_omni_moe_thinker", "nemotron_h_omni", "phi4mm"}
_LEFT_OUT |= {"NemotronH_Nano_VL_V2", "phi4_multimodal", "granite_speech_plus", "qwen3_asr"}
_LEFT_OUT |= {"perception_lm"}  # needs timm
_OF_SOUND = ("voxtral", "fun_asr_nano", "glmasr")


def parameters(weights: Weights) -> list[Tensor]:
    """Return the tensors that updates change."""
    return [it for name in weights if "cache_scales" not in name for it in stored(weights[name])]


def check_updates(folder: Path, state: dict[str, Tensor]) -> None:
    """Check that updates bring parameters back: whole ones, and those of one tensor each."""
    weights = load_model(folder, dtype="float32").weights
    expected = [it.clone() for it in parameters(weights)]
    for tensors in (state, load_file(folder / "model.safetensors")):
        alone = [{name: tensors[name]} for name in sorted(tensors, key=weights.is_twin)]
        for parts in ([tensors], alone):
            for it in parameters(weights):
                it.zero_()
            for part in parts:
                weights.load(part, partial=part is not tensors)
            assert all(map(torch.equal, parameters(weights), expected))


@pytest.mark.parametrize("name", [*FAMILY_CONFIGS, *VARIANTS])
@pytest.mark.every(3)
def test_an_update_gives_the_parameters_of_the_folder(name: str) -> None:
    state = family_model(name).state_dict()
    if name == "internlm2":  # transformers does not have it
        state = load_file(family_folder(name) / "model.safetensors")
    check_updates(family_folder(name), state)


@pytest.mark.parametrize(
    "name", [it for it in TEXT_FAMILIES if not it.endswith("_text") and it not in _LEFT_OUT]
)
@pytest.mark.every(6)
def test_an_update_of_a_wrapper_gives_the_parameters_of_the_folder(
    name: str, tmp_path: Path
) -> None:
    family = TEXT_FAMILIES[name]
    text = {**FAMILY_CONFIGS[family.replace("qwen3_vl_moe_text", "qwen3_moe")]}
    own = f"{name}_text"
    text |= {"model_type": own if own in TEXT_FAMILIES else family, "mlp_only_layers": []}
    if name == "glm4v_moe":
        text["use_qk_norm"] = False  # transformers ignores it there
    encoder = "audio_config" if name in _OF_SOUND else "vision_config"
    config = transformers.AutoConfig.for_model(name, text_config=text, **{encoder: _ENCODER})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForMultimodalLM.from_config(config)
    model.save_pretrained(tmp_path)
    check_updates(tmp_path, model.state_dict())


@pytest.mark.parametrize("is_out_in", [False, True])
def test_square_experts_have_the_order_of_the_others(is_out_in: bool) -> None:
    """Of Qwen3-VL-MoE, whose square matrices show no order. Alone, they count as [out, in]."""
    config = {"model_type": "qwen3_vl_moe", "text_config": {"hidden_size": 4}}
    experts = "model.language_model.layers.0.mlp.experts"
    square, down = torch.randn(2, 4, 4), torch.randn(2, 2, 4)
    in_out = {f"{experts}.gate_up_proj": square, f"{experts}.down_proj": down}
    given = {name: it.mT if is_out_in else it for name, it in in_out.items()}
    found = in_expert_order(config, StateDict(given))
    for name, expected in in_out.items():
        ((_, own),) = found.pieces(name, 1 << 20)
        assert torch.equal(own, expected)
    alone = in_expert_order(config, StateDict({f"{experts}.gate_up_proj": square}))
    ((_, own),) = alone.pieces(f"{experts}.gate_up_proj", 1 << 20)
    assert torch.equal(own, square.mT)

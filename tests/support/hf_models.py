"""Tiny random models of the architectures of transformers, and how each answers through it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from checkpoints import PagedDriver
from renamed_families import RENAMED

from gptmanager.kernels import CpuKernels
from gptmanager.models.families import FAMILIES
from gptmanager.models.hf.network import TransformersModel

_BASE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_SLIDING = {"sliding_window": 8}
_MIXED = {**_SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}
_FACTORS = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.1,
}
_LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": None,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Fields in addition to the base; None: without that field.
ARCHITECTURES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "mistral": _SLIDING,
    "ministral": _SLIDING,
    "ministral3": {
        "rope_parameters": {
            **_ROPE["rope_parameters"],
            "llama_4_scaling_beta": 0.3,
            "original_max_position_embeddings": 8,
        }
    },
    "qwen2": {},
    "qwen3": {},
    "phi": {},
    "phi3": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _SLIDING,
    "granite": _FACTORS,
    "glm": {"partial_rotary_factor": 0.5},
    "glm4": {"partial_rotary_factor": 0.5},
    "smollm3": {},
    "exaone4": {**_SLIDING, "sliding_window_pattern": 2},
    "seed_oss": {},
    "helium": {},
    "ernie4_5": {},
    "arcee": {},
    "apertus": {},
    "hunyuan_v1_dense": {},
    "cwm": _SLIDING,
    "gemma": {},
    "gemma2": {
        **_SLIDING,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {**_MIXED, "query_pre_attn_scalar": 24},
    "gemma3n_text": {
        **_MIXED,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {
        **_MIXED,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
    },
    "vaultgemma": _MIXED,
    "gpt2": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256},
    "gpt_bigcode": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256},
    "gptj": {"n_embd": 64, "n_head": 4, "n_layer": 4, "n_positions": 256, "rotary_dim": 8},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "bloom": {"n_head": 4, "n_layer": 4},
    "falcon": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "head_dim": None,
        "intermediate_size": None,
    },
    "cohere": {"use_qk_norm": True},
    "cohere2": _MIXED,
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "starcoder2": _SLIDING,
    "nemotron": {},
    "jais2": {},
    "diffllama": {},
    "hyperclovax": _FACTORS,
    "nanochat": {},
    "persimmon": {},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_n_heads": 8},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16},
    "nemotron_h": {
        **{"layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"]},
        **{"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16},
        **{"moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48},
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "full_attention"] * 2},
    "mixtral": {**_EXPERTS, "sliding_window": None},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**_EXPERTS, "decoder_sparse_step": 1},
    "cohere2_moe": {**_EXPERTS, **_MIXED, "num_shared_experts": 1},
    "mellum": {**_EXPERTS, **_MIXED},
    "olmoe": _EXPERTS,
    "flex_olmo": _EXPERTS,
    "gpt_oss": {**_EXPERTS, **_SLIDING, **_ROPE},
    "granite_swa": {**_FACTORS, **_MIXED},
    "granitemoe_swa": {**_EXPERTS, **_FACTORS, **_MIXED},
    "granitemoe": {**_EXPERTS, **_FACTORS},
    "granitemoehybrid": {
        **_FACTORS,
        **{"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48},
        **{"layer_types": ["attention"] * 4, "position_embedding_type": "rope"},
        **{"mamba_n_heads": 8, "mamba_d_head": 16},
    },
    "granitemoeshared": {**_EXPERTS, **_FACTORS, "shared_intermediate_size": 48},
    "glm4_moe": {**_EXPERTS, "partial_rotary_factor": 0.5, "use_qk_norm": True},
    "solar_open": _EXPERTS,
    "dots1": _EXPERTS,
    "minimax_m2": {**_EXPERTS, "rotary_dim": 16},
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone_moe": _EXPERTS,
    "hy_v3": _EXPERTS,
    "phimoe": {**_EXPERTS, "sliding_window": None},
    "hunyuan_v1_moe": {**_EXPERTS, "moe_topk": 2},
    "deepseek_v2": {**_EXPERTS, **_LATENT},
    "deepseek_v3": {**_EXPERTS, **_LATENT},
    "glm4_moe_lite": {**_EXPERTS, **_LATENT},
    "youtu": _LATENT,
    "minicpm3": _LATENT,
    "mimo_v2_flash": _EXPERTS,
    "afmoe": {**_EXPERTS, **_MIXED},
    "llama4_text": {
        **_EXPERTS,
        "attention_chunk_size": 8,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 1, 0],
        "interleave_moe_layer_step": 1,
    },
    "qwen3_next": {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 48},
}


_NO_ATTENTION = "do not call the attention interface: they may have a state"
# Architectures that are refused -> what the error says, a part of it
REFUSED = {
    "bloom": "its forward takes no position_ids",
    "bamba": f"layers 0, 2 {_NO_ATTENTION}",
    "falcon_h1": "tokens change each other outside of attention: a layer may have a state",
    "nemotron_h": f"layers 0, 1, 3 {_NO_ATTENTION}",
    "falcon": "its layers do not call the attention interface",
    "gptj": "its layers do not call the attention interface",
    "diffllama": "a layer calls the attention interface twice",
    "lfm2": f"layers 0, 2 {_NO_ATTENTION}",
    "lfm2_moe": f"layers 0, 2 {_NO_ATTENTION}",
    "llama4_text": "layer 0 has a mask other than causal",
    "qwen3_next": f"layers 0, 1, 2 {_NO_ATTENTION}",
    "qwen3_5_text": f"layers 0, 1, 2 {_NO_ATTENTION}",
    "qwen3_5_moe_text": f"layers 0, 1, 2 {_NO_ATTENTION}",
}
# An architecture that runs only through transformers
NOT_NATIVE = "persimmon"
# Architectures that transformers has only as a part of another one -> that one
PARTS = {"mistral4": "mistral3", "qwen3_vl_moe_text": "qwen3_vl_moe"}


def table(names: Iterable[str] = (*FAMILIES, *ARCHITECTURES)) -> str:
    """The table of docs/models.md: those of these architectures that do not run both ways."""
    rows = ["| `model_type` | natively | through transformers |", "| --- | --- | --- |"]
    for name in sorted({*names}):
        native = "yes" if name in FAMILIES else ""
        if name in PARTS:
            other = f"refused: transformers has it only as a part of `{PARTS[name]}`"
        elif name in RENAMED:
            other = "not tried: transformers 5.17 does not have it"
        elif name in REFUSED:
            other = f"refused: {REFUSED[name]}"
        else:
            assert name in ARCHITECTURES, f"{name} was not tried"
            other = "yes"
        if not native or other != "yes":
            rows.append(f"| `{name}` | {native} | {other} |")
    return "\n".join(rows)


def new_network(name: str, **more: Any) -> Any:
    """A random model in float32, with random norms and biases too."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    fields = {k: it for k, it in {**_BASE, **ARCHITECTURES[name], **more}.items() if it is not None}
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(name, **fields)
        network = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="eager", attn_implementation="eager"
        )
    with torch.no_grad():
        for own, parameter in network.named_parameters():
            if parameter.dim() == 1:
                start = 1.0 if "norm" in own and "bias" not in own else 0.0
                parameter.copy_(start + 0.2 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.5 if "embed" in own else 0.15)
    return network.float().eval()


def greedy(network: Any, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Continue each prompt alone, without any cache."""
    found = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(count):
                logits = network(input_ids=torch.tensor([ids]), use_cache=False).logits
                ids.append(int(logits[0, -1].argmax()))
            found.append(ids[len(prompt) :])
    return found


def through_transformers(network: Any, **options: Any) -> TransformersModel:
    return TransformersModel(network, CpuKernels(), **options)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 250, (n,), generator=generator).tolist() for n in lengths]


def in_pieces(model: Any, sequences: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Logits of sequences that run next to each other: in chunks, then token by token."""
    driver = PagedDriver(model, len(sequences))
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    starts = [5 + 4 * slot for slot in range(len(sequences))]
    _run(driver, [it[:start] for start, it in zip(starts, sequences, strict=True)], found)
    _run(driver, [it[start:-3] for start, it in zip(starts, sequences, strict=True)], found)
    for place in (-3, -2, -1):
        _run(driver, [[it[place]] for it in sequences], found)
    return [torch.cat(it) for it in found]


def _run(
    driver: PagedDriver, rows: Sequence[Sequence[int]], found: list[list[torch.Tensor]]
) -> None:
    logits = driver.forward(list(enumerate(rows)))
    for slot, part in enumerate(logits.split([len(row) for row in rows])):
        found[slot].append(part.float())


if __name__ == "__main__":
    print(table())

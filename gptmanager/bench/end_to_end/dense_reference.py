"""A Llama in plain torch, without a KV cache: the reference for a manager's logits.

Linear layers are in the dtype of the weights; norms, RoPE and attention are in float32. The
reference runs one sequence at a time. Llama with biases or RoPE scaling is not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gptmanager.bench.engine import Session
from gptmanager.bench.kernels.cases import largest_error
from gptmanager.bench.load import Request

# allowed error of logits, as a share of a position's largest absolute logit, by the weights' dtype
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}


def unsupported_reason(config: Mapping[str, Any]) -> str:
    """Return why the reference does not support a config; "" if the config is supported."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if config.get("model_type") != "llama" or kind != "default":
        return f"no reference for {config.get('model_type')} with RoPE of type {kind}"
    if config.get("attention_bias") or config.get("mlp_bias"):
        return "no reference for biases"
    return ""


@torch.inference_mode()
def dense_logits(
    config: Mapping[str, Any], weights: Mapping[str, Tensor], tokens: Sequence[int]
) -> Tensor:
    """Return the float32 logits `[T, vocab]` of one sequence of T tokens.

    `weights` maps Hugging Face's tensor names to tensors.
    """
    eps = config.get("rms_norm_eps", 1e-6)
    x = weights["model.embed_tokens.weight"][
        torch.tensor(tokens).to(weights["model.norm.weight"].device)
    ]
    cos, sin = _rotation(config, len(tokens), x.device)
    for index in range(config["num_hidden_layers"]):
        layer = _layer(weights, f"model.layers.{index}.")
        hidden = _norm(x, layer["input_layernorm"], eps)
        x = x + _attend(config, layer, hidden, cos, sin)
        hidden = _norm(x, layer["post_attention_layernorm"], eps)
        gate, up = F.linear(hidden, layer["mlp.gate_proj"]), F.linear(hidden, layer["mlp.up_proj"])
        x = x + F.linear(F.silu(gate) * up, layer["mlp.down_proj"])
    head = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    return F.linear(_norm(x, weights["model.norm.weight"], eps), weights[head]).float()


def compare_logits(
    session: Session,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    requests: Sequence[Request],
) -> dict[str, Any]:
    """Compare a manager's logits with the reference's, token by token.

    The manager is correct if its logits are. The number of equal tokens is only reported, because
    rounding may decide between tokens with nearly equal logits.
    """
    worst, same, total = 0.0, 0, 0
    results = session.results(requests, return_generation_logits=True)
    for result in results:
        prompt, generated = result.prompt_ids, result.generated_ids[0]
        logits = dense_logits(config, weights, prompt + generated)[len(prompt) - 1 : -1]
        got = result.tensors["generation_logits"][0, 0].to(logits.device)
        worst = max(worst, largest_error(logits)(got))
        same += int((logits.argmax(-1).cpu() == torch.tensor(generated)).sum())
        total += len(generated)
    allowed = _TOLERANCE[weights["lm_head.weight"].dtype if "lm_head.weight" in weights
                         else weights["model.norm.weight"].dtype]  # fmt: skip
    return {
        "status": "ok" if worst <= allowed else "wrong",
        "error": float(f"{worst:.3g}"),
        "tolerance": allowed,
        "same_tokens": f"{same} of {total}",
    }


def _layer(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    own = (name for name in weights if name.startswith(prefix))
    return {name.removeprefix(prefix).removesuffix(".weight"): weights[name] for name in own}


def _attend(
    config: Mapping[str, Any], layer: Mapping[str, Tensor], hidden: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    queries, keys, values = (
        F.linear(hidden, layer[f"self_attn.{name}_proj"]).view(len(hidden), -1, head_dim)
        for name in "qkv"
    )
    rotated = (_rotate(queries, cos, sin), _rotate(keys, cos, sin), values)
    queries, keys, values = (it.float().transpose(0, 1)[None] for it in rotated)
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    mixed = mixed[0].transpose(0, 1).flatten(1).to(hidden.dtype)
    return F.linear(mixed, layer["self_attn.o_proj"])


def _rotation(
    config: Mapping[str, Any], length: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    frequencies = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.arange(length)[:, None] * frequencies
    return angles.cos()[:, None].to(device), angles.sin()[:, None].to(device)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)

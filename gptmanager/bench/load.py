"""Benchmark loads for engines: requests of random tokens, and models with random weights."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gptmanager.arguments import at_least, length_range
from gptmanager.bench.names import SHAPE_NAMES
from gptmanager.errors import ConfigError
from gptmanager.memory.checkpoint.untrusted_files import check_file
from gptmanager.models import checkpoint_parts
from gptmanager.models.checkpoint_parts import gguf_checkpoint
from gptmanager.models.fields import Fields

# the model for benchmarks on a CPU, if no checkpoint is given
SMALL_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}

# Qwen2.5-0.5B
QWEN2_HALF_B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
SHAPES: Mapping[str, Mapping[str, Any]] = dict(
    zip(SHAPE_NAMES, (SMALL_LLAMA, QWEN2_HALF_B), strict=True)
)

# the model for benchmarks on one large GPU
LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}

Request = tuple[list[int], int]  # prompt's token ids, number of new tokens
Source = Path | tuple[Mapping[str, Any], Mapping[str, Tensor]]  # folder, or config and tensors


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of random tokens. Lengths are drawn uniformly from ranges, both ends included."""

    num_requests: int = 64
    prompt_len: tuple[int, int] = (16, 256)
    output_len: tuple[int, int] = (16, 128)
    seed: int = 7

    def __post_init__(self) -> None:
        at_least(1, "Load.num_requests", self.num_requests)
        at_least(0, "Load.seed", self.seed)
        length_range("Load.prompt_len", self.prompt_len)
        length_range("Load.output_len", self.output_len)

    def requests(self, vocab_size: int) -> list[Request]:
        """Draw the requests, the same ones in each call."""
        draw = np.random.default_rng(self.seed).integers
        return [
            (
                draw(0, vocab_size, draw(*self.prompt_len, endpoint=True)).tolist(),
                int(draw(*self.output_len, endpoint=True)),
            )
            for _ in range(self.num_requests)
        ]


def uniform_requests(
    num_requests: int, prompt_len: tuple[int, int], output_len: tuple[int, int], vocab_size: int
) -> list[Request]:
    """Return the load that published figures of other engines use.

    All prompts are drawn first, then all output lengths, with seed 0. If both ranges are 100 to
    1024, 256 requests have 142,827 prompt tokens and 133,966 new tokens.
    """
    draw = random.Random(0).randint
    highest = min(10000, vocab_size - 1)
    prompts = [[draw(0, highest) for _ in range(draw(*prompt_len))] for _ in range(num_requests)]
    return [(prompt, draw(*output_len)) for prompt in prompts]


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the config and the tensors of a checkpoint.

    Raises ConfigError if a file cannot be read.
    """
    config = read_config(folder)
    if (gguf := gguf_checkpoint(folder)) is not None:
        tensors = gguf.tensors()
        pieces = {name: tensors.pieces(name, sys.maxsize) for name in tensors.describe()}
        return config, {name: torch.cat([one for _, one in own]) for name, own in pieces.items()}
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        check_file(file)
        try:
            state |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"--model {folder}: {file.name}: {error}") from error
    return config, state


def random_llama(
    config: Mapping[str, Any],
    seed: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Tensor]:
    """Draw the state dict of a Llama or Qwen2 on the CPU, with Hugging Face's tensor names.

    Weights and biases are normal(0, 0.02); the weights of norms are 1.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: _draw(name, shape, generator, dtype, "cpu") for name, shape in _shapes(config).items()
    }


class RandomLlama(Mapping[str, Tensor]):
    """A state dict like the result of `random_llama`, but a tensor is drawn each time it is read.

    A tensor has the same values at each read, but other values than in `random_llama`. No tensor
    is kept here, so the device holds only the manager's copy of the weights.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        seed: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._shapes = _shapes(config)
        self._seeds = {name: seed * len(self._shapes) + i for i, name in enumerate(self._shapes)}
        self._dtype, self._device = dtype, device

    def __getitem__(self, name: str) -> Tensor:
        generator = torch.Generator(self._device).manual_seed(self._seeds[name])
        return _draw(name, self._shapes[name], generator, self._dtype, self._device)

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def _draw(
    name: str,
    shape: tuple[int, ...],
    generator: torch.Generator,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Tensor:
    weight = torch.ones(shape, dtype=dtype, device=device)
    is_norm = name.endswith("norm.weight")
    return weight if is_norm else weight.normal_(0, 0.02, generator=generator)


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a Llama or Qwen2 by its Hugging Face name."""
    hidden, ffn = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries, kv = (head_dim * config[f"num_{it}_heads"] for it in ("attention", "key_value"))
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    if config["model_type"] == "qwen2":
        layer |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.bias": (kv,),
        }
    table = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = table
    shapes["model.norm.weight"] = (hidden,)
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's config.

    Raises ConfigError if the config cannot be read or has no valid vocab_size.
    """
    config = checkpoint_parts.read_config(folder)
    Fields(config, {}, {}, f"--model {folder}: config.json: ").size("vocab_size")
    return config

"""The peak rates of a device, measured by copies and matmuls, and the floors that follow.

Knows nothing of kernels and engines. Floors are those of a Llama: a step reads every weight but the
embeddings once and the KV cache of its sequences; products and attention do not overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gptmanager.bench.timing import Budget, Spread, Timer, take_turns

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """Bytes a second that a copy reads and writes, operations a second of a product."""

    copy_bytes_per_s: float
    product_flops_per_s: float
    dtype: str

    def floor_s(self, num_bytes: float, flops: float = 0) -> float:
        return max(num_bytes / self.copy_bytes_per_s, flops / self.product_flops_per_s)

    def report(self) -> dict[str, Any]:
        return {
            "copy_tb_per_s": round(self.copy_bytes_per_s / 1e12, 4),
            "product_tflop_per_s": round(self.product_flops_per_s / 1e12, 3),
            "product_dtype": self.dtype,
        }


def measure_ceilings(
    timer: Timer, device: torch.device, dtype: torch.dtype, num_bytes: int, width: int
) -> Ceilings:
    """A copy that reads `num_bytes` and writes as many; a product of two `[width, width]`."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    left = torch.randn(width, width, device=device).to(dtype)
    right = torch.randn(width, width, device=device).to(dtype)
    product = torch.empty_like(left)
    watches = {
        "copy": timer.prepare(lambda number: target.copy_(source), 1),
        "product": timer.prepare(lambda number: torch.mm(left, right.T, out=product), 1),
    }
    best = {
        name: Spread.of(seconds).best
        for name, seconds in take_turns(watches, _ROUNDS, Budget()).items()
    }
    return Ceilings(
        2 * num_bytes / best["copy"], 2 * width**3 / best["product"], str(dtype).split(".")[-1]
    )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama that its floors follow from. `kv_itemsize`: bytes of a cached number."""

    num_layers: int
    hidden: int
    ffn: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    itemsize: int = 2
    kv_itemsize: int = 2

    @classmethod
    def of(cls, config: Mapping[str, Any], itemsize: int, kv_itemsize: int) -> ModelShape | None:
        """None for families that are no Llama."""
        if config.get("model_type") not in _FAMILIES:
            return None
        num_heads = config["num_attention_heads"]
        return cls(
            num_layers=config["num_hidden_layers"],
            hidden=config["hidden_size"],
            ffn=config["intermediate_size"],
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
            vocab_size=config["vocab_size"],
            itemsize=itemsize,
            kv_itemsize=kv_itemsize,
        )

    @property
    def layer_params(self) -> int:
        """Return the number of parameters in all layers' matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_itemsize

    def step_s(self, ceilings: Ceilings, batch_size: float, context: float) -> float:
        """A generation step of `batch_size` sequences with `context` tokens each."""
        params = self.layer_params + self.hidden * self.vocab_size
        products = ceilings.floor_s(params * self.itemsize, 2 * params * batch_size)
        return products + ceilings.floor_s(batch_size * context * self.kv_bytes_per_token)

    def context_s(self, ceilings: Ceilings, num_tokens: float) -> float:
        """The context phase of one sequence beside many others, which read the weights for it."""
        head = 2 * self.hidden * self.vocab_size
        attention = 2 * num_tokens**2 * self.num_heads * self.head_dim * self.num_layers
        return ceilings.floor_s(0, 2 * self.layer_params * num_tokens + attention + head)

    def load_s(
        self, ceilings: Ceilings, lengths: list[tuple[int, int]], max_batch_size: int
    ) -> float:
        """The floor of requests of (prompt, new tokens) that all wait from the start.

        Contexts take what they take in batches of any size; a request generates when a place among
        `max_batch_size` is free, the first come first.
        """
        seconds = sum(self.context_s(ceilings, prompt) for prompt, _ in lengths)
        waiting = list(reversed(lengths))
        running: list[list[int]] = []  # context, tokens to come
        while waiting or running:
            while waiting and len(running) < max_batch_size:
                prompt, new_tokens = waiting.pop()
                running.append([prompt, new_tokens - 1])  # the first comes of the context
            running = [own for own in running if own[1] > 0]
            if not running:
                continue
            steps = min(own[1] for own in running)
            context = sum(own[0] for own in running) / len(running) + (steps + 1) / 2
            seconds += steps * self.step_s(ceilings, len(running), context)
            running = [[own[0] + steps, own[1] - steps] for own in running]
        return seconds

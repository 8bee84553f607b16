"""Peak rates of a device, measured by a copy and a matmul, and lower bounds (floors) on times.

This module is independent of kernels and engines. Floors assume a Llama: a step reads every weight
except the embeddings once, and the KV cache of its sequences. Matmuls and attention do not overlap.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from gptmanager.bench.timing import Budget, Spread, Timer, measure_all

_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ROUNDS = 5


@dataclass(frozen=True)
class Ceilings:
    """The measured rates of a copy (bytes read and written per second) and of a matmul.

    `dtype`: the dtype of the matmul.
    """

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    dtype: str

    def floor_s(self, num_bytes: float, flops: float = 0) -> float:
        """Return the least seconds for moving `num_bytes` and computing `flops`, in parallel."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)

    def report(self) -> dict[str, Any]:
        """Return the rates as fields of a report."""
        return {
            "copy_tb_per_s": round(self.copy_bytes_per_s / 1e12, 4),
            "matmul_tflop_per_s": round(self.matmul_flops_per_s / 1e12, 3),
            "matmul_dtype": self.dtype,
        }


def measure_ceilings(
    timer: Timer, device: torch.device, dtype: torch.dtype, num_bytes: int, width: int
) -> Ceilings:
    """Time a copy that reads and writes `num_bytes`, and a matmul of two `[width, width]`."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    left = torch.randn(width, width, device=device).to(dtype)
    right = torch.randn(width, width, device=device).to(dtype)
    result = torch.empty_like(left)
    watches = {
        "copy": timer.prepare(lambda number: target.copy_(source), 1),
        "matmul": timer.prepare(lambda number: torch.mm(left, right.T, out=result), 1),
    }
    best = {
        name: Spread.of(seconds).best
        for name, seconds in measure_all(watches, _ROUNDS, Budget()).items()
    }
    return Ceilings(
        2 * num_bytes / best["copy"], 2 * width**3 / best["matmul"], str(dtype).split(".")[-1]
    )


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a Llama that its floors depend on.

    `itemsize`, `kv_itemsize`: bytes per element of the weights and of the KV cache.
    """

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
        """Return the shape of a config; None if its family does not compute as a Llama does."""
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
        """The number of parameters in the matrices of all layers."""
        attention = self.hidden * self.head_dim * 2 * (self.num_heads + self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def kv_bytes_per_token(self) -> int:
        """The bytes of a token's keys and values in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_itemsize

    def step_s(self, ceilings: Ceilings, batch_size: float, context: float) -> float:
        """Return the floor of a generation step of `batch_size` sequences of `context` tokens.

        The result is in seconds.
        """
        params = self.layer_params + self.hidden * self.vocab_size
        matmuls = ceilings.floor_s(params * self.itemsize, 2 * params * batch_size)
        return matmuls + ceilings.floor_s(batch_size * context * self.kv_bytes_per_token)

    def context_s(self, ceilings: Ceilings, num_tokens: float) -> float:
        """Return the floor of one sequence's context phase in a large batch, in seconds.

        The weights are read once for the whole batch, so only FLOPs count.
        """
        head = 2 * self.hidden * self.vocab_size
        attention = 2 * num_tokens**2 * self.num_heads * self.head_dim * self.num_layers
        return ceilings.floor_s(0, 2 * self.layer_params * num_tokens + attention + head)

    def load_s(
        self, ceilings: Ceilings, lengths: list[tuple[int, int]], max_batch_size: int
    ) -> float:
        """Return the floor of a load in seconds.

        `lengths`: (prompt tokens, new tokens) of requests that are all submitted at the start. The
        contexts take the sum of their `context_s`. Requests generate in order of arrival,
        `max_batch_size` of them at a time.
        """
        seconds = sum(self.context_s(ceilings, prompt) for prompt, _ in lengths)
        waiting = list(reversed(lengths))
        running: list[list[int]] = []  # [context, tokens to go]
        while waiting or running:
            while waiting and len(running) < max_batch_size:
                prompt, new_tokens = waiting.pop()
                running.append([prompt, new_tokens - 1])  # the context phase samples the first one
            running = [own for own in running if own[1] > 0]
            if not running:
                continue
            steps = min(own[1] for own in running)
            context = sum(own[0] for own in running) / len(running) + (steps + 1) / 2
            seconds += steps * self.step_s(ceilings, len(running), context)
            running = [[own[0] + steps, own[1] - steps] for own in running]
        return seconds

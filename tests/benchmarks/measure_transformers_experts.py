"""Steps of a model with experts: through transformers with our experts, natively, and with theirs.

    python tests/benchmarks/measure_transformers_experts.py [--weights-dtype int8]

A random Qwen3-MoE of six layers, 32 experts of width 256 and 4 of them for each token runs in one
process, on one core. `theirs` computes experts in the loop of transformers, in floats; all else is
as in `ours`. `native` is the native model, and `captured` the same with captured steps. Runs
alternate, and the shortest CPU time of each counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from checkpoints import PagedDriver  # noqa: E402
from hf_models import new_network  # noqa: E402

from gptmanager.kernels import CpuKernels  # noqa: E402
from gptmanager.models.hf import network as through_transformers  # noqa: E402
from gptmanager.models.hf.loading import load_with_transformers  # noqa: E402
from gptmanager.models.model import load_model  # noqa: E402

SIZES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
}
# fields of other architectures, which the native reader refuses
SIZES |= dict.fromkeys(("first_k_dense_replace", "n_shared_experts", "n_group", "topk_group"))
SIZES |= dict.fromkeys(("num_local_experts", "n_routed_experts"))
CASES = [("prompt of 512", 1, 512), ("1 row", 1, 1), ("8 rows", 8, 1), ("64 rows", 64, 1)]
PROMPT, MOST = 20, 900  # tokens of a row: before steps of one token, and at the end


class Run:
    """Steps of one model: `num_rows` rows of `num_tokens` tokens each."""

    def __init__(self, model: Any, num_rows: int, num_tokens: int, captures: bool) -> None:
        self._model, self._num_tokens = model, num_tokens
        self._generator = torch.Generator().manual_seed(1)
        self._captures, self._num_rows, self._length = captures, num_rows, MOST
        self.best = float("inf")

    def step(self) -> None:
        if self._length + self._num_tokens > MOST:
            self._driver = PagedDriver(self._model, self._num_rows)
            self._length = PROMPT if self._num_tokens == 1 else 0
            if self._length:
                self._forward(PROMPT)
            if self._captures:
                self._driver.step_capture = CpuKernels().new_step_capture()
        self._length += self._num_tokens
        self.best = min(self.best, self._forward(self._num_tokens))

    def _forward(self, num_tokens: int) -> float:
        """Return the CPU time in milliseconds."""
        size = self._num_rows, num_tokens
        tokens = torch.randint(0, SIZES["vocab_size"], size, generator=self._generator).tolist()
        last = range(num_tokens - 1, self._num_rows * num_tokens, num_tokens)
        started = time.process_time()
        self._driver.forward(list(enumerate(tokens)), last)
        return 1000 * (time.process_time() - started)


def load(folder: Path, weights_dtype: Any) -> Mapping[str, Any]:
    """Return the model that computes experts in each way."""
    options = {"weights_dtype": weights_dtype}
    with mock.patch.object(through_transformers, "replace_experts", lambda *given: []):
        theirs = load_with_transformers(folder, CpuKernels(), **options)
    native = load_model(folder, kernels=CpuKernels(), **options)
    ours = load_with_transformers(folder, CpuKernels(), **options)
    return {"theirs": theirs, "ours": ours, "native": native, "captured": native}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights-dtype", choices=("int8", "int4"))
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        new_network("qwen3_moe", **SIZES).save_pretrained(folder)
        models = load(Path(folder), options.weights_dtype)
    print(f"{'CPU time of a step':20}" + "".join(f"{name:>10}" for name in models))
    for case, *size in CASES:
        runs = [Run(it, *size, captures=name == "captured") for name, it in models.items()]
        for _ in range(options.rounds if size[1] == 1 else 4):
            for run in runs:
                run.step()
        print(f"{case:20}" + "".join(f"{run.best:7.2f} ms" for run in runs))


if __name__ == "__main__":
    main(sys.argv[1:])

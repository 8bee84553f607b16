"""The time of an update of all weights, next to that of loading them, in turns.

    python tests/benchmarks/measure_weight_updates.py [--rounds 3] [--weights-dtype int8]

The model has the shape of Qwen2.5-0.5B, in bfloat16. Times are CPU seconds and wall seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file

from gptmanager.bench.load import SHAPES
from gptmanager.models import load_model

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from checkpoints import save_large  # noqa: E402


def timed(function) -> tuple[float, float]:
    """Its CPU and its wall seconds."""
    cpu, wall = time.process_time(), time.perf_counter()
    function()
    return time.process_time() - cpu, time.perf_counter() - wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--weights-dtype", choices=("int8", "int4"))
    parser.add_argument("--layers", type=int, default=24)
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "model")
        shape = {**SHAPES["qwen2-0.5b"], "num_hidden_layers": options.layers, "dtype": "bfloat16"}
        save_large(shape, folder)
        tensors = load_file(folder / "model.safetensors")

        def load():
            return load_model(folder, dtype="bfloat16", weights_dtype=options.weights_dtype)

        model = load()  # the first one compiles, and reads the file from the disk
        ways = {
            "load": load,
            "update": lambda: model.weights.load(tensors, partial=True),
            "update one by one": lambda: [
                model.weights.load({name: tensor}, partial=True) for name, tensor in tensors.items()
            ],
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, way in ways.items():
                found[name].append(timed(way))
    first = median(cpu for cpu, _ in found["load"])
    for name, times in found.items():
        cpu, wall = (median(column) for column in zip(*times, strict=True))
        print(f"{name}: {cpu:.2f} s CPU, {wall:.2f} s wall, {cpu / first:.2f} x load")


if __name__ == "__main__":
    main()

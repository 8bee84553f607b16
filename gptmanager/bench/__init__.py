"""How fast it is: a load beside a peer on any machine, kernels and a whole model on one GPU."""

from gptmanager.bench.engine import Figures, run_manager
from gptmanager.bench.load import LLAMA_8B, SMALL_LLAMA, Load, random_llama
from gptmanager.bench.throughput import BenchOptions, bench
from gptmanager.bench.transformers_peer import TransformersPeer

__all__ = [
    "LLAMA_8B",
    "SMALL_LLAMA",
    "BenchOptions",
    "Figures",
    "Load",
    "TransformersPeer",
    "bench",
    "random_llama",
    "run_manager",
]

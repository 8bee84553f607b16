"""The arguments of `gptmanager run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gptmanager.terminal.arguments import positive, seconds
from gptmanager.terminal.options import add_json, add_manager_options, add_model, add_parser

_HELP = """\
Serve a file of requests and show them live.

A line of FILE is a JSON object:
  "prompt"          a text (the folder then needs a tokenizer.json),
  "messages"        a list of {"role": ..., "content": ...}, for the model's chat template, or
  "input_ids"       a list of token ids
  "max_new_tokens"  how long the answer may get (else --max-new-tokens)
  "lora"            the folder of an adapter that PEFT has saved
  "stop"            a text or a list of texts that end it, as the tokens they encode to
  "request_id"      a number (else the number of the line)
and any input of a request by its name: "temperature", "top_k", "top_p", "random_seed", "end_id",
"priority", ... Without an end_id the checkpoint's generation_config.json says what ends a text.
A line that is wrong is answered with an error; the others run. So is a text that fits into no
request; a long one is encoded while others run.
"""
_EXAMPLES = """\
examples:
  gptmanager run --model examples/tiny_llama --prompt "17 + 25 ="
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl --output out.jsonl
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl \\
    --max-batch-size 4 --pace 0.05            # slowly, to see requests join and leave
  echo '{"prompt": "17 + 25 ="}' | gptmanager run --model examples/tiny_llama --requests - --json

  torchrun --nproc-per-node 2 -m gptmanager run --tensor-parallel-size 2 \\
    --model examples/tiny_llama --requests examples/requests.jsonl   # one model, two processes

exit status: 0 all answered, 1 some failed, 2 the call was wrong, 130 interrupted, 143 terminated
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "run",
        "gptmanager.run.main:main",
        help="serve a file of requests and show them live",
        usage="gptmanager run --model PATH (--requests FILE | --prompt TEXT) [options]",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add_model(parser, required=True)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--requests", metavar="FILE", help="JSON lines; -: the standard input")
    given.add_argument("--prompt", metavar="TEXT", help="one request: only its answer is printed")
    told = "results as JSON lines, in the same order; -: to the standard output, without a summary"
    add("--output", type=Path, metavar="FILE", help=told)
    add("--stats", type=Path, metavar="FILE", help="a statistics record an iteration, JSON lines")
    add("--record", type=Path, metavar="FILE", help="a recording, for `gptmanager picture`")
    add_json(parser, "print the summary as JSON, with the answers unless --output takes them")
    told = "for lines that name none (default %(default)s)"
    add("--max-new-tokens", type=positive, default=64, metavar="N", help=told)
    add("--pace", type=seconds, default=0.0, metavar="S", help="at least S seconds an iteration")
    add_manager_options(parser)

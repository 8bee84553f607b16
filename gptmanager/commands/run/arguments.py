"""The arguments of `gptmanager run`."""

from __future__ import annotations

from typing import Any

from gptmanager.terminal.arguments import (
    nonempty_text,
    path_argument,
    positive,
    seconds,
    text_argument,
    writable,
)
from gptmanager.terminal.options import add_json, add_manager_options, add_model, add_parser
from gptmanager.terminal.sampling import add_sampling

_HELP = """\
Serve a file of requests and show them live.

A line of FILE is a JSON object with one of
  "prompt"          a text; the model must have a tokenizer
  "messages"        a list of {"role": ..., "content": ...}; the model must have a chat template
  "input_ids"       a list of token ids
It may also have
  "max_new_tokens"  the maximum number of tokens of the answer (default: --max-new-tokens)
  "lora"            the folder of an adapter in the format of PEFT
  "stop"            a text, or a list of texts; the first of them in the answer ends it, and is not
                    part of it
  "request_id"      an integer (default: the line number)
and any other input of a request by its name: "temperature", "top_k", "top_p", "random_seed",
"end_id", "priority", ... Without "end_id", the answer ends at the end ids of the checkpoint's
generation_config.json.

A line that is not valid, or that has a text longer than any request may be, gets an error as its
answer. The other lines run. Long texts are tokenized while other requests run.
"""
_SAMPLING = """\
These are for --prompt, and for lines without the field. If none is given, answers are greedy:
unlike `chat` and `serve`, this command does not read the checkpoint's sampling. The same --seed
gives the same answers.
"""
_EXAMPLES = """\
examples:
  gptmanager run --model examples/tiny_llama --prompt "17 + 25 ="
  gptmanager run --model smollm2 --prompt "Once" --temperature 0.7 --top-p 0.9 --seed 1
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl --output out.jsonl
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl \\
    --max-batch-size 4 --pace 0.05            # slowly, to see requests join and leave
  echo '{"prompt": "17 + 25 ="}' | gptmanager run --model examples/tiny_llama --requests - --json

  torchrun --nproc-per-node 2 -m gptmanager run --tensor-parallel-size 2 \\
    --model examples/tiny_llama --requests examples/requests.jsonl   # one model, two processes
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "run",
        "gptmanager.commands.run.main:main",
        help="serve a file of requests and show them live",
        usage="gptmanager run --model PATH (--requests FILE | --prompt TEXT) [options]",
        description=_HELP,
        statuses=("all requests were answered", "a request failed, or an output is incomplete"),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add_model(parser, required=True)
    given = parser.add_mutually_exclusive_group(required=True)
    text = "a file with a request in each line, as JSON; -: the standard input"
    given.add_argument("--requests", metavar="FILE", help=text)
    text = "run one request, and print only its answer"
    given.add_argument("--prompt", type=text_argument, metavar="TEXT", help=text)
    text = "write results as JSON lines, in the same order; - prints them instead of the summary"
    add("--output", type=path_argument, metavar="FILE", help=text)
    text = "write the statistics record of each iteration as JSON lines"
    add("--stats", type=path_argument, metavar="FILE", help=text)
    text = "write a recording, for `gptmanager picture`"
    add("--record", type=writable, metavar="FILE", help=text)
    add_json(parser, "print the summary as JSON; without --output, with the answers")
    text = "maximum number of new tokens, for lines without max_new_tokens (default %(default)s)"
    add("--max-new-tokens", type=positive, default=64, metavar="N", help=text)
    text = "a text that ends an answer, for lines without stop; may be repeated"
    add("--stop", type=nonempty_text, action="append", default=[], metavar="TEXT", help=text)
    text = "let each iteration take at least S seconds"
    add("--pace", type=seconds, default=0.0, metavar="S", help=text)
    add_sampling(parser, _SAMPLING)
    add_manager_options(parser)

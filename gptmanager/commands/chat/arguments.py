"""The arguments of `gptmanager chat`."""

from __future__ import annotations

import argparse
from typing import Any

from gptmanager.terminal.arguments import (
    nonempty_text,
    path_argument,
    positive,
    text_argument,
)
from gptmanager.terminal.options import add_manager_options, add_model, add_parser
from gptmanager.terminal.sampling import add_sampling

_MOST_ANSWERS = 2  # answers that /fork generates at once
_HELP = """\
Talk to a model, which needs a chat template.

Enter sends a message. A line that ends with a backslash continues on the next one, and three
quotation marks (\"\"\") begin and end a message of several lines. Ctrl-C stops an answer, Ctrl-D
ends the chat, and /help lists the commands.

A model that thinks before it answers shows its thoughts dimmed, between the lines `thinking` and
`answer`.

If the standard input or output is not a terminal, messages and commands are read in the same way,
and the standard output has the answers only, without thoughts.
"""
_SAMPLING = """\
The defaults come from the checkpoint's generation_config.json. If it has no sampling fields, they
are temperature 0.6, top-p 0.9 and repetition penalty 1.1. With "do_sample": false the temperature
is 0.
"""
_EXAMPLES = """\
examples:
  gptmanager chat --model smollm2
  gptmanager chat --model smollm2 --system "Answer in one sentence." --temperature 0
  echo "What is the capital of France?" | gptmanager chat --model smollm2
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "chat",
        "gptmanager.commands.chat.session:converse",
        help="talk to a model",
        usage="gptmanager chat --model PATH [options]",
        description=_HELP,
        statuses=("all messages were answered", "a message was not answered"),
        epilog=_EXAMPLES,
    )
    add_model(parser, required=True)
    add = parser.add_argument
    add(
        "--system",
        type=text_argument,
        metavar="TEXT",
        help="the system prompt (default: the chat template's)",
    )
    text = "a file with the chat template (default: the checkpoint's)"
    add("--chat-template", type=path_argument, metavar="FILE", help=text)
    text = "maximum number of tokens of an answer (default %(default)s)"
    add("--max-new-tokens", type=positive, default=1024, metavar="N", help=text)
    text = "a text that ends an answer; may be repeated"
    add("--stop", type=nonempty_text, action="append", default=[], metavar="TEXT", help=text)
    add = parser.add_argument_group("thoughts").add_argument
    text = "show or hide the model's thoughts (default: show on a terminal, hide through pipes)"
    add("--thoughts", choices=("show", "hide"), help=text)
    text = "whether the model thinks, if its chat template has this choice"
    add("--enable-thinking", action=argparse.BooleanOptionalAction, help=text)
    text = "how much the model thinks, if its chat template has this choice: low, high, ..."
    add("--reasoning-effort", type=nonempty_text, metavar="LEVEL", help=text)
    add_sampling(parser, _SAMPLING)
    add_manager_options(parser)
    parser.set_defaults(max_batch_size=_MOST_ANSWERS, announces_model=True)

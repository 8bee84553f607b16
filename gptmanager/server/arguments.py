"""The arguments of `gptmanager serve`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptmanager.terminal.arguments import folder, natural, positive, seconds
from gptmanager.terminal.options import (
    add_manager_options,
    add_model,
    add_parser,
)

_HELP = """\
Serve a model over HTTP, for clients of OpenAI's API.

The endpoints are /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize,
/health and /metrics; / shows the schedule live. Ctrl-C or SIGTERM ends the server after the running
requests have finished.
"""
_EXAMPLES = """\
examples:
  gptmanager serve --model examples/tiny_llama
  gptmanager serve --model examples/tiny_llama --port 8080 --api-key secret --max-queued-requests 64

exit status: 0 ended by a signal, 1 the server failed, 2 an argument was wrong
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "serve",
        "gptmanager.server.main:main",
        help="serve a model over HTTP",
        usage="gptmanager serve --model PATH [options]",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add_model(parser, required=True)
    add = parser.add_argument
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    text = "the model's name for clients (default: the name of the folder or file)"
    add("--served-model-name", metavar="NAME", help=text)
    text = "the address to listen at (default %(default)s)"
    add("--host", default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "the port to listen at, 0: any free one (default %(default)s)"
    add("--port", type=natural, default=8000, metavar="N", help=text)
    text = "requests that run at once (default: as many as fit a batch)"
    add("--max-concurrency", help=text, **number)
    text = "requests that may wait; further ones get a 429 (default %(default)s)"
    add("--max-queued-requests", type=natural, default=1024, metavar="N", help=text)
    text = "prompt tokens of the waiting requests together (default: no limit)"
    add("--max-queued-tokens", type=natural, metavar="N", help=text)
    text = "maximum number of beams of a request (default %(default)s)"
    add("--max-beam-width", default=1, help=text, **number)
    text = "seconds after which a request is ended (default: no limit)"
    add("--request-timeout", type=seconds, metavar="S", help=text)
    text = "seconds that running requests may take after a signal (default %(default)g)"
    add("--shutdown-timeout", type=seconds, default=20.0, metavar="S", help=text)
    text = "let clients load adapters from this folder (default: they cannot load any)"
    add("--adapter-dir", type=folder, metavar="DIR", help=text)
    text = "adapters that may be loaded at once (default %(default)s)"
    add("--max-adapters", default=128, help=text, **number)
    text = "a file with the chat template (default: the checkpoint's)"
    add("--chat-template", type=Path, metavar="FILE", help=text)
    text = "allow a chat template in a request"
    add("--trust-request-chat-template", action="store_true", help=text)
    text = "format of the log: text, json (default %(default)s)"
    add("--log-format", choices=("text", "json"), default="text", metavar="NAME", help=text)
    add("--log-prompts", action="store_true", help="log the prompts and outputs, too")
    text = "format of thoughts: auto (by the chat template), none, think, harmony"
    choices = ("auto", "none", "think", "harmony")
    add("--reasoning-parser", choices=choices, default="auto", metavar="NAME", help=text)
    text = "treat names of special tokens in clients' texts as plain text"
    add("--no-special-tokens-in-text", action="store_true", help=text)
    text = "ignore unknown fields with a warning instead of a 400"
    add("--lenient", action="store_true", help=text)
    add("--triton", action="store_true", help="also serve Triton's protocol below /v2")
    text = "serve Triton's protocol over gRPC at this port; implies --triton"
    add("--grpc-port", type=natural, metavar="N", help=text)
    text = "prefix of all metric names (default %(default)s)"
    add("--metrics-prefix", default="gptmanager", metavar="NAME", help=text)
    _add_access(parser.add_argument)
    add_manager_options(parser)


def _add_access(add: Callable[..., Any]) -> None:
    """Add the options of `AccessSettings`."""
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--api-key", metavar="KEY", help="the key that clients must send (default: no key)")
    text = "a file with the key; SIGHUP reloads it"
    add("--api-key-file", type=Path, metavar="FILE", help=text)
    text = "another host name of this server, in addition to localhost; may be repeated"
    add(
        "--allowed-host",
        action="append",
        dest="allowed_hosts",
        default=[],
        metavar="NAME",
        help=text,
    )
    text = "open connections (default: three quarters of the descriptor limit)"
    add("--max-connections", help=text, **number)
    text = "open connections of one client (default: no limit)"
    add("--max-connections-per-address", help=text, **number)
    text = "proxies with a trusted X-Forwarded-For (default: those on this machine)"
    add("--forwarded-allow-ips", nargs="+", default=("127.0.0.1", "::1"), metavar="IP", help=text)
    text = "seconds that an idle connection stays open (default %(default)g)"
    add("--keep-alive-timeout", type=seconds, default=130.0, metavar="S", help=text)
    text = "seconds within which a request must arrive (default %(default)g)"
    add("--read-timeout", type=seconds, default=60.0, metavar="S", help=text)
    text = "size of a request's body (default: 4 MiB, 64 MiB where tensors are sent)"
    add("--max-body-bytes", help=text, **number)

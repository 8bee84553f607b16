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

It answers at /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /health,
/metrics, and shows its schedule, live, at /. Ctrl-C or SIGTERM ends it: running requests end first.
"""
_EXAMPLES = """\
examples:
  gptmanager serve --model examples/tiny_llama
  gptmanager serve --model examples/tiny_llama --port 8080 --api-key secret --max-queued-requests 64

exit status: 0 ended by a signal, 1 something failed, 2 the call was wrong
"""


def add_command(commands: Any) -> None:
    parser = add_parser(
        commands,
        "serve",
        "gptmanager.server.main:main",
        help="serve a model over HTTP",
        usage="gptmanager serve --model DIR [options]",
        description=_HELP,
        epilog=_EXAMPLES,
    )
    add_model(parser, required=True)
    add = parser.add_argument
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--served-model-name", metavar="NAME", help="(default: the name of the folder)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="(default %(default)s)")
    add("--port", type=natural, default=8000, metavar="N", help="0: any (default %(default)s)")
    add("--max-concurrency", help="requests that run at once (default: a batch)", **number)
    told = "requests that may wait beyond those; more get a 429 (default %(default)s)"
    add("--max-queued-requests", type=natural, default=1024, metavar="N", help=told)
    told = "of the prompts of those that wait (default: any number)"
    add("--max-queued-tokens", type=natural, metavar="N", help=told)
    told = "the most beams of a request (default %(default)s)"
    add("--max-beam-width", default=1, help=told, **number)
    told = "what runs longer is ended (default: no limit)"
    add("--request-timeout", type=seconds, metavar="S", help=told)
    told = "how long requests may go on after a signal (default %(default)g)"
    add("--shutdown-timeout", type=seconds, default=20.0, metavar="S", help=told)
    told = "clients may load adapters from below it (default: they load none)"
    add("--adapter-dir", type=folder, metavar="DIR", help=told)
    told = "adapters that may be loaded at once (default %(default)s)"
    add("--max-adapters", default=128, help=told, **number)
    add("--chat-template", type=Path, metavar="FILE", help="(default: the checkpoint's)")
    told = "a request may bring a chat template of its own"
    add("--trust-request-chat-template", action="store_true", help=told)
    told = "the name of a special token in a client's text is plain text"
    add("--no-special-tokens-in-text", action="store_true", help=told)
    add("--lenient", action="store_true", help="unknown fields are a warning, no error")
    add("--triton", action="store_true", help="serve Triton's protocol below /v2, too")
    add("--grpc-port", type=natural, metavar="N", help="the same over gRPC; implies --triton")
    told = "of the names of metrics (default %(default)s)"
    add("--metrics-prefix", default="gptmanager", metavar="NAME", help=told)
    _add_access(parser.add_argument)
    add_manager_options(parser)


def _add_access(add: Callable[..., Any]) -> None:
    """Options of `AccessSettings`."""
    number: dict[str, Any] = {"type": positive, "metavar": "N"}
    add("--api-key", metavar="KEY", help="what clients must bring (default: nothing)")
    told = "a file with the key, which SIGHUP reloads"
    add("--api-key-file", type=Path, metavar="FILE", help=told)
    told = "a name that clients may call this server by, besides localhost; may be repeated"
    add(
        "--allowed-host",
        action="append",
        dest="allowed_hosts",
        default=[],
        metavar="NAME",
        help=told,
    )
    told = "connections at once (default: three quarters of the descriptors)"
    add("--max-connections", help=told, **number)
    told = "of one client (default: any number)"
    add("--max-connections-per-address", help=told, **number)
    told = "proxies whose X-Forwarded-For names the client (default: those of this machine)"
    add("--forwarded-allow-ips", nargs="+", default=("127.0.0.1", "::1"), metavar="IP", help=told)
    told = "how long an idle connection stays open (default %(default)g)"
    add("--keep-alive-timeout", type=seconds, default=130.0, metavar="S", help=told)
    told = "in which a request must have arrived (default %(default)g)"
    add("--read-timeout", type=seconds, default=60.0, metavar="S", help=told)
    told = "of a request (default: 4 MiB, 64 MiB where tensors are sent)"
    add("--max-body-bytes", help=told, **number)

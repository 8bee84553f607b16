"""`gptmanager serve` on the command line. What needs the extra is loaded when it is started."""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path
from typing import Any

import torch

from gptmanager.run.follow import follow, is_follower
from gptmanager.server.extras import load_extra
from gptmanager.server.settings import ServerSettings
from gptmanager.terminal.arguments import folder, natural, positive, seconds
from gptmanager.terminal.options import (
    add_manager_options,
    add_model,
    add_parser,
    manager_options,
)
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.streams import tell

_FEW_CORES = 4
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
        _serve,
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
    add("--api-key", metavar="KEY", help="what clients must bring (default: nothing)")
    add("--max-concurrency", help="requests that run at once (default: a batch)", **number)
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
    told = "requests that may wait beyond those; more get a 429 (default %(default)s)"
    add("--max-queued-requests", type=natural, default=1024, metavar="N", help=told)
    told = "of the prompts of those that wait (default: any number)"
    add("--max-queued-tokens", type=natural, metavar="N", help=told)
    told = "of a request (default %(default)s)"
    add("--max-body-bytes", default=32 << 20, help=told, **number)
    told = "the most beams of a request (default %(default)s)"
    add("--max-beam-width", default=1, help=told, **number)
    told = "what runs longer is ended (default: no limit)"
    add("--request-timeout", type=seconds, metavar="S", help=told)
    told = "how long requests may go on after a signal (default %(default)g)"
    add("--shutdown-timeout", type=seconds, default=20.0, metavar="S", help=told)
    told = "clients may load adapters from below it (default: they load none)"
    add("--adapter-dir", type=folder, metavar="DIR", help=told)
    add("--chat-template", type=Path, metavar="FILE", help="(default: the checkpoint's)")
    told = "a request may bring a chat template of its own"
    add("--trust-request-chat-template", action="store_true", help=told)
    add("--lenient", action="store_true", help="unknown fields are a warning, no error")
    add("--triton", action="store_true", help="serve Triton's protocol below /v2, too")
    add("--grpc-port", type=natural, metavar="N", help="the same over gRPC; implies --triton")
    told = "of the names of metrics (default %(default)s)"
    add("--metrics-prefix", default="gptmanager", metavar="NAME", help=told)
    add_manager_options(parser)


def leave_a_core() -> None:
    """Of few cores, one is left to the event loop and to the clients on this machine: each product
    waits for its slowest thread, so that one busy core would hold up all. Without effect where the
    environment says how many threads compute, and where torch leaves a core itself.
    """
    cores, is_told = num_cores(), "OMP_NUM_THREADS" in os.environ
    if not is_told and cores <= min(torch.get_num_threads(), _FEW_CORES):
        torch.set_num_threads(max(cores - 1, 1))


def num_cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _serve(options: argparse.Namespace) -> int:
    if options.threads is None:
        leave_a_core()
    given = manager_options(options)
    names = ServerSettings.__dataclass_fields__.keys() - {"manager"}
    settings = ServerSettings(manager=given, **{name: getattr(options, name) for name in names})
    if is_follower(given.params):
        for number in (signal.SIGINT, signal.SIGTERM):  # rank 0 decides when all end
            signal.signal(number, signal.SIG_IGN)
        model = settings.model, settings.params, given.scheduler, given.model_type
        follow(*model, settings.max_beam_width)
        return 0
    given.params.on_progress = ProgressBars(options.region).tell
    load_extra("server", "gptmanager.server.serving").serve(settings, tell)
    return 0

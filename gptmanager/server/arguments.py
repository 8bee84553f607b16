"""The arguments of `gptmanager serve`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from gptmanager.terminal.arguments import (
    folder,
    journal_sync,
    named_checkpoint,
    named_folder,
    natural,
    nonempty_text,
    path_argument,
    positive,
    seconds,
    writable,
)
from gptmanager.terminal.option_sources import Repeated
from gptmanager.terminal.options import (
    add_manager_options,
    add_model,
    add_parser,
)

_Add = Callable[..., Any]
_NUMBER: dict[str, Any] = {"type": positive, "metavar": "N"}
_HELP = """\
Serve a model over HTTP, for clients of OpenAI's and Anthropic's APIs.

The endpoints are /v1/completions, /v1/chat/completions, /v1/responses, /v1/messages, /v1/models,
/tokenize, /detokenize, /health and /metrics; / shows the schedule live. Ctrl-C or SIGTERM ends the
server after the running requests have finished.
"""
_EXAMPLES = """\
examples:
  gptmanager serve --model examples/tiny_llama
  gptmanager serve --model examples/tiny_llama --port 8080 --api-key secret --max-queued-requests 64
  gptmanager serve --config server.toml

Every option is also a key of the --config FILE, and an environment variable: --max-adapters 64 is
`max-adapters = 64` in the file, and GPTMANAGER_SERVE_MAX_ADAPTERS=64 in the environment. The
command line has precedence, then the environment, then the file.
"""

# The formats are listed here, so that `gptmanager --help` needs no import of their parsers.
_THOUGHTS = (
    *("auto", "none", "think", "mistral", "seed_oss", "cohere", "gemma4", "harmony", "apertus"),
    *("solar_open", "hy3"),
)
_CALLS = (
    *("auto", "hermes", "llama3", "mistral", "qwen3_coder", "deepseek", "pythonic", "harmony"),
    *("gemma4", "glm45", "minimax_m2", "seed_oss", "cohere", "json_list", "olmo3", "lfm2"),
    *("deepseek_v32", "kimi_k2", "apertus", "functionary", "minicpm5", "solar_open", "hy3"),
    "functiongemma",
)


def add_command(commands: Any) -> None:
    """Add `serve` to the sub-parsers `commands`."""
    parser = add_parser(
        commands,
        "serve",
        "gptmanager.server.main:main",
        help="serve a model over HTTP",
        usage="gptmanager serve --model PATH [options]",
        description=_HELP,
        statuses=("ended by a signal", "the server failed"),
        ended="130  ended by a second signal",
        epilog=_EXAMPLES,
        variables="GPTMANAGER_SERVE_",
    )
    text = "a TOML file with options, such as `port = 8080`"
    parser.add_argument("--config", metavar="FILE", help=text)
    add_model(parser, required=True, read=named_checkpoint)
    for title, add_options in _GROUPS.items():
        add_options(parser.add_argument_group(title).add_argument)
    add_manager_options(parser, "8192; on a CPU 2560, with long contexts in chunks")


def _add_model_options(add: _Add) -> None:
    text = "the model's names for clients (default: of --model, if it is a name, and of its files)"
    add("--served-model-name", nargs="+", metavar="NAME", help=text)
    text = "load this adapter at the start under a name; may be repeated"
    add(
        "--adapter",
        type=named_folder,
        action=Repeated,
        dest="adapters",
        default=(),
        metavar="NAME=DIR",
        help=text,
    )
    text = "let clients load adapters from this folder (default: they cannot load any)"
    add("--adapter-dir", type=folder, metavar="DIR", help=text)
    text = "adapters that may be loaded at once (default %(default)s)"
    add("--max-adapters", default=128, help=text, **_NUMBER)
    text = "maximum number of beams of a request (default %(default)s)"
    add("--max-beam-width", default=1, help=text, **_NUMBER)
    text = "draft up to N tokens of a request in a step, by prompt lookup (default: no drafts)"
    add("--prompt-lookup", help=text, **_NUMBER)
    text = "compute a common beginning of prompts once (default: on; off with --batching v1)"
    add("--block-reuse", action=argparse.BooleanOptionalAction, help=text)
    text = "bytes of CPU memory for blocks that the KV cache evicts (default 0)"
    add("--host-tier-bytes", type=natural, metavar="N", help=text)


def _add_listening(add: _Add) -> None:
    text = "the address to listen at (default %(default)s)"
    add("--host", type=nonempty_text, default="127.0.0.1", metavar="ADDRESS", help=text)
    text = "the port to listen at; 0: any free port (default %(default)s)"
    add("--port", type=natural, default=8000, metavar="N", help=text)
    text = "a Unix socket to listen at, instead of --host and --port"
    add("--uds", type=path_argument, metavar="PATH", help=text)
    text = "the path below which a proxy serves this server, such as /llm"
    add("--root-path", default="", metavar="PATH", help=text)
    add(
        "--tls-cert",
        type=path_argument,
        metavar="FILE",
        help="serve HTTPS with this certificate chain",
    )
    add("--tls-key", type=path_argument, metavar="FILE", help="the private key of --tls-cert")
    add("--triton", action="store_true", help="also serve Triton's protocol below /v2")
    text = "serve Triton's protocol over gRPC at this port; implies --triton"
    add("--grpc-port", type=natural, metavar="N", help=text)


def _add_access(add: _Add) -> None:
    add("--api-key", metavar="KEY", help="the key that clients must send (default: no key)")
    text = "a file with a key, or with lines of NAME KEY [MAX_REQUESTS]; SIGHUP reloads it"
    add("--api-key-file", type=path_argument, metavar="FILE", help=text)
    text = "another host name of this server, in addition to localhost; may be repeated"
    repeated: dict[str, Any] = {"action": Repeated, "default": ()}
    add("--allowed-host", dest="allowed_hosts", metavar="NAME", help=text, **repeated)
    text = "let web pages of this origin (*: of any origin) call the server; may be repeated"
    add("--cors-origin", dest="cors_origins", metavar="ORIGIN", help=text, **repeated)
    text = "proxies with a trusted X-Forwarded-For (default: proxies on this machine)"
    add("--forwarded-allow-ips", nargs="+", default=("127.0.0.1", "::1"), metavar="IP", help=text)


def _add_limits(add: _Add) -> None:
    text = "requests that run at once (default: as many as fit a batch, or two with --overlap)"
    add("--max-concurrency", help=text, **_NUMBER)
    text = "requests that may wait; further ones get a 429 (default %(default)s)"
    add("--max-queued-requests", type=natural, default=1024, metavar="N", help=text)
    text = "prompt tokens that all waiting requests together may have (default: no limit)"
    add("--max-queued-tokens", type=natural, metavar="N", help=text)
    text = "seconds after which a request is ended (default: no limit)"
    add("--request-timeout", type=seconds, metavar="S", help=text)
    text = "seconds that running requests may take after a signal (default %(default)g)"
    add("--shutdown-timeout", type=seconds, default=20.0, metavar="S", help=text)
    text = "connections that may be open (default: three quarters of the descriptor limit)"
    add("--max-connections", help=text, **_NUMBER)
    text = "connections that one client address may have open (default: no limit)"
    add("--max-connections-per-address", help=text, **_NUMBER)
    text = "seconds that an idle connection stays open (default %(default)g)"
    add("--keep-alive-timeout", type=seconds, default=130.0, metavar="S", help=text)
    text = "seconds within which a request must arrive (default %(default)g)"
    add("--read-timeout", type=seconds, default=60.0, metavar="S", help=text)
    text = "bytes that a request's body may have (default: 4 MiB, or 64 MiB with tensors)"
    add("--max-body-bytes", help=text, **_NUMBER)


def _add_requests(add: _Add) -> None:
    text = "a file with the chat template (default: the checkpoint's)"
    add("--chat-template", type=path_argument, metavar="FILE", help=text)
    text = "allow a chat template in a request"
    add("--trust-request-chat-template", action="store_true", help=text)
    text = f"format of thoughts: {', '.join(_THOUGHTS)} (default auto: by the chat template)"
    add("--reasoning-parser", choices=_THOUGHTS, default="auto", metavar="NAME", help=text)
    text = f"format of tool calls: {', '.join(_CALLS)} (default auto: by the chat template)"
    add("--tool-call-parser", choices=_CALLS, default="auto", metavar="NAME", help=text)
    add("--no-store", action="store_true", help="do not store responses for later requests")
    text = "treat names of special tokens in clients' texts as plain text"
    add("--no-special-tokens-in-text", action="store_true", help=text)
    text = "ignore unknown fields with a warning instead of a 400"
    add("--lenient", action="store_true", help=text)
    text = "lower max_tokens to what fits into the context, with a warning instead of a 400"
    add("--clamp-max-tokens", action="store_true", help=text)
    text = "send a comment every S seconds in a stream until its first token (default: none)"
    add("--sse-keep-alive", type=seconds, metavar="S", help=text)


def _add_observation(add: _Add) -> None:
    text = "format of the log: text, json (default %(default)s)"
    add("--log-format", choices=("text", "json"), default="text", metavar="NAME", help=text)
    add("--log-prompts", action="store_true", help="log the prompts and outputs, too")
    text = "prefix of the names of the manager's metrics (default %(default)s)"
    add("--metrics-prefix", default="gptmanager", metavar="NAME", help=text)
    text = "write a recording of the whole run, for `gptmanager replay` and `picture`"
    add("--record", type=writable, metavar="FILE", help=text)


def _add_journal(add: _Add) -> None:
    text = "keep a journal in this folder, so that a restarted server continues unfinished requests"
    add("--journal", type=path_argument, metavar="FOLDER", help=text)
    text = (
        "when journal records reach the disk: always, never, or milliseconds (default %(default)s)"
    )
    add("--journal-sync", type=journal_sync, default=20, metavar="WHEN", help=text)
    text = (
        "while the journal's disk is full: refuse new requests, or continue without a journal "
        "(default %(default)s)"
    )
    choices = ("refuse", "continue")
    add("--journal-on-full", choices=choices, default="refuse", metavar="NAME", help=text)


_GROUPS: dict[str, Callable[[_Add], None]] = {
    "the model": _add_model_options,
    "where the server listens": _add_listening,
    "access": _add_access,
    "limits": _add_limits,
    "requests and answers": _add_requests,
    "crash safety": _add_journal,
    "log, metrics, recording": _add_observation,
}

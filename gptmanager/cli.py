"""The command line: `gptmanager COMMAND`, also as `python -m gptmanager`.

This module lists the commands, and maps errors and signals to exit statuses. A command's code is
imported after its arguments are parsed, so `--help` and `--version` do not load torch.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from gptmanager import __version__
from gptmanager.bench.arguments import add_command as add_bench
from gptmanager.bench.environment_arguments import add_command as add_env
from gptmanager.commands.chat.arguments import add_command as add_chat
from gptmanager.commands.checkpoints.convert_arguments import add_command as add_convert
from gptmanager.commands.checkpoints.models_arguments import add_command as add_models
from gptmanager.commands.run.arguments import add_command as add_run
from gptmanager.environment.lazy_names import named
from gptmanager.errors import ConfigError, GptManagerError, RecordingError
from gptmanager.journal.arguments import add_command as add_journal
from gptmanager.picture.arguments import add_command as add_picture
from gptmanager.replay.arguments import add_command as add_replay
from gptmanager.server.arguments import add_command as add_serve
from gptmanager.simulator.arguments import add_command as add_simulate
from gptmanager.terminal.option_names import in_options, with_origin
from gptmanager.terminal.parser import Parser
from gptmanager.terminal.printable import printable
from gptmanager.terminal.redrawn_lines import RedrawnLines
from gptmanager.terminal.signals import end_message, handled, leave_server, raising_signals
from gptmanager.terminal.streams import (
    flush_streams,
    prepare_streams,
    print_message,
)

_HELP = """\
Run GPT-style models behind four callbacks: in-flight batching over a paged KV cache.
"""
_EXAMPLES = """\
examples:
  gptmanager chat --model smollm2
  gptmanager run --model examples/tiny_llama --requests examples/requests.jsonl
  gptmanager bench --num-requests 16 --peer transformers

`gptmanager COMMAND --help` lists the options of a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0: success, 1: failure, 2: invalid arguments, configuration or recording; 130, 143 and 129:
    ended by Ctrl-C, SIGTERM and SIGHUP. Raise SystemExit after printing help, or an error in the
    arguments.
    """
    prepare_streams()
    is_server = (sys.argv[1:] if arguments is None else arguments)[:1] == ["serve"]
    try:
        with handled(leave_server) if is_server else contextlib.nullcontext():
            code = _call(arguments, is_server=is_server)
    except SystemExit as exit_:  # argparse has printed the error or the help
        exit_.code = flush_streams(exit_.code if isinstance(exit_.code, int) else 2)
        raise
    except BrokenPipeError:  # the reader has closed the pipe: printing is impossible
        code = 1
    except (GptManagerError, OSError) as error:  # raised by the check of an argument or by the help
        print_message(str(error))
        code = 1
    if is_server and arguments is None:  # a signal during Python's exit would show a traceback
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    return flush_streams(code)


def _imported(command: str, *, is_program: bool) -> Callable[[Any], int]:
    """Import and return the function of a command, without garbage collection.

    Imports create hundreds of thousands of objects and no garbage, and take a fifth less time
    without garbage collection. With `is_program`, later collections skip these objects.
    """
    try:
        os.getcwd()
    except OSError as error:  # torch's libraries would end the process
        raise ConfigError(
            f"the current folder cannot be used: {error.strerror}; change to another one (cd)"
        ) from error
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        function: Callable[[Any], int] = named(command)
        if is_program:
            gc.freeze()
        return function
    except (ImportError, OSError, MemoryError, SystemError) as error:  # OSError: of llvmlite
        logging.info("The error of the import:", exc_info=error)
        why = str(error) or "out of memory"
        raise GptManagerError(
            f"{command.partition(':')[0]} cannot be imported: {why}; check the installation, and "
            "the memory limit of this process (ulimit -v)"
        ) from error
    finally:
        if was_enabled:
            gc.enable()


def _call(arguments: Sequence[str] | None, *, is_server: bool) -> int:
    parser = command_parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:  # argparse itself would show the usage of all commands
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    options.region = RedrawnLines(sys.stderr)
    _start_log(options.region, options.verbose)
    arrived: list[int] = []
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(options.region.clear)  # before an error is printed
            if options.announces_model and options.region.can_draw:  # the import takes a second
                options.region.draw(printable(f"loading {options.model.name}"))
            command = _imported(options.command, is_program=arguments is None)
            if options.threads is not None:  # the command has already imported torch
                importlib.import_module("torch").set_num_threads(options.threads)
            if not is_server:  # a server handles signals itself
                arrived = stack.enter_context(raising_signals())
            code: int = command(options)
        return code
    except BrokenPipeError:
        raise
    except ConfigError as error:
        _log_cause(error)
        text = in_options(str(error), options.parser.actions)
        print_message(with_origin(text, options.origins))
        return 2
    except (GptManagerError, OSError, MemoryError) as error:
        _log_cause(error)
        print_message(str(error) or "out of memory")
        return 2 if isinstance(error, RecordingError) else 1
    except RuntimeError as error:
        if "can't start new thread" not in str(error):
            raise
        logging.info("The error of the thread:", exc_info=error)
        print_message("a thread cannot be started: raise a limit of this process (ulimit -u -v -d)")
        return 1
    except KeyboardInterrupt:
        number = arrived[0] if arrived else signal.SIGINT
        print_message(end_message(number))
        return 128 + number


def command_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line, with a sub-parser for each command."""
    parser = Parser(
        prog="gptmanager",
        description=_HELP,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gptmanager {__version__}")
    parser.set_defaults(command=None, parser=parser, json=False, threads=None, verbose=False)
    parser.set_defaults(announces_model=False, origins={})
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    running = add_chat, add_run, add_serve, add_models, add_convert
    reports = add_replay, add_simulate, add_picture, add_env, add_journal
    for add in (*running, add_bench, *reports):
        add(commands)
    return parser


def _log_cause(error: BaseException) -> None:
    """With `--verbose`, show where the cause of an error was raised, such as in a scheduler."""
    if error.__cause__ is not None:
        logging.info("The cause of the error:", exc_info=error.__cause__)


def _start_log(region: RedrawnLines, is_verbose: bool) -> None:
    handler = logging.StreamHandler(region)
    if not is_verbose:  # commands show the error of a rejected request themselves
        handler.addFilter(lambda record: not record.msg.startswith("Cannot process new request"))
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO if is_verbose else logging.WARNING, handlers=[handler])

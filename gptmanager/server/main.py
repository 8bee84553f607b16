"""Runs `gptmanager serve` with parsed arguments.

The modules that need the extra `server` are imported only when a server starts.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace

import torch

from gptmanager.commands.follow import follow, is_follower
from gptmanager.config import CapacitySchedulerPolicy, ModelType
from gptmanager.environment.machine.cores import num_cores
from gptmanager.server.extras import load_extra
from gptmanager.server.log_output import logging_to
from gptmanager.server.settings import ServerSettings
from gptmanager.terminal.options import ManagerOptions, manager_options
from gptmanager.terminal.progress import NOTES, ProgressBars
from gptmanager.terminal.redrawn_lines import RedrawnLines
from gptmanager.terminal.streams import print_message

_FEW_CORES = 4
_CPU_STEP_TOKENS = 2560
_logger = logging.getLogger(__name__)


def leave_a_core() -> int:
    """On a machine with few cores, leave one core to the event loop and to local clients.

    Each matmul waits for its slowest thread, so one busy core would delay all threads. This has no
    effect if OMP_NUM_THREADS is set, or if torch already uses fewer threads than there are cores.
    Returns the number of cores if one of them is left free, otherwise 0.
    """
    cores, is_set = num_cores(), "OMP_NUM_THREADS" in os.environ
    if is_set or not 1 < cores <= min(torch.get_num_threads(), _FEW_CORES):
        return 0
    torch.set_num_threads(cores - 1)
    return cores


def server_settings(options: argparse.Namespace) -> ServerSettings:
    """Return the checked settings of parsed options. Raises ConfigError."""
    names = ServerSettings.__dataclass_fields__.keys() - {"manager", "model", "model_name"}
    given = {name: getattr(options, name) for name in names}
    given["model_name"], given["model"] = options.model
    manager = manager_options(options)
    if options.max_num_tokens is None:
        manager = with_short_steps(manager)
    return ServerSettings(manager=manager, **given)


def with_short_steps(given: ManagerOptions) -> ManagerOptions:
    """Return the options of a server with steps that are short enough for a CPU.

    A step of 8,192 prompt tokens takes a CPU many seconds, and all clients wait for it. Contexts
    that do not fit the shorter step run in chunks. If contexts cannot run in chunks, or if the
    device is not a CPU, `given` is returned unchanged.
    """
    params, policy = given.params, given.scheduler.capacity_scheduler_policy
    is_static = policy is CapacitySchedulerPolicy.STATIC_BATCH or given.model_type is ModelType.V1
    if is_static or params.device not in (None, "cpu"):
        return given
    num_tokens = max(_CPU_STEP_TOKENS, params.kv_cache_config.tokens_per_block)
    params = replace(params, max_num_tokens=num_tokens, enable_chunked_context=True)
    return given._replace(params=params)


def progress_reports(region: RedrawnLines) -> Callable[[str, int, int], None]:
    """Return an `on_progress` that draws bars on a terminal, and writes `NOTES` to the log."""
    bars = ProgressBars(region)

    def report(what: str, done: int, total: int) -> None:
        if what in NOTES and done == 0 < total:
            _logger.info(NOTES[what])
        bars.update(what, done, total)

    return report


def main(options: argparse.Namespace) -> int:
    """Run the server until it ends, and return the exit status."""
    cores = leave_a_core() if options.threads is None else 0
    settings = server_settings(options)
    given = settings.manager
    if is_follower(given.params):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # rank 0 ends all ranks
            signal.signal(number, signal.SIG_IGN)
        model = settings.model, settings.params, given.scheduler, given.model_type
        follow(*model, settings.max_beam_width)
        return 0
    given.params.on_progress = progress_reports(options.region)
    serving = load_extra("server", "gptmanager.server.serving")
    with logging_to(options.region, settings.log_format):
        if cores and given.params.device in (None, "cpu"):
            _logger.info(
                "computation uses %d of %d cores and leaves one to the event loop and to clients; "
                "if nothing else runs on this machine, --threads %d is up to twice as fast",
                *(cores - 1, cores, cores),
            )
        for name in options.unknown_variables:
            _logger.warning("the environment variable %s names no option of serve", name)
        is_json = settings.log_format == "json"  # then each line is JSON, the welcome included
        serving.serve(settings, _logger.info if is_json else print_message)
    return 0

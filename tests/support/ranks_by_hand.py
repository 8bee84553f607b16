"""One process a rank, started by hand: a launcher would end the others when one fails."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import IO


def free_port() -> int:
    """A port below those that Linux gives to whoever asks for any, such as a test elsewhere."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


@contextlib.contextmanager
def started_ranks(
    command: Sequence[str],
    size: int,
    address: str = "127.0.0.1",
    stdin: IO[str] | None = None,
    **others: str,
) -> Iterator[list[subprocess.Popen[str]]]:
    """`python *command` of each rank, with the environment that torchrun would set.

    `stdin`: the standard input of all of them, as under torchrun. They end with the block.
    """
    world = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with contextlib.ExitStack() as stack:
        ranks = []
        for number in range(size):
            rank = subprocess.Popen(
                [sys.executable, *command],
                env={**os.environ, **threads, **world, **others, "RANK": str(number)},
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            ranks.append(stack.enter_context(rank))  # it waits, after the kill
            stack.callback(rank.kill)
        yield ranks


def outputs(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 120.0) -> list[str]:
    """What each has printed, when all have ended well."""
    told = [rank.communicate(timeout=timeout_s) for rank in ranks]
    for rank, (_, errors) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, errors
    return [output for output, _ in told]

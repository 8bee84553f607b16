"""One process a rank, started by hand: a launcher would end the others when one fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import IO


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def start_ranks(
    command: Sequence[str],
    size: int,
    address: str = "127.0.0.1",
    stdin: IO[str] | None = None,
    **others: str,
) -> list[subprocess.Popen[str]]:
    """`python *command` of each rank, with the environment that torchrun would set.

    `stdin`: the standard input of all of them, as under torchrun.
    """
    world = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, **threads, **world, **others, "RANK": str(rank)},
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]


def outputs(ranks: Sequence[subprocess.Popen[str]], timeout_s: float = 120.0) -> list[str]:
    """What each has printed, when all have ended well."""
    try:
        told = [rank.communicate(timeout=timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, told, strict=True):
        assert rank.returncode == 0, errors
    return [output for output, _ in told]

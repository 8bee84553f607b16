"""Ranks as forks of one process, which spares each the import of torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from ranks_by_hand import free_port


class Child(NamedTuple):
    pid: int
    told: int  # the end of its pipe that is read


def fork_ranks(size: int, be_rank: Callable[[int, int], object]) -> list[Child]:
    """Start `size` processes, each of which calls `be_rank(rank, writing)` and exits."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ["WORLD_SIZE"] = str(size)
    children = []
    for rank in range(size):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            be_rank(rank, writing)
            sys.exit(0)  # any program ends so
        os.close(writing)
        children.append(Child(pid, reading))
    return children

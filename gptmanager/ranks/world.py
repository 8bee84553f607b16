"""`World`: the rank of this process, the number of ranks, and the address of rank 0.

These values come from environment variables that torchrun and other launchers set, or from an
existing process group.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed

from gptmanager.config import ParallelConfig
from gptmanager.errors import ConfigError, RankError
from gptmanager.ranks.layout import RankLayout

dist: Any = torch.distributed  # its type stubs are incomplete

BOOT_S = 60.0  # the least time that ranks wait for each other at the start

# the variables of launchers: torchrun and similar, Open MPI, MPICH and similar
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NEEDED = ("MASTER_ADDR", "MASTER_PORT")
_stores: dict[tuple[Any, ...], Any] = {}  # by process, rank and address


class World(NamedTuple):
    """The layout of all ranks. `group`: a process group that exists already, or None."""

    layout: RankLayout
    host: str = ""  # the host of rank 0; "": unknown
    group: Any = None

    def store(self, timeout_s: float) -> Any:
        """Return a new `torch.distributed.Store`, which is shared by one manager of each rank.

        The n-th call on one rank returns the store of the n-th call on every other rank. Raise
        RankError if rank 0 cannot be reached.
        """
        rank = self.layout.rank
        try:
            if self.group is not None:
                store = dist.distributed_c10d._get_default_store()
            else:
                store = self._rendezvous(timedelta(seconds=timeout_s))
            number = store.add(f"gptmanager/managers-of-{rank}", 1)
        except (RuntimeError, ValueError, OSError) as error:
            raise RankError(
                f"rank {rank} cannot reach the store at {self.host}: {error}"
            ) from error
        return dist.PrefixStore(f"gptmanager/{number}", store)

    def _rendezvous(self, timeout: timedelta) -> Any:
        """Return the store of the launcher or of rank 0's process.

        The store is kept until the process ends, because it counts the managers.
        """
        where = os.getpid(), self.layout.rank, *map(os.environ.get, _NEEDED)
        if where not in _stores:
            rank, size = self.layout.rank, self.layout.size
            found = dist.rendezvous("env://", rank, size, timeout=timeout)
            _stores[where], _, _ = next(iter(found))
        _stores[where].set_timeout(timeout)
        return _stores[where]


def find_world(config: ParallelConfig | None, environment: Mapping[str, str] = os.environ) -> World:
    """Return the world that `config` describes, or a world of one rank if `config` is None.

    If an environment variable is missing or wrong, raise ConfigError, which names the variable.
    """
    if config is None:
        return World(RankLayout())
    parts, stages = config.tensor_parallel_size, config.pipeline_parallel_size
    if dist.is_available() and dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        _check_size(parts, stages, size, "the process group")
        host = environment.get("MASTER_ADDR", "")
        return World(RankLayout(rank, parts, stages), host, dist.group.WORLD)
    if parts * stages == 1 and not any(name in environment for name in _SIZE):
        return World(RankLayout())
    (of_rank, rank), (of_size, size) = _number(_RANK, environment), _number(_SIZE, environment)
    _check_size(parts, stages, size, of_size)
    if not 0 <= rank < size:
        raise ConfigError(f"{of_rank} = {rank} must be from 0 to {size - 1}: {of_size} is {size}")
    if size > 1:
        for name in _NEEDED:
            if not environment.get(name):
                raise ConfigError(
                    f"{name} is not set, but ranks need it to find each other; torchrun sets it"
                )
    return World(RankLayout(rank, parts, stages), environment.get("MASTER_ADDR", ""))


def launched_size() -> int:
    """Return the number of processes that a launcher has started, or 1 without a launcher."""
    given = next((os.environ[name] for name in _SIZE if name in os.environ), "")
    return int(given) if given.isdecimal() else 1


def find_all(environment: Mapping[str, str] = os.environ) -> World:
    """Return the world of all launched ranks. Raise ConfigError as in `find_world`."""
    has_group = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if has_group else _number(_SIZE, environment)[1]
    return find_world(ParallelConfig(tensor_parallel_size=size), environment)


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> tuple[str, int]:
    """Return the name and value of the first environment variable in `names` that is set."""
    for name in names:
        if name in environment:
            try:
                return name, int(environment[name])
            except ValueError:
                raise ConfigError(f"{name} must be an integer, got {environment[name]!r}") from None
    raise ConfigError(
        f"{names[0]} is not set: start one process per rank with torchrun, or set RANK, "
        "WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    )


def _check_size(parts: int, stages: int, size: int, where: str) -> None:
    if parts * stages != size:
        raise ConfigError(
            f"ParallelConfig.tensor_parallel_size = {parts} x pipeline_parallel_size = {stages} "
            f"need {parts * stages} ranks, but {where} has {size}"
        )

"""`World`: which rank this process is, and where it finds the others.

As torchrun and its like say it in the environment, or a process group that is there already.
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

dist: Any = torch.distributed  # its stubs lack half of it

BOOT_S = 60.0  # at least so long ranks wait for each other at the start

# what launchers call them: torchrun and its like, Open MPI, MPICH and its like
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_NEEDED = ("MASTER_ADDR", "MASTER_PORT")
_stores: dict[tuple[Any, ...], Any] = {}  # by process, rank, and where it is


class World(NamedTuple):
    """`group`: the process group that was there already; None: there was none."""

    layout: RankLayout
    host: str = ""  # of rank 0; "": not known
    group: Any = None

    def store(self, timeout_s: float) -> Any:
        """A `torch.distributed.Store` for one manager of each rank: their first ones have the same,
        and so on. RankError when no other rank can be reached.
        """
        rank = self.layout.rank
        try:
            if self.group is not None:
                store = dist.distributed_c10d._get_default_store()
            else:
                store = self._rendezvous(timedelta(seconds=timeout_s))
            number = store.add(f"gptmanager/managers-of-{rank}", 1)
        except (RuntimeError, ValueError, OSError) as error:
            raise RankError(f"rank {rank} finds no other rank at {self.host}: {error}") from error
        return dist.PrefixStore(f"gptmanager/{number}", store)

    def _rendezvous(self, timeout: timedelta) -> Any:
        """The store that the launcher has, or rank 0's process. That one counts managers as long as
        it lives: so it does until the process ends.
        """
        where = os.getpid(), self.layout.rank, *map(os.environ.get, _NEEDED)
        if where not in _stores:
            rank, size = self.layout.rank, self.layout.size
            found = dist.rendezvous("env://", rank, size, timeout=timeout)
            _stores[where], _, _ = next(iter(found))
        _stores[where].set_timeout(timeout)
        return _stores[where]


def find_world(config: ParallelConfig | None, environment: Mapping[str, str] = os.environ) -> World:
    """None: one rank, whatever the environment says. ConfigError, which names the variable, where
    ranks are asked for and the environment does not tell them apart.
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
    rank, size = _number(_RANK, environment), _number(_SIZE, environment)
    _check_size(parts, stages, size, "WORLD_SIZE")
    if not 0 <= rank < size:
        raise ConfigError(f"RANK = {rank} is none of the {size} ranks of WORLD_SIZE")
    if size > 1:
        for name in _NEEDED:
            if not environment.get(name):
                raise ConfigError(
                    f"{name} is not set: ranks find each other by it, as torchrun does"
                )
    return World(RankLayout(rank, parts, stages), environment.get("MASTER_ADDR", ""))


def launched_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a launcher says that it has started; 1: it says nothing."""
    told = next((environment[name] for name in _SIZE if name in environment), "")
    return int(told) if told.isdecimal() else 1


def find_all(environment: Mapping[str, str] = os.environ) -> World:
    """All ranks that there are, however they are to share a model. ConfigError as `find_world`."""
    is_there = dist.is_available() and dist.is_initialized()
    size = dist.get_world_size() if is_there else _number(_SIZE, environment)
    return find_world(ParallelConfig(tensor_parallel_size=size), environment)


def _number(names: tuple[str, ...], environment: Mapping[str, str]) -> int:
    for name in names:
        if name in environment:
            try:
                return int(environment[name])
            except ValueError:
                raise ConfigError(f"{name} = {environment[name]!r} is no integer") from None
    raise ConfigError(
        f"{names[0]} is not set: start one process a rank with torchrun, or set RANK, WORLD_SIZE, "
        "MASTER_ADDR and MASTER_PORT"
    )


def _check_size(parts: int, stages: int, size: int, where: str) -> None:
    if parts * stages != size:
        raise ConfigError(
            f"ParallelConfig.tensor_parallel_size = {parts} x pipeline_parallel_size = {stages} "
            f"are {parts * stages} ranks, {where} has {size}"
        )


def new_group(
    store: Any, name: str, rank: int, size: int, timeout_s: float, backend: str, address: str
) -> Any:
    """A process group of its own, of `size` ranks of which this one is number `rank`.

    `backend`: "gloo" or "nccl". `address`: where the others can reach this rank; gloo would take
    that of the host's name, which may be known on this machine alone. GLOO_SOCKET_IFNAME and
    NCCL_SOCKET_IFNAME name an interface instead.
    """
    own, timeout = dist.PrefixStore(name, store), timedelta(seconds=timeout_s)
    if backend == "gloo":
        if "GLOO_SOCKET_IFNAME" in os.environ:
            return dist.ProcessGroupGloo(own, rank, size, timeout)
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        return dist.ProcessGroupGloo(own, rank, size, options)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(own, rank, size, options)

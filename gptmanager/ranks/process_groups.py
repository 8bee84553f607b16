"""`ProcessGroups`: torch's process groups, with which the collectives of a rank are made."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, TimeoutError
from datetime import timedelta
from typing import Any

import torch.distributed

from gptmanager.config import OptionalParams
from gptmanager.ranks.collectives import Collectives, GroupCollectives
from gptmanager.ranks.links import Links
from gptmanager.ranks.small_tensors import connect_parts
from gptmanager.ranks.world import World

dist: Any = torch.distributed  # its type stubs are incomplete

# process groups time out this many seconds after links: the error of links names the failed rank
GROUP_GRACE_S = 5.0


class ProcessGroups:
    """A maker of torch process groups that are independent of the program's own groups."""

    def __init__(self, store: Any, links: Links, timeout_s: float, backend: str) -> None:
        self._store, self._links = store, links
        self._made: list[Any] = []
        self._timeout_s, self._backend = timeout_s, backend

    def collectives(self, world: World, params: OptionalParams) -> Collectives:
        """Join the groups of this rank, and return its collectives."""
        layout, config = world.layout, params.parallel_config
        assert config is not None
        stage, part, parts = layout.stage, layout.part, layout.tensor_parallel_size
        # joined in the order of stages, so that ranks cannot wait for each other in a cycle
        previous = None if stage == 0 else self._new(f"to-{stage}-{part}", 1, 2)
        following = None if layout.is_last_stage else self._new(f"to-{stage + 1}-{part}", 0, 2)
        own_stage = self._new(f"stage-{stage}", part, parts) if parts > 1 else None
        wait: Callable[[Any], None] = self._links.wait
        small = None
        if self._backend == "nccl":
            wait = _enqueue
        elif parts > 1:
            own = self._store, part, parts, self._links, self._timeout_s
            small = connect_parts(*own, prefix=f"stage-{stage}")
        return GroupCollectives(
            *(layout, own_stage, previous, following, wait),
            replicates=config.replicate_logits_post_processors,
            deterministic=params.deterministic,
            small_tensors=small,
        )

    def _new(self, name: str, rank: int, size: int) -> Any:
        timeout_s = self._timeout_s + GROUP_GRACE_S
        make = functools.partial(
            _new_group,
            *(self._store, name, rank, size, timeout_s, self._backend, self._links.address),
        )
        joining = _JoiningGroup(make)
        self._links.wait(joining, f"its process group {name}")
        self._made.append(joining.group)
        return joining.group

    def abort(self) -> None:
        """End the work that CUDA streams wait for, after a rank has failed.

        On a CPU the waiting threads notice the failure themselves.
        """
        if self._backend == "nccl":
            for group in self._made:
                group.abort()


class _JoiningGroup:
    """A process group that a thread joins, so that `Links.wait` can wait for the group.

    torch itself would not notice that another rank has died.
    """

    group: Any

    def __init__(self, make: Callable[[], Any]) -> None:
        self._made: Future[Any] = Future()
        threading.Thread(target=self._join, args=(make,), daemon=True).start()

    def is_completed(self) -> bool:
        return self._made.done()

    def wait(self, timeout: timedelta) -> None:
        """Wait for the group. Raise the error of joining, or RuntimeError if it takes too long."""
        try:
            self.group = self._made.result(timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("the group is not joined yet") from error

    def _join(self, make: Callable[[], Any]) -> None:
        try:
            self._made.set_result(make())
        except Exception as error:
            self._made.set_exception(error)


def _enqueue(work: Any) -> None:
    """Make the current CUDA stream wait for `work`; the thread does not wait."""
    work.wait()


def _new_group(
    store: Any, name: str, rank: int, size: int, timeout_s: float, backend: str, address: str
) -> Any:
    """Return a new process group of `size` ranks, in which this process is number `rank`.

    `backend` is "gloo" or "nccl". `address` is where the other ranks can reach this rank. Only gloo
    uses it: without it, gloo would use the address of the host name, even if that address is valid
    only on this machine. GLOO_SOCKET_IFNAME, if it is set, selects an interface for gloo instead.
    nccl uses NCCL_SOCKET_IFNAME.
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

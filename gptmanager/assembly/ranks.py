"""`Ranks`: the connections of a rank to the others, over which all agree on equal sizes."""

from __future__ import annotations

import atexit
import gc
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from gptmanager.assembly.rank_options import check_options, compared_options
from gptmanager.assembly.sizing import MemoryBudget, Sizes
from gptmanager.config import ModelType, OptionalParams, ParallelConfig, SchedulerConfig
from gptmanager.errors import ConfigError, RankError, response_text
from gptmanager.executor.rank_executor import RankPlace
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.log import logger
from gptmanager.ranks.collectives import Collectives
from gptmanager.ranks.links import Links, Message
from gptmanager.ranks.process_groups import GROUP_GRACE_S, ProcessGroups
from gptmanager.ranks.world import BOOT_S, World, find_all


class Ranks(NamedTuple):
    """The connections of this rank to the other ranks.

    `num_local` ranks run on this machine and share its memory. `local_rank` is the number of this
    rank among them. If the device is "cuda", `local_rank` is also the number of the GPU.
    """

    links: Links
    collectives: Collectives
    num_local: int
    local_rank: int

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this one ends with `error`.

        The destructor of a process group waits for the work of the group, and this work may wait
        for a rank that hangs. So a thread keeps the groups alive until their work has timed out.
        """
        self.links.fail(error, response_text(error))
        keep_s = self.links.timeout_s + GROUP_GRACE_S
        keep = threading.Thread(target=_keep_alive, args=(self.collectives, keep_s), daemon=True)
        keep.start()

    def close(self) -> None:
        """Disconnect from the other ranks. Idempotent, and without effect after `fail`."""
        if not self.links.is_closed:
            self.links.abort_collectives = lambda: None
            self.collectives.close()
        self.links.close()

    def place(self, params: OptionalParams) -> RankPlace:
        """Return the place of this rank's executor among the ranks."""
        config = params.parallel_config
        assert config is not None
        return RankPlace(
            self.collectives.layout,
            ResultChannel(self.links),
            self.collectives.broadcast,
            sends_extras=config.respond_on_all_ranks,
            replicates=config.replicate_logits_post_processors,
        )

    def least_budget(self, budget: MemoryBudget) -> MemoryBudget:
        """Return `budget` with the least free memory of all ranks.

        Ranks on one machine get equal parts of memory that they share.
        """
        free = budget.free_bytes / (self.num_local if budget.shared else 1)
        return budget._replace(free_bytes=self._least(int(free))[0])

    def least_blocks(self, budget: MemoryBudget, sizes: Sizes) -> MemoryBudget:
        """Return `budget`, limited to the number of blocks that fit on every rank.

        Equal bytes are not enough, because a block may take more bytes on another rank.
        """
        blocks, on_host = self._least(sizes.num_blocks, sizes.num_host_blocks)
        return budget._replace(most_blocks=blocks, most_host_blocks=on_host)

    def agree(self, names: Sequence[str]) -> list[str]:
        """Return each name if it is the same on all ranks, else "own". All ranks must call this."""
        columns = zip(*self._exchange("attention providers", names), strict=True)
        return [column[0] if len({*column}) == 1 else "own" for column in columns]

    def share_matmuls(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of all ranks together.

        If several ranks have a key, the lowest rank's entry is returned. All ranks must call this.
        """
        tables = self._exchange("engines of matmuls", own)
        return {key: value for table in reversed(tables) for key, value in table.items()}

    def check_equal(self, what: str, value: Any) -> None:
        """Raise RankError if the value of a rank differs from rank 0's value."""
        given = self.links.exchange(repr(value).encode())
        for rank, own in enumerate(given):
            if own != given[0]:
                why = f"differs from rank 0: {what} = {own.decode()}, not {given[0].decode()}"
                self.links.blame(rank, why)

    def _least(self, *numbers: int) -> list[int]:
        """Return the minimum of each number over all ranks."""
        return [min(column) for column in zip(*self._exchange("sizes", numbers), strict=True)]

    def _exchange(self, what: str, values: Any) -> list[Any]:
        """Return the values of all ranks. Raise RankError if a rank exchanges something else."""
        given = [orjson.loads(it) for it in self.links.exchange(orjson.dumps((what, values)))]
        for rank, (own, _) in enumerate(given):
            if own != given[0][0]:
                self.links.blame(rank, f"exchanges {own}, while rank 0 exchanges {given[0][0]}")
        return [own for _, own in given]


def connect(
    world: World,
    params: OptionalParams,
    callbacks: Mapping[str, Any],
    on_failure: Callable[[], None],
    source: Any,
    scheduler: SchedulerConfig,
    model_type: ModelType,
    max_beam_width: int,
) -> Ranks | None:
    """Connect to the other ranks and compare the options of all; return None for a single rank.

    If a rank's options differ from rank 0's, raise RankError, with the same text on each rank.
    """
    config, layout = params.parallel_config, world.layout
    if config is None or layout.size == 1:
        return None
    # without `gc.freeze`, Python would search all of torch's objects for garbage at exit
    atexit.unregister(gc.freeze)
    atexit.register(gc.freeze)
    boot_s = max(BOOT_S, config.timeout_s)
    store = world.store(boot_s)
    links = Links(
        *(layout.rank, layout.size, store, world.host),
        timeout_s=config.timeout_s,
        boot_s=boot_s,
        on_failure=on_failure,
    )
    try:
        options = compared_options(params, scheduler, model_type, max_beam_width, source)
        own = {**options, **callbacks}
        given = {"host": socket.gethostname(), "own": own}
        answers = [orjson.loads(it) for it in links.exchange(orjson.dumps(given, default=repr))]
        check_options(links, [answer["own"] for answer in answers])
        is_cuda = (params.device or "").startswith("cuda")
        groups = ProcessGroups(store, links, config.timeout_s, "nccl" if is_cuda else "gloo")
        links.abort_collectives = groups.abort
        collectives = groups.collectives(world, params)
        local = [rank for rank, it in enumerate(answers) if it["host"] == given["host"]]
        return Ranks(links, collectives, len(local), local.index(layout.rank))
    except BaseException as error:
        links.fail(error, response_text(error))
        raise


def report_failed_start(find: Callable[[], World], error: Exception) -> None:
    """Report `error`, which ends this rank before it connects to the others.

    The other ranks receive the error once all ranks have connected. `find` returns the world. If
    `find` raises because the options of this rank are invalid, the world is all launched ranks.
    """
    try:
        try:
            world = find()
        except Exception:
            world = find_all()
    except ConfigError:  # the environment does not name other ranks
        return
    if world.layout.size > 1:
        text = response_text(error)
        logger.error(
            "rank %d fails to start, and reports this to the others: %s", world.layout.rank, text
        )
        # in a thread, because signals do not end a wait inside torch
        reporting = threading.Thread(target=_report, args=(world, error), daemon=True)
        reporting.start()
        reporting.join(BOOT_S)


def _report(world: World, error: Exception) -> None:
    rank, size, timeout_s = world.layout.rank, world.layout.size, ParallelConfig().timeout_s
    with suppress(RankError):  # another rank has failed, and has reported it to all
        store = world.store(BOOT_S)
        links = Links(rank, size, store, world.host, timeout_s=timeout_s, boot_s=BOOT_S)
        links.fail(error, response_text(error))


def _keep_alive(collectives: Collectives, seconds: float) -> None:
    Latch().wait(min(seconds, threading.TIMEOUT_MAX))


class ResultChannel:
    """A `ResultLink`: sends the results of steps from rank 0 to the other ranks."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def send(self, message: bytes) -> None:
        self._links.send(Message.RESULT, message)

    def receive(self) -> bytes:
        frame = self._links.receive()
        if frame is None or frame.kind != Message.RESULT:
            raise RankError(f"rank 0 sent message {frame and frame.kind}, expected RESULT")
        return frame.payload

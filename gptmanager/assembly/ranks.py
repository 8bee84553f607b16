"""Functions that connect a rank to the others, and check that all have equal options and sizes."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import gc
import hashlib
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch

from gptmanager.assembly.sizing import MemoryBudget, Sizes
from gptmanager.config import ModelType, OptionalParams, ParallelConfig, SchedulerConfig
from gptmanager.environment.distribution import VERSION
from gptmanager.errors import ConfigError, RankError, response_text
from gptmanager.executor.rank_executor import RankPlace
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.log import logger
from gptmanager.memory.tensor_sources import StateDict
from gptmanager.models.checkpoint_parts import open_tensors, read_part
from gptmanager.ranks.collectives import Collectives, GroupCollectives
from gptmanager.ranks.links import Links, Message
from gptmanager.ranks.small_tensors import connect_parts
from gptmanager.ranks.world import BOOT_S, World, find_all, new_group

# process groups time out this many seconds after links: the error of links names the failed rank
_GROUP_GRACE_S = 5.0
# options that may differ between ranks; all others are compared
_MAY_DIFFER = (
    *("black_box_path", "black_box_iterations", "black_box_bytes", "recording_path"),
    *("on_progress", "callback_budget_s", "logits_post_processor_budget_s", "idle_poll_s"),
    *("device", "restore_cb", "restore_processor_cb"),
)


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
        keep_s = self.links.timeout_s + _GROUP_GRACE_S
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
        own = {
            **_versions(params),
            **_field_values("OptionalParams", params, _MAY_DIFFER),
            **_field_values("SchedulerConfig", scheduler, ()),
            "model_type": model_type.name,
            "max_beam_width": max_beam_width,
            **_checkpoint_digests(source),
            **callbacks,
        }
        given = {"host": socket.gethostname(), "own": own}
        answers = [orjson.loads(it) for it in links.exchange(orjson.dumps(given, default=repr))]
        _compare(links, [answer["own"] for answer in answers])
        is_cuda = (params.device or "").startswith("cuda")
        groups = _ProcessGroups(store, links, config.timeout_s, "nccl" if is_cuda else "gloo")
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


class _ProcessGroups:
    """A maker of torch process groups that are independent of the program's own groups."""

    def __init__(self, store: Any, links: Links, timeout_s: float, backend: str) -> None:
        self._store, self._links = store, links
        self._made: list[Any] = []
        self._timeout_s, self._backend = timeout_s, backend

    def collectives(self, world: World, params: OptionalParams) -> Collectives:
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
        timeout_s = self._timeout_s + _GROUP_GRACE_S
        make = functools.partial(
            new_group,
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


def _compare(links: Links, given: list[dict[str, Any]]) -> None:
    first = given[0]
    for rank, own in enumerate(given):
        for name in dict.fromkeys((*first, *own)):
            here, there = own.get(name, "nothing"), first.get(name, "nothing")
            if here != there:
                links.blame(rank, f"differs from rank 0: {name} = {here!r}, not {there!r}")


def _versions(params: OptionalParams) -> dict[str, Any]:
    return {
        "version of gptmanager": VERSION,
        "version of torch": torch.__version__,
        "version of Python": platform.python_version(),
        "kind of OptionalParams.device": (params.device or "cpu").partition(":")[0],
    }


def _field_values(name: str, config: Any, left_out: Iterable[str]) -> dict[str, Any]:
    """Return the fields of a configuration and of nested configurations, as JSON values.

    Enums and functions become their names, other objects the names of their types.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in left_out:
            continue
        if dataclasses.is_dataclass(value):
            found |= _field_values(type(value).__name__, value, left_out)
        elif isinstance(value, Enum):
            found[f"{name}.{field.name}"] = value.name
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[f"{name}.{field.name}"] = value
        else:
            found[f"{name}.{field.name}"] = getattr(value, "__qualname__", type(value).__name__)
    return found


def _checkpoint_digests(source: Any) -> dict[str, str]:
    """Return digests of a checkpoint's config and of its tensors' headers."""
    if isinstance(source, tuple) and len(source) == 2:
        config, tensors = repr(sorted(source[0].items(), key=str)).encode(), StateDict(source[1])
        headers = tensors.describe()
    elif isinstance(source, (str, os.PathLike)):
        own = read_part(source, "config.json")
        if own is None:  # if it is missing on every rank, loading reports it
            file = Path(source, "config.json").absolute()
            return {"digest of config.json": f"none: the file {file} does not exist"}
        config = repr(own).encode()
        opened = open_tensors(source)
        headers = opened.describe()
        opened.close()
    else:
        raise ConfigError(
            f"model_path is a {type(source).__name__}, but must be a checkpoint: each of several "
            "ranks loads a part of it, and a Model object cannot be split"
        )
    named = repr(sorted((name, *info) for name, info in headers.items())).encode()
    return {
        "digest of config.json": hashlib.sha256(config).hexdigest()[:16],
        "digest of the checkpoint's tensor headers": hashlib.sha256(named).hexdigest()[:16],
    }

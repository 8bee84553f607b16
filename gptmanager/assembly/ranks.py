"""The agreement of all ranks before they run: equal options, sizes that fit everywhere."""

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
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import torch

from gptmanager.assembly.sizing import Room, Sizes
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

_GROUP_GRACE_S = 5.0  # groups of torch time out later than links, which know whose fault it is
# what may differ: where a rank writes, what it tells and when, which device is its own
_OWN = (
    *("black_box_path", "black_box_iterations", "black_box_bytes", "recording_path"),
    *("on_progress", "callback_budget_s", "logits_post_processor_budget_s", "idle_poll_s"),
    "device",
)


class Ranks(NamedTuple):
    """This rank, connected. `num_local` ranks run on this machine, of which it is number
    `local_rank`: they share its memory, and each has a device of its own.
    """

    links: Links
    collectives: Collectives
    num_local: int
    local_rank: int

    def fail(self, error: BaseException) -> None:
        """This rank ends by `error`. A group with work under way waits for it where it is freed,
        and the rank that is waited for may hang: it is freed when its work has timed out.
        """
        self.links.fail(error, response_text(error))
        keep_s = self.links.timeout_s + _GROUP_GRACE_S
        keep = threading.Thread(target=_keep, args=(self.collectives, keep_s), daemon=True)
        keep.start()

    def close(self) -> None:
        """This rank leaves in order. Idempotent; after `fail` it does nothing more."""
        if not self.links.is_closed:
            self.links.abort_collectives = lambda: None
            self.collectives.close()
        self.links.close()

    def place(self, params: OptionalParams) -> RankPlace:
        """Return what the executor of this rank must know."""
        config = params.parallel_config
        assert config is not None
        return RankPlace(
            self.collectives.layout,
            Results(self.links),
            self.collectives.broadcast,
            sends_extras=config.respond_on_all_ranks,
            replicates=config.replicate_logits_post_processors,
        )

    def share(self, room: Room) -> Room:
        """Return the memory that every rank has for its KV cache, so that all sizes are equal."""
        free = room.free_bytes / (self.num_local if room.shared else 1)
        return room._replace(free_bytes=self._least(int(free))[0])

    def agree(self, room: Room, sizes: Sizes) -> Room:
        """With as many blocks as any rank has room for: theirs may be of different sizes."""
        blocks, on_host = self._least(sizes.num_blocks, sizes.num_host_blocks)
        return room._replace(most_blocks=blocks, most_host_blocks=on_host)

    def check_equal(self, what: str, value: Any) -> None:
        """RankError where a rank's is another one."""
        given = self.links.exchange(repr(value).encode())
        for rank, own in enumerate(given):
            if own != given[0]:
                why = f"has other {what} than rank 0: {own.decode()}, not {given[0].decode()}"
                self.links.blame(rank, why)

    def _least(self, *numbers: int) -> list[int]:
        """Return the minimum over all ranks of each number."""
        given = [orjson.loads(it) for it in self.links.exchange(orjson.dumps(numbers))]
        return [min(column) for column in zip(*given, strict=True)]


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
    """Find the other ranks, and compare what each is to do; None: there is no other.

    RankError, the same sentence on each rank, names the first that differs from rank 0, and how.
    """
    config, layout = params.parallel_config, world.layout
    if config is None or layout.size == 1:
        return None
    # else Python would look for garbage among all of torch's objects before it ends
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
            **_fields("OptionalParams", params, _OWN),
            **_fields("SchedulerConfig", scheduler, ()),
            "model_type": model_type.name,
            "max_beam_width": max_beam_width,
            **_checkpoint(source),
            **callbacks,
        }
        given = {"host": socket.gethostname(), "own": own}
        answers = [orjson.loads(it) for it in links.exchange(orjson.dumps(given, default=repr))]
        _compare(links, [answer["own"] for answer in answers])
        is_cuda = (params.device or "").startswith("cuda")
        make = _Groups(store, links, config.timeout_s, "nccl" if is_cuda else "gloo")
        links.abort_collectives = make.abort
        collectives = make.collectives(world, params)
        local = [rank for rank, it in enumerate(answers) if it["host"] == given["host"]]
        return Ranks(links, collectives, len(local), local.index(layout.rank))
    except BaseException as error:
        links.fail(error, response_text(error))
        raise


def tell_ranks(find: Callable[[], World], error: Exception) -> None:
    """This rank ends by `error` before it meets the others: they are told when all have come.

    `find` finds the world, if what this rank was given does not forbid it.
    """
    try:
        try:
            world = find()
        except Exception:
            world = find_all()
    except ConfigError:  # nobody says that there are others
        return
    if world.layout.size > 1:
        text = response_text(error)
        logger.error("rank %d does not start, and tells the others: %s", world.layout.rank, text)
        # in a thread, because no signal ends a wait inside of torch
        telling = threading.Thread(target=_tell, args=(world, error), daemon=True)
        telling.start()
        telling.join(BOOT_S)


def _tell(world: World, error: Exception) -> None:
    rank, size, timeout_s = world.layout.rank, world.layout.size, ParallelConfig().timeout_s
    with suppress(RankError):  # another one has failed, and all know of that
        store = world.store(BOOT_S)
        links = Links(rank, size, store, world.host, timeout_s=timeout_s, boot_s=BOOT_S)
        links.fail(error, response_text(error))


def _keep(collectives: Collectives, seconds: float) -> None:
    Latch().wait(min(seconds, threading.TIMEOUT_MAX))


class Results:
    """Sends results of steps from rank 0 to the others: a `ResultLink`."""

    def __init__(self, links: Links) -> None:
        self._links = links

    def send(self, message: bytes) -> None:
        self._links.send(Message.RESULT, message)

    def receive(self) -> bytes:
        frame = self._links.receive()
        if frame is None or frame.kind != Message.RESULT:
            raise RankError(f"rank 0 sent message {frame and frame.kind} where a result was due")
        return frame.payload


class _Groups:
    """Process groups of torch, each of its own: what the host does with torch's is its affair."""

    def __init__(self, store: Any, links: Links, timeout_s: float, backend: str) -> None:
        self._store, self._links = store, links
        self._made: list[Any] = []
        self._timeout_s, self._backend = timeout_s, backend

    def collectives(self, world: World, params: OptionalParams) -> Collectives:
        layout, config = world.layout, params.parallel_config
        assert config is not None
        stage, part, parts = layout.stage, layout.part, layout.tensor_parallel_size
        # in the order of stages, so that no two wait for each other
        before = None if stage == 0 else self._new(f"to-{stage}-{part}", 1, 2)
        behind = None if layout.is_last_stage else self._new(f"to-{stage + 1}-{part}", 0, 2)
        within = self._new(f"stage-{stage}", part, parts) if parts > 1 else None
        wait: Callable[[Any], None] = self._links.wait
        small = None
        if self._backend == "nccl":
            wait = _enqueue
        elif parts > 1:
            own = self._store, part, parts, self._links, self._timeout_s
            small = connect_parts(*own, prefix=f"stage-{stage}")
        return GroupCollectives(
            *(layout, within, before, behind, wait),
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
        joining = _Joining(make)
        self._links.wait(joining, f"its process group {name}")
        self._made.append(joining.group)
        return joining.group

    def abort(self) -> None:
        """A rank has failed: what streams wait for ends. On a CPU the threads that wait look up."""
        if self._backend == "nccl":
            for group in self._made:
                group.abort()


class _Joining:
    """A process group that is joined in a thread, as a work that links can wait for: torch itself
    would not see that another rank has died.
    """

    group: Any

    def __init__(self, make: Callable[[], Any]) -> None:
        self._made: Future[Any] = Future()
        threading.Thread(target=self._join, args=(make,), daemon=True).start()

    def is_completed(self) -> bool:
        return self._made.done()

    def wait(self, timeout: timedelta) -> None:
        """RuntimeError: not yet, or it cannot be."""
        try:
            self.group = self._made.result(timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError("it takes longer") from error

    def _join(self, make: Callable[[], Any]) -> None:
        try:
            self._made.set_result(make())
        except Exception as error:
            self._made.set_exception(error)


def _enqueue(work: Any) -> None:
    """The stream waits, the thread does not."""
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


def _fields(name: str, config: Any, left_out: Iterable[str]) -> dict[str, Any]:
    """Return a configuration's fields, nested ones included, as JSON values; code by its name."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in left_out:
            continue
        if dataclasses.is_dataclass(value):
            found |= _fields(type(value).__name__, value, left_out)
        elif isinstance(value, Enum):
            found[f"{name}.{field.name}"] = value.name
        elif value is None or isinstance(value, (bool, int, float, str)):
            found[f"{name}.{field.name}"] = value
        else:
            found[f"{name}.{field.name}"] = getattr(value, "__qualname__", type(value).__name__)
    return found


def _checkpoint(source: Any) -> dict[str, str]:
    """Digests of a checkpoint's config and of the headers of its tensors."""
    if isinstance(source, tuple) and len(source) == 2:
        config, tensors = repr(sorted(source[0].items(), key=str)).encode(), StateDict(source[1])
        headers = tensors.describe()
    elif isinstance(source, (str, os.PathLike)):
        own = read_part(source, "config.json")
        if own is None:  # on every rank: loading says what is wrong
            file = Path(source, "config.json").absolute()
            return {"digest of config.json": f"none, there is no file {file}"}
        config = repr(own).encode()
        opened = open_tensors(source)
        headers = opened.describe()
        opened.close()
    else:
        raise ConfigError(
            f"model_path is a {type(source).__name__}: of several ranks each has a part of a "
            "checkpoint, which a Model object cannot be cut into"
        )
    named = repr(sorted((name, *info) for name, info in headers.items())).encode()
    return {
        "digest of config.json": hashlib.sha256(config).hexdigest()[:16],
        "digest of the checkpoint's tensor headers": hashlib.sha256(named).hexdigest()[:16],
    }

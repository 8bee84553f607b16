"""Ranks as forks of one process, one of which is made to fail: who ends, when, and with what.

`python tests/support/rank_faults.py 3 kill:1:2:1 stop:0:1:2` prints JSON, a line a fault: what,
to which rank, how many ranks share a layer, and how many stages there are. The number seeds the
moments at which they come. `python tests/support/rank_faults.py 3 60` draws 60 faults.
"""

from __future__ import annotations

import json
import os
import random
import select
import signal
import sys
import time
from typing import Any, NamedTuple

import torch
from forked_ranks import Child, fork_ranks

from gptmanager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
)
from gptmanager.assembly import ranks
from gptmanager.callbacks import broadcast

TINY = "examples/tiny_llama"
TIMEOUT_S = 1.0
BOOT_S = 5.0  # how long ranks wait for one that never comes
PATIENCE_S = 30.0  # then a rank has hung, and is killed
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "raise": signal.SIGUSR1,  # an exception in a step
    "hang": signal.SIGUSR2,  # a step that does not end
    "exit": signal.SIGTERM,  # the host leaves without a shutdown
}
WORLDS = [(2, 1), (1, 2), (2, 2), (4, 1)]


class Fault(NamedTuple):
    kind: str
    rank: int
    parts: int
    stages: int
    after_s: float  # the start, of a rank that is `ready` or not
    is_ready: bool


class Host:
    """Always has eight requests under way."""

    def __init__(self) -> None:
        self.asked = 0
        self.finals: dict[int, int] = {}
        self.errors: set[str] = set()

    def get(self, room: int) -> list[InferenceRequest]:
        found = []
        while self.asked - len(self.finals) < 8:
            prompt = [1, 2, 3 + self.asked % 50]
            found.append(InferenceRequest.from_tokens(self.asked, prompt, 5 + self.asked % 40))
            self.asked += 1
        return found

    def send(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        if is_final:
            self.finals[request_id] = self.finals.get(request_id, 0) + 1
            self.errors.add(error)


def be_rank(rank: int, fault: Fault, told: int) -> None:
    """A host like any other, but that signals plant faults in it."""
    host, torn = Host(), []
    ranks.BOOT_S = BOOT_S
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    signal.signal(signal.SIGUSR1, lambda *_: torn.append("raise"))
    signal.signal(signal.SIGUSR2, lambda *_: torn.append("hang"))
    torch.set_num_threads(1)
    get, poll = broadcast(host.get) if rank == 0 else broadcast()
    config = ParallelConfig(fault.parts, fault.stages, timeout_s=TIMEOUT_S)
    error: BaseException | None = None
    try:
        manager = GptManager(
            TINY,
            ModelType.INFLIGHT_FUSED_BATCHING,
            get_inference_requests_cb=get,
            send_response_cb=host.send,
            poll_stop_signal_cb=poll,
            optional_params=OptionalParams(
                max_batch_size=8,
                max_seq_len=128,
                kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=8),
                parallel_config=config,
            ),
        )
        plant(manager, torn)
        os.write(told, b"{}\n")
        manager.wait()
        error = manager.exception
        state = manager.state.value
    except Exception as raised:  # while it starts
        error, state = raised, "failed"
    report = {
        "state": state,
        "error": f"{type(error).__name__}: {error}",
        "at": time.monotonic(),  # the host knows of the end
        "asked": host.asked,
        "finals": len(host.finals),
        "most": max(host.finals.values(), default=0),
        "errors": sorted(host.errors),
    }
    os.write(told, (json.dumps(report) + "\n").encode())


def plant(manager: GptManager, torn: list[str]) -> None:
    loop = manager._worker.loop
    assert loop is not None
    executor, forward = loop.executor, loop.executor.forward

    def torn_forward(schedule: Any) -> Any:
        if "raise" in torn:
            raise ValueError("planted")
        if "hang" in torn:
            time.sleep(1000)
        return forward(schedule)

    executor.forward = torn_forward  # type: ignore[method-assign]


def start(fault: Fault) -> list[Child]:
    def run(rank: int, writing: int) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # what it logs is known
        be_rank(rank, fault, writing)

    return fork_ranks(fault.parts * fault.stages, run)


def lines(child: Child, until: float, count: int) -> list[Any]:
    """The first `count` lines that it says until then."""
    data = b""
    while data.count(b"\n") < count and (left := until - time.monotonic()) > 0:
        if not select.select([child.told], [], [], left)[0]:
            break
        piece = os.read(child.told, 1 << 16)
        if not piece:
            break
        data += piece
    return [json.loads(line) for line in data.splitlines()]


def ended(children: dict[int, Child], until: float) -> dict[int, tuple[float, int]]:
    """When each has ended, and how."""
    found: dict[int, tuple[float, int]] = {}
    while len(found) < len(children) and time.monotonic() < until:
        for rank, child in children.items():
            if rank not in found:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    found[rank] = time.monotonic(), os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return found


def run(fault: Fault) -> dict[str, Any]:
    children = dict(enumerate(start(fault)))
    told: dict[int, list[Any]] = {rank: [] for rank in children}
    gone: dict[int, tuple[float, int]] = {}
    try:
        if fault.is_ready:
            until = time.monotonic() + PATIENCE_S
            for rank, child in children.items():
                told[rank] = lines(child, until, 1)
        time.sleep(fault.after_s)
        os.kill(children[fault.rank].pid, SIGNALS[fault.kind])
        begin = time.monotonic()
        others = {rank: it for rank, it in children.items() if rank != fault.rank}
        gone |= ended(others, begin + PATIENCE_S)
        blamed = {fault.rank: children[fault.rank]}
        if fault.kind in ("kill", "stop", "exit", "raise"):
            revived = time.monotonic()
            if fault.kind == "stop":
                os.kill(children[fault.rank].pid, signal.SIGCONT)
            gone |= ended(blamed, revived + PATIENCE_S)
    finally:
        for rank, child in children.items():
            if rank not in gone:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
    for rank, child in children.items():
        told[rank] += lines(child, time.monotonic() + 1.0, 2)
        os.close(child.told)
    return {
        **fault._asdict(),
        "out_s": {rank: round(when - begin, 3) for rank, (when, _) in gone.items()},
        "codes": {rank: code for rank, (_, code) in gone.items()},
        "begin": begin,
        "told": {rank: said[-1] if said else {} for rank, said in told.items()},
    }


def drawn(chance: random.Random) -> Fault:
    parts, stages = chance.choice(WORLDS)
    rank, kind = chance.randrange(parts * stages), chance.choice([*SIGNALS, "kill", "stop"])
    is_ready = kind in ("raise", "hang", "exit") or chance.random() < 0.8
    return Fault(kind, rank, parts, stages, chance.uniform(0, 0.4), is_ready)


def main() -> None:
    seed, *faults = sys.argv[1:]
    chance = random.Random(int(seed))
    if faults and faults[0].isdigit():
        todo = [drawn(chance) for _ in range(int(faults[0]))]
    else:
        split = [(kind, *map(int, rest)) for kind, *rest in (it.split(":") for it in faults)]
        todo = [Fault(*it, chance.uniform(0, 0.2), True) for it in split]
    for fault in todo:
        print(json.dumps(run(fault)), flush=True)


if __name__ == "__main__":
    main()

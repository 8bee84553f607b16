"""Two ranks as forks of one process, which spares the second import of torch.

`python tests/support/rank_calls.py agree` prints what `Ranks.agree` returns, by rank, as JSON.
`python tests/support/rank_calls.py sleep 1 running`: both hosts call `sleep` while a step is in
flight, and that step fails on rank 1. Prints what the call raised, what ended the manager, and the
manager's state, by rank. With `paused` the manager of rank 0 is paused before the call.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from forked_ranks import fork_ranks
from rank_links import outcome
from shorthand import request

from gptmanager import GptManager, ModelType, OptionalParams, ParallelConfig
from gptmanager.assembly.ranks import Ranks
from gptmanager.callbacks import broadcast
from gptmanager.ranks.links import Links
from gptmanager.ranks.world import find_all
from gptmanager.testing import RecordingCallbacks

TINY = "examples/tiny_llama"
SIZE = 2
NEVER_S = 150.0  # longer than the test waits


def on_each_rank(body: Callable[[int], Any]) -> list[Any]:
    """What `body(rank)` returns in a process of its own, by rank."""

    def be_rank(rank: int, writing: int) -> None:
        try:
            os.write(writing, json.dumps(body(rank)).encode())
        except Exception:
            traceback.print_exc()
        os._exit(0)

    found = []
    for pid, reading in fork_ranks(SIZE, be_rank):
        with open(reading, encoding="utf-8") as told:
            found.append(json.loads(told.read() or "null"))
        os.waitpid(pid, 0)
    return found


def agree(rank: int) -> list[str]:
    world = find_all()
    store = world.store(20.0)
    links = Links(rank, SIZE, store, world.host, timeout_s=20.0, boot_s=20.0)
    try:
        names = ["own" if rank else "flash_attn", "flashinfer"]
        return Ranks(links, None, SIZE, rank).agree(names)  # type: ignore[arg-type]
    finally:
        links.close()


def call(rank: int, name: str, failing: int, is_paused: bool) -> list[str]:
    torch.set_num_threads(1)
    host = RecordingCallbacks()
    own = (host.get_inference_requests, host.poll_stop_signal) if rank == 0 else ()
    get, poll = broadcast(*own)
    manager = GptManager(
        TINY,
        ModelType.INFLIGHT_FUSED_BATCHING,
        get_inference_requests_cb=get,
        send_response_cb=host.send_response,
        poll_stop_signal_cb=poll,
        optional_params=OptionalParams(
            device="cpu",
            max_batch_size=4,
            max_seq_len=500,
            run_ahead=1,  # so that a step is in flight between two iterations
            parallel_config=ParallelConfig(SIZE, timeout_s=NEVER_S),
        ),
    )
    if rank == failing:
        plant(manager)
    if rank == 0:
        host.submit(request(1, [1, 2, 3], 490, is_streaming=True))
        while not host.of(1):
            time.sleep(0.001)
        if is_paused:
            manager.pause_generation()
    given = ({},) if name == "update_weights" else ()
    raised = outcome(lambda: getattr(manager, name)(*given))
    manager.wait()
    errors = (raised, manager.exception)
    return [*(f"{type(it).__name__}: {it}" for it in errors), manager.state.value]


def plant(manager: GptManager) -> None:
    calls, loop = manager._worker._calls, manager._worker.loop
    finish = calls._finish_pending

    def fail(step: Any) -> Any:
        raise ValueError("planted")

    def torn(loop: Any) -> None:
        assert loop.pending
        loop.executor.result = fail
        finish(loop)

    assert loop is not None
    calls._finish_pending = torn  # type: ignore[method-assign]


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "agree":
        found = on_each_rank(agree)
    else:
        failing, how = rest
        found = on_each_rank(lambda rank: call(rank, what, int(failing), how == "paused"))
    print(json.dumps(found))


if __name__ == "__main__":
    main()

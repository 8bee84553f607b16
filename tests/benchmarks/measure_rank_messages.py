"""What a control message costs beside a plain gloo broadcast of as many bytes.

    PYTHONPATH=.:tests/support python tests/benchmarks/measure_rank_messages.py

prints, for 2 and 4 ranks and for a turn without requests and one with eight, the time from the
start of a message on rank 0 to the answer of the last rank, less that of an answer alone: the
median of rounds that alternate between both ways. With a message comes the digest of a schedule.
"""

from __future__ import annotations

import os
import statistics
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ranks_by_hand import outputs, started_ranks

from gptmanager import InferenceRequest, ParallelConfig
from gptmanager.host.rank_messages import Turn, Unpacker, pack
from gptmanager.ranks.links import Links, Message
from gptmanager.ranks.world import find_world
from gptmanager.step import Intake

ROUNDS = 400
DIGEST = bytes(8)


def turn(num_requests: int) -> Turn:
    requests = [InferenceRequest.from_tokens(i, list(range(100)), 20) for i in range(num_requests)]
    return Turn(Intake(1.5, tuple(requests)), 0, 0, False)


def main() -> None:
    torch.set_num_threads(1)
    size = int(os.environ["WORLD_SIZE"])
    world = find_world(ParallelConfig(size))
    rank, store = world.layout.rank, world.store(60.0)
    links = Links(rank, size, store, world.host, timeout_s=60.0, boot_s=60.0)
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
    unpack = Unpacker()

    def answered() -> None:
        group.barrier().wait()

    def by_links(given: Turn, data: bytes) -> None:
        if rank == 0:
            links.send(Message.INTAKE, pack(given))
            links.send(Message.DECISION, DIGEST)
        else:
            frame = links.receive()
            assert frame is not None
            unpack(frame.payload)
            links.receive()

    def by_gloo(given: Turn, data: bytes) -> None:
        group.broadcast([torch.frombuffer(bytearray(data), dtype=torch.uint8)]).wait()

    def nothing(given: Turn, data: bytes) -> None:
        pass

    def seconds(way: Any, given: Turn, data: bytes) -> float:
        answered()
        begin = time.perf_counter()
        way(given, data)
        answered()
        return time.perf_counter() - begin

    for num_requests in (0, 8):
        given = turn(num_requests)
        data = pack(given)
        ways = (by_links, by_gloo, nothing)
        took: dict[Any, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way in ways:
                took[way].append(seconds(way, given, data))
        idle = statistics.median(took[nothing])
        ours, plain = (statistics.median(took[way]) - idle for way in (by_links, by_gloo))
        if rank == 0:
            print(
                f"{size} ranks, {num_requests} requests, {len(data)} bytes: "
                f"{ours * 1e6:.0f} us, gloo {plain * 1e6:.0f} us, ratio {ours / plain:.2f}"
            )
    links.close()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        for num_ranks in (2, 4):
            with started_ranks([__file__], num_ranks, PYTHONPATH=".:tests/support") as ranks:
                print(outputs(ranks)[0], end="")

"""What managers of ranks that have nothing to do take of a core.

    PYTHONPATH=.:tests/support python tests/benchmarks/measure_idle_ranks.py

prints, for each of two ranks, the time of its process on a core in 20 s, as a share of these.
"""

from __future__ import annotations

import os
import time

from ranks_by_hand import outputs, started_ranks

from gptmanager import GptManager, ModelType, OptionalParams, ParallelConfig
from gptmanager.callbacks import broadcast

SECONDS = 20.0


def main() -> None:
    rank = int(os.environ["RANK"])
    get, poll = broadcast(lambda room: []) if rank == 0 else broadcast()
    with GptManager(
        "examples/tiny_llama",
        ModelType.INFLIGHT_FUSED_BATCHING,
        get_inference_requests_cb=get,
        send_response_cb=print,
        poll_stop_signal_cb=poll,
        optional_params=OptionalParams(max_seq_len=64, parallel_config=ParallelConfig(2)),
    ) as manager:
        manager.wait_idle()
        begin = time.process_time()
        time.sleep(SECONDS)
        print(f"rank {rank}: {(time.process_time() - begin) / SECONDS:.2%} of a core")


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        with started_ranks([__file__], 2, PYTHONPATH=".:tests/support") as ranks:
            print(*outputs(ranks), sep="", end="")

"""Schedules and requests, and their digests: which must be the same in every process."""

from __future__ import annotations

from dataclasses import replace

import torch

from gptmanager import InferenceRequest
from gptmanager.host.rank_messages import requests_digest, schedule_digest, stops_digest
from gptmanager.step import BeamFork, BlockAppend, Drafts, Row, Schedule, SequenceStart

SCHEDULE = Schedule(
    7,
    context_rows=(Row(1, 0, 0, 0, 5, False), Row(2, 1, 3, 4, 6, True)),
    generation_rows=(Row(3, 0, 1, 9, 1, True, 2, 1),),
    starts=(SequenceStart(0, (1, 2, 3), 3, None),),
    block_appends=(BlockAppend(0, 0, (4, 5)),),
    block_copies=(),
    beam_forks=(BeamFork(1, 9, (0, 0), (5, 6)),),
    drafts=(Drafts(1, 10, (7,)),),
    paused=(9,),
)
OTHERS = [
    *(replace(SCHEDULE, **change) for change in [{"iteration": 8}, {"paused": (8,)}]),
    replace(SCHEDULE, micro_batch_id=1),
    replace(SCHEDULE, drafts=(Drafts(1, 10, (8,)),)),
    replace(SCHEDULE, beam_forks=(BeamFork(1, 9, (0, 1), (5, 6)),)),
    replace(SCHEDULE, block_appends=(BlockAppend(0, 0, (5, 4)),)),
    replace(SCHEDULE, starts=(SequenceStart(0, (1, 2, 3), 3, None, adapter_slot=2),)),
    replace(SCHEDULE, starts=()),
    *(
        replace(SCHEDULE, generation_rows=(SCHEDULE.generation_rows[0]._replace(**{name: value}),))
        for name, value in [("request_id", 4), ("slot", 2), ("epoch", 3), ("samples", False)]
    ),
    replace(SCHEDULE, context_rows=tuple(reversed(SCHEDULE.context_rows))),
    replace(SCHEDULE, context_rows=SCHEDULE.context_rows[:1]),
]


def digests() -> list[int]:
    """Return digests of requests, stops and schedules."""
    requests = [
        InferenceRequest.from_tokens(5, list(range(100)), 3, temperature=0.5, cache_salt="ab"),
        InferenceRequest(6, {"embedding_bias": torch.ones(3, 50)}),
    ]
    return [
        requests_digest(requests),
        stops_digest({5, 2**63, 17}),
        *map(schedule_digest, [SCHEDULE, *OTHERS]),
    ]


if __name__ == "__main__":
    print(*digests())

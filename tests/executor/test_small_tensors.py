"""Small tensors between the parts of a stage, each sent to each."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from rank_links import at_once, linked, outcome
from torch.distributed import HashStore

from gptmanager.errors import RankError
from gptmanager.ranks.small_tensors import MOST_BYTES, connect_parts

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32)


@contextmanager
def parts(size, timeout_s=20.0):
    store = HashStore()
    with linked(size, timeout_s) as links:

        def connect(part):
            return connect_parts(store, part, size, links[part], 10.0, prefix="stage-0")

        yield at_once(connect, range(size)), links


@pytest.mark.parametrize("size", [2, 4])
def test_each_part_receives_the_tensors_of_all_parts_in_order(size):
    most = torch.arange(MOST_BYTES // 4, dtype=torch.float32)
    made = [torch.full((3, 5), 7.0).to(dtype) for dtype in DTYPES] + [most, most[:1]]
    with parts(size) as (tensors, _):

        def exchange(part):
            # a transposed one is not contiguous
            return [
                tensors[part].all_gather(it.mul(part + 1).t() if it.dim() > 1 else it)
                for it in made
            ]

        for found in at_once(exchange, range(size)):
            for sent, received in zip(made, found, strict=True):
                assert len(received) == size
                for part, one in enumerate(received):
                    wanted = sent.mul(part + 1).t() if sent.dim() > 1 else sent
                    assert one.dtype == sent.dtype and torch.equal(one, wanted)


def test_a_part_that_fails_ends_the_wait_of_the_others():
    with parts(3) as (tensors, links):

        def run(part):
            if part == 1:
                links[1].fail(ValueError("boom"), "ValueError: boom")
                return None
            return outcome(lambda: tensors[part].all_gather(torch.ones(4)))

        first, _, last = at_once(run, range(3))
    for error in (first, last):
        assert isinstance(error, RankError) and str(error) == "rank 1 failed: ValueError: boom"


def test_a_part_that_sends_nothing_is_named():
    with parts(2, timeout_s=0.6) as (tensors, _):
        error = outcome(lambda: tensors[0].all_gather(torch.ones(4)))
    assert isinstance(error, RankError) and str(error).startswith(
        "rank 1 has kept the others waiting"
    )

"""What ranks do together in a step: sums, gathered logits, hidden states between stages."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from rank_threads import World
from torch import Tensor

from gptmanager.ranks.collectives import GroupCollectives
from gptmanager.ranks.layout import RankLayout

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def part_of(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 300])  # 300: a ring
def test_a_sum_is_that_of_all_parts_in_place(dtype, rows):
    def body(collectives):
        own = part_of(collectives.layout.part, rows, 256, dtype=dtype)
        assert collectives.all_reduce(own) is own
        return own

    expected = sum(part_of(part, rows, 256, dtype=dtype).double() for part in range(3))
    first, *others = World(3).run(body)
    assert all(torch.equal(first, other) for other in others)
    tolerance = {torch.bfloat16: 0.04, torch.float16: 0.005}.get(dtype, 1e-6)
    torch.testing.assert_close(first.double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("rows", [8, 300])
def test_a_deterministic_sum_of_a_row_does_not_depend_on_the_others(rows):
    def body(collectives):
        own = part_of(collectives.layout.part, rows, 256)
        alone = own[3:4].clone()
        return collectives.all_reduce(own)[3:4], collectives.all_reduce(alone)

    for beside, alone in World(4).run(body, deterministic=True):
        assert torch.equal(beside, alone)


def test_a_stage_sums_its_own_parts_only():
    def body(collectives):
        return collectives.all_reduce(torch.tensor([float(collectives.layout.rank)]))

    assert [it.item() for it in World(2, 2).run(body)] == [1, 1, 5, 5]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("replicates", [False, True])
@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.every(5)
def test_columns_are_gathered_side_by_side(dtype, replicates, rows):
    widths = (4, 3, 3)

    def body(collectives):
        own = part_of(collectives.layout.part, rows, widths[collectives.layout.part], dtype=dtype)
        return collectives.gather(own, widths)

    expected = torch.cat([part_of(i, rows, n, dtype=dtype) for i, n in enumerate(widths)], dim=1)
    first, *others = World(3).run(body, replicates=replicates)
    assert torch.equal(first, expected) and first.dtype is dtype
    for other in others:
        assert torch.equal(other, expected) if replicates else other.shape == (rows, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_hidden_states_go_from_stage_to_stage(dtype):
    def body(collectives):
        layout, sent = collectives.layout, []
        for step in range(4):
            hidden = torch.full((step, 3), float(step + 10 * layout.part), dtype=dtype)
            if not layout.is_first_stage:
                hidden = collectives.receive(torch.empty_like(hidden)) + 100
            if not layout.is_last_stage:
                collectives.send(hidden)
            sent.append(hidden)
        return sent

    by_rank = World(2, 3).run(body)
    for part in range(2):  # both parts of the last stage
        for step, hidden in enumerate(by_rank[part]):
            assert hidden.shape == (step, 3) and (hidden == step + 10 * part + 200).all()


def test_a_sender_does_not_wait_for_the_next_stage():
    done, received = threading.Event(), torch.zeros(1 << 20)  # more than any buffer on the way

    def body(collectives):
        if collectives.layout.is_first_stage:
            collectives.send(torch.ones(1 << 20))
            done.set()
            return
        assert done.wait(30)
        collectives.receive(received)

    World(1, 2).run(body)
    assert (received == 1).all()


def test_a_tensor_has_arrived_before_the_next_one_is_sent():
    """Its memory would be reused otherwise, and nobody would see that its sending has failed."""
    group = SimpleNamespace(broadcast=lambda tensors: tensors)
    waited = []
    stage = GroupCollectives(RankLayout(1, 2), group, None, group, waited.append)
    for step in range(3):
        stage.send(torch.full((1,), step))
    assert waited == [[torch.tensor([0])], [torch.tensor([1])]]


def test_what_part_0_has_is_shared_in_the_stage():
    def body(collectives):
        tensor = torch.full((3,), collectives.layout.rank, dtype=torch.int32)
        collectives.broadcast(tensor)
        collectives.broadcast(tensor[:0])
        return tensor.tolist()

    assert World(2, 2).run(body) == [[0] * 3, [0] * 3, [2] * 3, [2] * 3]
    assert World(1, 2).run(body) == [[0] * 3, [1] * 3]

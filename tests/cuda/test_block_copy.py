from __future__ import annotations

import pytest
import torch
from kernel_values import DTYPES, randn

from gptmanager.cuda.attention.block_copy import as_tensor, copy_blocks, rounds


def check_copy(machine, dtype, copies):
    pool = randn(2, 7, 3, 4, 8, dtype=dtype)
    got = machine.tensor(pool)
    for own in rounds(copies):
        copy_blocks(machine.launcher, got, got, machine.tensor(as_tensor(own, "cpu")))
    for source, destination, num_tokens in copies:
        pool[:, destination, :, :num_tokens] = pool[:, source, :, :num_tokens]
    assert torch.equal(got.cpu(), pool)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_one_after_the_other(machine, dtype):
    check_copy(machine, dtype, [(0, 1, 4), (0, 2, 1), (1, 3, 3), (5, 0, 2), (6, 5, 4), (4, 6, 0)])


def test_copies_to_another_pool(machine):
    device, host = randn(2, 3, 2, 4, 4), randn(2, 5, 2, 4, 4, seed=1)
    got = machine.tensor(host)
    copies = machine.tensor(as_tensor([(2, 4, 3), (0, 1, 4)], "cpu"))
    copy_blocks(machine.launcher, got, machine.tensor(device), copies)
    host[:, 4, :, :3], host[:, 1] = device[:, 2, :, :3], device[:, 0]
    assert torch.equal(got.cpu(), host)


def test_copies_have_no_race(checked_machine):
    check_copy(checked_machine, torch.bfloat16, [(0, 1, 4), (0, 2, 1), (4, 3, 3)])


def test_rounds():
    chain = [(0, 1, 4), (1, 2, 4), (3, 1, 2), (4, 5, 1), (6, 4, 1)]
    assert rounds(chain) == [chain[:1], chain[1:2], chain[2:4], chain[4:]]
    assert rounds([(0, 1, 4), (0, 2, 4)]) == [[(0, 1, 4), (0, 2, 4)]]
    assert rounds([]) == []


def test_tensors_that_do_not_fit(machine):
    pool = machine.empty((1, 2, 1, 4, 3), torch.float32)
    with pytest.raises(
        ValueError, match="a token of 3 torch.float32 must be a multiple of 16 bytes"
    ):
        copy_blocks(machine.launcher, pool, pool, machine.tensor(as_tensor([], "cpu")))

"""Masks on logits, compiled, against their specification in torch."""

import numpy as np
import pytest
import torch

from gptmanager.kernels.token_masks import mask_logits, mask_logits_reference


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 95, 200])
@pytest.mark.parametrize("rows", [[0], [2, 4, 1], [3, 4]])
def test_tokens_without_a_bit_are_minus_infinity(vocab_size, rows):
    chance = np.random.default_rng(vocab_size)
    masks = chance.integers(-(2**31), 2**31, (len(rows), 3)).astype(np.int32)
    masks[0, 0], masks[-1, -1] = 0, -1
    logits = torch.from_numpy(chance.normal(size=(5, vocab_size)).astype(np.float32))
    logits[2, 0], logits[4, 0] = torch.inf, torch.nan
    expected, wanted = logits.clone(), logits.clone()
    for row, mask in zip(rows, masks, strict=True):
        for token in range(vocab_size):
            word = int(mask[token // 32]) if token < 96 else 0
            if not word >> (token % 32) & 1:
                expected[row, token] = -torch.inf
    index = np.array(rows, dtype=np.int64)
    empty = sum(not mask.any() for mask in masks)
    assert mask_logits(logits, index, masks) == empty == 0
    assert mask_logits_reference(wanted, index, masks) == 0
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(wanted, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mask", [mask_logits, mask_logits_reference])
def test_rows_without_any_token_are_counted(mask):
    masks = np.array([[0, 0], [1, 0], [0, 1], [0, 0], [-1, -1]], dtype=np.int32)
    assert mask(torch.zeros(5, 64), np.arange(5), masks) == 2
    assert mask(torch.zeros(5, 64), np.arange(1), masks[1:2]) == 0

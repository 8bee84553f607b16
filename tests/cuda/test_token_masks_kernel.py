"""Masks of tokens, as the same operation in torch applies them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices import GPU, there_is
from guided_requests import MODEL, asked, serve
from kernel_values import randn

from gptmanager.callbacks import load_guided_decoding, load_tokenizer
from gptmanager.cuda.sampling.token_masks import mask_logits
from gptmanager.kernels.token_masks import mask_logits_reference


def check(machine, vocab_size, num_words, rows=(3, -1, 0)):
    generator = np.random.default_rng(vocab_size)
    masks = generator.integers(-(2**31), 2**31, (len(rows), num_words)).astype(np.int32)
    masks[generator.random(masks.shape) < 0.3] = -1
    masks[generator.random(masks.shape) < 0.2] = 0
    logits = randn(5, vocab_size)
    logits[0, 0] = torch.nan  # is left, or replaced, like any other
    used = [place for place, row in enumerate(rows) if row >= 0]
    expected = logits.clone()
    mask_logits_reference(expected, np.array(rows)[used], masks[used])
    got = machine.tensor(logits)
    index = machine.tensor(torch.tensor(rows, dtype=torch.int32))
    mask_logits(machine.launcher, got, index, machine.tensor(torch.from_numpy(masks)))
    assert torch.equal(got.cpu().view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1024, 1025, 9300])
def test_rows_with_a_mask(machine, vocab_size):
    check(machine, vocab_size, -(-vocab_size // 32))


@pytest.mark.parametrize("num_words", [1, 32, 40])
def test_masks_narrower_or_wider_than_the_vocabulary(machine, num_words):
    check(machine, 1100, num_words)


def test_there_is_no_race(checked_machine):
    check(checked_machine, 1500, 46)


def test_tensors_that_do_not_fit(machine):
    logits, masks = machine.empty((2, 8), torch.float32), machine.empty((1, 1), torch.int32)
    with pytest.raises(ValueError, match=r"rows is torch.int32 \[2\], expected .* \[1\]"):
        mask_logits(machine.launcher, logits, machine.empty((2,), torch.int32), masks)


@pytest.mark.parametrize("device", ["emulator", GPU])
def test_guided_decoding_by_the_kernel(device, monkeypatch):
    there_is(device)
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    tokenizer, guided = load_tokenizer(MODEL), load_guided_decoding(MODEL)
    grammars = [guided.choice(["red", "a blue ball"]), None, guided.regex("[a-f]{4,9}")]

    def outputs(**options):
        requests = [asked(tokenizer, i, grammars[i], 20) for i in range(3)]
        host = serve(requests, **options)
        return [host.output(i) for i in range(3)]

    expected, calls = outputs(), []
    monkeypatch.setattr(
        "gptmanager.decoding.guided.grammar_masks.token_masks.mask_logits",
        lambda *arguments: (calls.append(1), mask_logits(*arguments)),
    )
    assert outputs(device=device, dtype="float32") == expected and calls

"""Log probabilities of given tokens against the CPU's `Sampler` and float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_values import close, randn

from gptmanager.cuda.sampling import sampling
from gptmanager.cuda.sampling.log_probs import LOG_PROB, LOGIT, NOTHING, log_probs
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.executor.choice.prompt_scores import DevicePromptScorer, PromptScorer
from gptmanager.request.output_options import OutputConfig
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import NO_TOKEN, NOT_FINITE

TEMPERATURES = (1.0, 0.0, 0.3, 1.7)
UNTOUCHED = 123.0


def run(machine, logits, tokens, temperatures, wanted):
    """A slot for each row, in reverse."""
    count, vocab_size = logits.shape
    params = [SamplingParams(temperature=own) for own in reversed(temperatures)]
    packed = [sampling.pack(own, vocab_size) for own in params]
    table = np.array(packed, dtype=sampling.PARAMS).view(np.uint8).reshape(count, -1)
    slots = np.arange(count, dtype=np.int32)[::-1].copy()
    given = [
        torch.tensor(tokens, dtype=torch.int32),
        torch.from_numpy(table),
        torch.tensor(wanted[::-1], dtype=torch.uint8),
        torch.from_numpy(slots),
    ]
    values = machine.tensor(torch.full(given[0].shape, UNTOUCHED))
    log_probs(machine.launcher, values, machine.tensor(logits), *map(machine.tensor, given))
    return values.cpu()


def textbook(logits, tokens, temperatures):
    scales = torch.tensor([own or 1.0 for own in temperatures])
    scores = (logits / scales[:, None]).double().log_softmax(1)
    return scores[torch.arange(len(logits)), torch.tensor(tokens)]


def test_one_row(machine):
    logits = randn(1, 40)
    close(run(machine, logits, [7], [0.5], [LOG_PROB]), textbook(logits, [7], [0.5]))


@pytest.mark.parametrize("vocab_size", [1, 31, 1003, 2048, 9000])
def test_against_float64(machine, vocab_size):
    logits = randn(4, vocab_size) * 5
    tokens = [0, vocab_size - 1, vocab_size // 2, 0]
    got = run(machine, logits, tokens, TEMPERATURES, [LOG_PROB] * 4)
    close(got, textbook(logits, tokens, TEMPERATURES), absolute=1e-5)


def test_what_slots_want(machine):
    logits = randn(3, 40)
    got = run(machine, logits, [3, 4, 5], [0.5] * 3, [NOTHING, LOG_PROB, LOGIT])
    assert got[0] == UNTOUCHED
    close(got[1:2], textbook(logits[1:2], [4], [0.5]))
    assert got[2] == logits[2, 5] / 0.5


def test_a_row_without_a_slot(machine):
    """What stands before the first slot wants something."""
    packed = [sampling.pack(SamplingParams(), 40)] * 2
    table = np.array(packed, dtype=sampling.PARAMS).view(np.uint8).reshape(2, -1)
    params = machine.tensor(torch.from_numpy(table))[1:]
    wanted = machine.tensor(torch.tensor([LOG_PROB, NOTHING], dtype=torch.uint8))[1:]
    values = machine.tensor(torch.full((2,), UNTOUCHED))
    tokens, slots = (torch.tensor(own, dtype=torch.int32) for own in ([3, 4], [-1, 0]))
    given = machine.tensor(randn(2, 40)), machine.tensor(tokens), params, wanted
    log_probs(machine.launcher, values, *given, machine.tensor(slots))
    assert values.tolist() == [UNTOUCHED] * 2


@pytest.mark.parametrize("vocab_size", [1003, 4000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(machine, dtype, vocab_size):
    """The same bits as of the same logits in single precision."""
    logits = (randn(4, vocab_size) * 5).to(dtype)
    tokens = [0, vocab_size - 1, vocab_size // 2, 0]
    rest = tokens, TEMPERATURES, [LOG_PROB] * 4
    assert torch.equal(run(machine, logits, *rest), run(machine, logits.float(), *rest))


def test_odd_logits_as_on_the_cpu(machine):
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor(
        [
            *([-inf] * 4, [nan, 1.0, nan, 0.0], [0.0, inf, 3.0, inf], [-inf, -inf, 2.0, -inf]),
            *([nan] * 4, [-inf, -3e38, -inf, -3e38], [-inf] * 4),
        ]
    )
    temperatures = [1.0, 0.7, 1.0, 2.0, 1.0, 0.5, 0.5]  # the sixth row overflows to -inf
    sampler = Sampler(7, 4)
    for slot, temperature in enumerate(temperatures):
        sampler.load(slot, SamplingParams(temperature=temperature), 0, OutputConfig(log_probs=True))
    places, expected = np.arange(7), np.zeros(7, np.float32)
    tokens = sampler.sample(logits.clone(), places, places, expected)
    assert tokens.tolist() == [NO_TOKEN, NOT_FINITE, NOT_FINITE, 2, NOT_FINITE, 1, NO_TOKEN]
    # where there is no token the first one is asked for, and what comes of it is nobody's
    inputs = np.maximum(tokens, 0).tolist()
    got = run(machine, logits, inputs, temperatures, [LOG_PROB] * 7)
    close(got[tokens >= 0], torch.from_numpy(expected[tokens >= 0]).double())


def test_rows_without_a_finite_score(machine):
    """A logit of -inf keeps its value next to finite logits that overflow."""
    inf = torch.inf
    logits = torch.tensor([[-inf, -inf], [-inf, -3e38], [-inf, 3e38]])
    got = run(machine, logits, [[0, 1]] * 3, [0.5] * 3, [LOG_PROB] * 3)
    assert got.tolist() == [[-inf, -inf], [-inf, 0], [0, 0]]


@pytest.mark.parametrize("normalized", [False, True])
def test_odd_rows_of_prompts_as_on_the_cpu(machine, normalized):
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor(
        [[-inf] * 4, [nan, 1.0, 2.0, 3.0], [0.0, inf, 3.0, 1.0], [-inf, -inf, 2.0, 1.0]]
    )
    targets, own = np.array([0, 1, 2, 0]), machine.tensor(logits)
    single, best, top = PromptScorer(4).score(logits.clone(), targets, 2, normalized=normalized)
    expected = torch.cat((single[:, None], best), dim=1)
    assert expected.isnan().all(dim=1).tolist() == [True, True, True, False]
    scorer = DevicePromptScorer(
        *(machine.launcher, own.device, 4),
        lambda arrays: tuple(machine.tensor(torch.from_numpy(it)) for it in arrays),
    )
    scores, ids = scorer.score(own, targets, 2, normalized=normalized)
    torch.testing.assert_close(scores.cpu(), expected, equal_nan=True)
    assert ids[3].tolist() == top[3].tolist()


def test_several_tokens_of_a_row(machine):
    """Each has the bits that it has alone; more than a block has threads."""
    logits = randn(3, 1003) * 5
    tokens = [[(17 * row + 5 * i) % 1003 for i in range(700)] for row in range(3)]
    rest = TEMPERATURES[1:], [LOGIT, LOG_PROB, NOTHING]
    got = run(machine, logits, tokens, *rest)
    for column in (0, 1, 511, 512, 699):
        alone = run(machine, logits, [own[column] for own in tokens], *rest)
        assert torch.equal(got[:, column], alone)
    assert run(machine, logits, [[]] * 3, *rest).shape == (3, 0)


def test_there_is_no_race(checked_machine):
    logits = randn(2, 3000)
    got = run(checked_machine, logits, [7, 8], [1.0, 0.5], [LOG_PROB] * 2)
    close(got, textbook(logits, [7, 8], [1.0, 0.5]))
    got = run(checked_machine, logits, [7, 8], [1.0, 0.5], [LOGIT] * 2)
    assert got.tolist() == [logits[0, 7], logits[1, 8] / 0.5]


def test_tensors_that_do_not_fit(machine):
    with pytest.raises(ValueError, match=r"values is torch.float32 \[2\], expected .* \[1\]"):
        run_with = machine.empty((2,), torch.float32), machine.empty((1, 8), torch.float32)
        ids = machine.empty((1,), torch.int32)
        table = machine.empty((1, 56), torch.uint8)
        log_probs(machine.launcher, *run_with, ids, table, table[0, :1], ids)

"""Sampling: kept sets against transformers, the drawn distribution, random numbers, invariance."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gptmanager.decoding.sampling import choice
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.kernels.simd.threads import run_alone
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import NO_TOKEN, NOT_FINITE

# (temperature, top_k, top_p, min_p)
SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.3, 100, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (0.8, 0, 0.5, 0.0),
    (2.0, 0, 0.07, 0.0),
    (1.0, 0, 1.0, 0.2),
    (1.0, 12, 0.8, 0.0),
    (1.5, 12, 0.95, 0.1),
    (0.9, 0, 0.7, 0.15),
]


def params(
    setting: tuple[float, int, float, float] = (1.0, 0, 1.0, 0.0), seed: int = 0, **more: Any
) -> SamplingParams:
    temperature, top_k, top_p, min_p = setting
    return SamplingParams(False, temperature, top_k, top_p, min_p, seed, **more)


def sampler_of(all_params: list[SamplingParams], vocab_size: int, prompt_len: int = 0) -> Sampler:
    sampler = Sampler(len(all_params), vocab_size)
    for slot, one in enumerate(all_params):
        sampler.load(slot, one, prompt_len)
    return sampler


def draw_many(
    row: torch.Tensor, setting: tuple[float, int, float, float], count: int, seed: int = 1
) -> np.ndarray:
    """`count` tokens for the same logits, at as many positions."""
    sampler = sampler_of([params(setting, seed)], len(row))
    slots, positions = np.zeros(count, dtype=np.int64), np.arange(count)
    return sampler.sample(row.repeat(count, 1), slots, positions)


def warped(row: torch.Tensor, setting: tuple[float, int, float, float]) -> np.ndarray:
    """The probabilities that transformers samples from.

    Where its top-p cuts through equal logits, an unstable sort decides there which ones stay; here
    as many of them stay, those of the lowest ids.
    """
    temperature, top_k, top_p, min_p = setting
    no_ids: Any = None
    scores = scaled = TemperatureLogitsWarper(temperature)(no_ids, row[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(no_ids, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(no_ids, scores)
    if min_p:
        scores = MinPLogitsWarper(min_p)(no_ids, scores)
    dropped = scaled[0].argsort(descending=True, stable=True)[int((scores > -torch.inf).sum()) :]
    kept = scaled[0].index_fill(0, dropped, -torch.inf)
    return np.asarray(kept.double().softmax(-1))


def random_row(seed: int, vocab_size: int, scale: float = 2.0, step: float = 0.0) -> torch.Tensor:
    """Normal logits; `step` rounds them, for many ties."""
    row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * scale
    return (row / step).round() * step if step else row


def assert_fits(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square of the observed counts, entries expected less than five times taken together."""
    counts = np.bincount(tokens, minlength=len(probabilities)).astype(np.float64)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    often = expected >= 5
    observed = np.append(counts[often], counts[~often].sum())
    wanted = np.append(expected[often], expected[~often].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    degrees = max(1, len(wanted) - 1)
    assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 10


# Greedy -------------------------------------------------------------------------------------


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    logits = torch.zeros(3, 1000)
    logits[0, [400, 999]] = 2.0
    logits[2, [0, 1]] = 1.0
    sampler = sampler_of([SamplingParams()], 1000)
    tokens = sampler.sample(logits, np.zeros(3, dtype=np.int64), np.arange(3))
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [400, 0, 0]


@pytest.mark.parametrize(
    "one",
    [
        params((0.0, 0, 1.0, 0.0)),
        params((1.0, 1, 1.0, 0.0)),
        params((1.0, 0, 0.0, 0.0)),
        params((1e-45, 0, 1.0, 0.0)),
    ],
)
def test_what_leaves_only_the_best_token_is_greedy(one: SamplingParams) -> None:
    logits = torch.stack([random_row(seed, 200, step=1.0) for seed in range(8)])
    sampler = sampler_of([one], 200)
    tokens = sampler.sample(logits.clone(), np.zeros(8, dtype=np.int64), np.arange(8))
    assert tokens.tolist() == logits.numpy().argmax(1).tolist()


def test_greedy_rows_and_sampling_rows_share_a_batch() -> None:
    everyone = [SamplingParams(), params((1.0, 3, 1.0, 0.0), seed=5), params(seed=6)]
    logits = torch.stack([random_row(seed, 64) for seed in range(3)])
    tokens = sampler_of(everyone, 64).sample(logits.clone(), np.arange(3), np.full(3, 9))
    assert tokens[0] == int(logits[0].argmax())
    assert tokens[1] in logits[1].topk(3).indices.tolist()


# min_length ---------------------------------------------------------------------------------


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("ends", [(7,), (7, 0, 49)])
def test_end_ids_come_only_after_min_length_tokens(greedy: bool, ends: tuple[int, ...]) -> None:
    logits = torch.zeros(6, 50)
    logits[:, ends] = torch.linspace(50, 60, len(ends))
    one = SamplingParams(greedy=greedy, min_length=3, end_ids=ends)
    sampler = sampler_of([one], 50, prompt_len=10)
    tokens = sampler.sample(logits, np.zeros(6, dtype=np.int64), 10 + np.arange(6))
    assert np.isin(tokens, ends).tolist() == [False] * 3 + [True] * 3


@pytest.mark.parametrize("best", [0, 49])
def test_min_length_without_an_end_id_changes_nothing(best: int) -> None:
    logits = torch.zeros(1, 50)
    logits[0, best] = 1.0
    for end_ids in ((), (50,)):
        one = SamplingParams(min_length=3, end_ids=end_ids)
        assert sampler_of([one], 50).sample(logits, np.array([0]), np.array([0])) == [best]


def test_a_slot_taken_over_forgets_its_last_sequence() -> None:
    logits = torch.zeros(1, 50)
    logits[0, 7] = 50.0
    sampler = sampler_of([params(min_length=9, end_ids=(7,))], 50)
    sampler.load(0, SamplingParams(), 0)
    assert sampler.sample(logits, np.array([0]), np.array([0])) == [7]


# Kept sets ----------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("step", [0.0, 0.5])
def test_kept_set_is_that_of_transformers(
    setting: tuple[float, int, float, float], step: float
) -> None:
    for seed in range(4):
        row = random_row(seed, 40, scale=1.0, step=step)
        expected = warped(row, setting)
        drawn = set(draw_many(row, setting, 4000).tolist())
        assert drawn <= set(np.flatnonzero(expected).tolist())
        assert drawn >= set(np.flatnonzero(expected > 0.005).tolist())


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        ((1.0, 0, 0.5, 0.0), [0, 1, 2, 3]),
        ((1.0, 0, 0.8, 0.0), [0, 1, 2, 3, 4, 5, 6]),
        ((1.0, 0, 1e-9, 0.0), [0]),
        ((1.0, 2, 1.0, 0.0), list(range(8))),
        ((1.0, 2, 0.5, 0.0), [0, 1, 2, 3]),
        ((1.0, 0, 1.0, 1.0), list(range(8))),
    ],
)
def test_kept_set_of_equal_logits(
    setting: tuple[float, int, float, float], kept: list[int]
) -> None:
    row = torch.zeros(8)
    assert np.flatnonzero(warped(row, setting)).tolist() == kept
    assert sorted(set(draw_many(row, setting, 500).tolist())) == kept


def address(array: np.ndarray) -> int:
    return int(array.ctypes.data)


@njit
def called(loop: Any, arguments: Any) -> Any:
    """What a loop returns to compiled code, which alone can call it."""
    return loop(*arguments)


@given(
    st.integers(0, 2**20),
    st.integers(1, 3001),
    st.sampled_from([0.0, 0.25, 4.0]),
    st.sampled_from([1e-6, 1.0, 1e30]),
    st.sampled_from([0, 1000, 2990]),
)
def test_kth_best_logit(seed: int, k: int, step: float, scale: float, lost: int) -> None:
    row = random_row(seed, 3001, step=step).numpy() * np.float32(scale)
    row[:lost:2], row[1:lost:2] = -np.inf, np.nan
    ranked = np.sort(np.where(np.isnan(row), -np.inf, row))[::-1]
    scratch = np.empty(choice.FEW, dtype=np.float32)
    arguments = address(row), len(row), k, ranked[0], address(scratch)
    found = called(choice.find_kth, arguments)
    assert found == ranked[k - 1]


@given(st.integers(0, 2**20), st.integers(1, 700), st.sampled_from([0.0, 0.5]))
def test_mass_above_each_token(seed: int, size: int, step: float) -> None:
    row = random_row(seed, size, scale=1.0, step=step).numpy()
    weights = np.empty(choice.padded(size), dtype=np.float32)
    sums = np.empty(len(weights) // choice.BLOCK, dtype=np.float32)
    arrays = address(weights), address(sums)
    top = row.max()
    arguments = address(row), size, np.float32(0.7), top, choice.NOTHING, *arrays
    total = called(choice.weigh, arguments)
    exact = np.exp((row.astype(np.float64) - top) / np.float32(0.7))
    np.testing.assert_allclose(weights[:size], exact, rtol=1e-5)
    assert not weights[size:].any() and total == pytest.approx(exact.sum(), rel=1e-5)
    order, ids = np.argsort(-weights[:size], kind="stable"), np.arange(size)
    for rank in {0, 1, size // 2, size - 1} & set(range(size)):
        above = called(choice._sum_above, (address(weights), arrays[1], size, order[rank]))
        assert above == pytest.approx(weights[order[:rank]].sum(dtype=np.float64), rel=1e-6)
        if rank:  # a draw from these, just before the end of the best one's mass, is the best one
            counted = np.cumsum(np.where(np.isin(ids, order[:rank]), weights[:size], 0.0))
            fraction = (counted[order[0]] - weights[order[0]] / 100) / counted[-1]
            own = weights[order[rank]], order[rank], fraction
            assert called(choice._pick, (address(weights), arrays[1], size, *own)) == order[0]
        assert sums.sum(dtype=np.float64) == pytest.approx(above)


# Distribution -------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("vocab_size", [30, 333, 2048])
def test_tokens_follow_the_distribution_of_transformers(
    setting: tuple[float, int, float, float], vocab_size: int
) -> None:
    row = random_row(vocab_size, vocab_size, scale=1.5)
    assert_fits(draw_many(row, setting, 6000), warped(row, setting))


def test_seeds_give_independent_tokens() -> None:
    row = random_row(3, 100)
    sampler = sampler_of([params(seed=seed) for seed in range(4000)], 100)
    tokens = sampler.sample(row.repeat(4000, 1), np.arange(4000), np.full(4000, 5))
    assert_fits(tokens, warped(row, SETTINGS[0]))


# Invariance ---------------------------------------------------------------------------------


def mixed_batch(vocab_size: int) -> tuple[list[SamplingParams], torch.Tensor]:
    everyone = [
        params(setting, seed=2**60 + 17 * index + repeat)
        for repeat, (index, setting) in itertools.product(range(2), enumerate(SETTINGS))
    ]
    everyone += [SamplingParams(), params((1.0, vocab_size // 2, 0.9, 0.0), seed=3)]
    logits = [random_row(i, vocab_size, step=(i % 2) * 0.25) for i in range(len(everyone))]
    return everyone, torch.stack(logits)


@pytest.mark.parametrize("vocab_size", [50, 517, 40_001])
def test_a_token_does_not_depend_on_the_batch(vocab_size: int) -> None:
    # Given one row of each kind
    everyone, logits = mixed_batch(vocab_size)
    sampler = sampler_of(everyone, vocab_size)
    slots = np.arange(len(everyone))
    positions = 100 + slots
    # When they are sampled together, alone, and shuffled in halves
    together = sampler.sample(logits.clone(), slots, positions)
    alone = [
        sampler.sample(logits[i : i + 1].clone(), slots[i : i + 1], positions[i : i + 1])[0]
        for i in slots
    ]
    order = np.random.default_rng(0).permutation(len(everyone))
    halves = np.concatenate(
        [sampler.sample(logits[half], half, positions[half]) for half in np.array_split(order, 2)]
    )
    # Then each has the same token
    assert together.tolist() == alone
    assert together[order].tolist() == halves.tolist()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_token_does_not_depend_on_the_number_of_threads(threads: int) -> None:
    everyone, logits = mixed_batch(20_001)
    sampler = sampler_of(everyone, 20_001)
    slots, before = np.arange(len(everyone)), torch.get_num_threads()
    one_thread = sampler.sample(logits.clone(), slots, slots)
    torch.set_num_threads(threads)
    try:
        assert sampler.sample(logits, slots, slots).tolist() == one_thread.tolist()
    finally:
        torch.set_num_threads(before)


def test_each_thread_has_scratch_memory_of_its_own() -> None:
    class SecondThread:
        max_size = 2

        def run(self, body: int, task: Any, size: int) -> None:
            task.next_thread = size - 1
            run_alone(body, task)

    sampler = Sampler(2, 20_001, histories=np.full((2, 4), 3, dtype=np.int32))
    sampler._team = SecondThread()
    for slot in range(2):
        sampler.load(slot, params((0.7, 0, 0.9, 0.0), repetition_penalty=1.3), 4)
    slots = np.arange(2)
    logits = torch.stack([random_row(slot, 20_001) for slot in range(2)])
    before = sampler.sample(logits.clone(), slots, slots + 4).tolist()
    sampler._seen[0], sampler._weights[0] = 7, 7.0
    assert sampler.sample(logits, slots, slots + 4).tolist() == before
    assert (sampler._seen[0] == 7).all() and (sampler._weights[0] == 7).all()
    assert not sampler._seen[1].any()


def test_tokens_depend_on_seed_and_position() -> None:
    row = torch.zeros(1, 10_000)
    sampler = sampler_of([params(seed=1), params(seed=2)], 10_000)
    tokens = {
        int(sampler.sample(row.clone(), np.array([slot]), np.array([position]))[0])
        for slot in (0, 1)
        for position in (0, 1, 2**33)
    }
    assert len(tokens) == 6


# Odd logits ---------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", SETTINGS)
def test_odd_logits_harm_their_own_row_only(setting: tuple[float, int, float, float]) -> None:
    # Given rows of all kinds of oddities beside a sound one
    nan, inf, lowest = torch.nan, torch.inf, torch.finfo(torch.float32).min
    logits = random_row(0, 600).repeat(8, 1)
    logits[1] = nan
    logits[2, ::2] = nan
    logits[3, [40, 30]] = inf
    logits[4] = -inf
    logits[5] = lowest
    logits[5, 11] = 3.0
    logits[6, [20, 21]] = torch.tensor([nan, inf])
    logits[7] = -inf
    logits[7, [5, 6]] = 1.0
    sampler = sampler_of([params(setting, seed=4)], 600)
    slots, positions = np.zeros(8, dtype=np.int64), np.full(8, 3)
    # When they are sampled together
    tokens = sampler.sample(logits.clone(), slots, positions)
    # Then the sound one is what it is alone, and the others are as documented
    assert tokens[0] == sampler.sample(logits[:1].clone(), slots[:1], positions[:1])[0]
    assert tokens[[1, 2, 3, 6]].tolist() == [NOT_FINITE] * 4
    assert tokens[4] == NO_TOKEN
    assert tokens[5] == 11
    assert tokens[7] in (5, 6)


def test_a_logit_that_the_temperature_makes_infinite_has_all_the_mass() -> None:
    sampler = sampler_of([SamplingParams(False, temperature=0.5)], 2)
    scores = sampler.log_probs(torch.tensor([[3e38, 1.0]]), *np.zeros((2, 1), dtype=np.int64))
    assert scores[0, 0] == 0 and scores[0, 1] < -1e38


def test_greedy_with_nan() -> None:
    logits = torch.tensor([[0.0, torch.nan, 2.0, 1.0], [torch.nan] * 4, [-torch.inf] * 4])
    sampler = sampler_of([SamplingParams()], 4)
    tokens = sampler.sample(logits, np.zeros(3, dtype=np.int64), np.arange(3))
    assert tokens.tolist() == [NOT_FINITE, NOT_FINITE, NO_TOKEN]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 128, 129, 300])
@pytest.mark.parametrize("odd", [torch.nan, -torch.nan, torch.inf])
def test_one_odd_logit_is_found_at_every_place(size: int, odd: float) -> None:
    logits = random_row(0, size).repeat(size, 1)
    logits.fill_diagonal_(odd)
    tokens = sampler_of([params()], size).sample(logits, *np.zeros((2, size), dtype=np.int64))
    assert (tokens == NOT_FINITE).all()


def test_an_odd_logit_of_a_banned_token_does_not_count() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 2.0]])
    banned = params(end_ids=(0,), min_length=3, bad_words=((2,),))
    tokens = sampler_of([banned], 3).sample(logits, *np.zeros((2, 1), dtype=np.int64))
    assert tokens.tolist() == [1]


def test_log_probs_of_odd_rows_are_nan() -> None:
    nan, inf = torch.nan, torch.inf
    logits = torch.tensor([[0.0, nan, 1.0], [0.0, -inf, inf], [-inf] * 3, [0.0, -inf, 1.0]])
    slots = np.zeros(4, dtype=np.int64)
    scores = sampler_of([params()], 3).log_probs(logits, slots, slots)
    assert scores[:2].isnan().all() and (scores[2] == -inf).all()
    assert scores[3, 1] == -inf and scores[3].exp().sum() == pytest.approx(1)


def test_logits_of_inference_mode() -> None:
    with torch.inference_mode():
        logits = torch.full((2, 600), torch.nan)
        logits[0] = -torch.inf
        logits[0, 7] = 1.0
        sampler = sampler_of([params((1.0, 0, 0.9, 0.1), end_ids=(9,), min_length=1)], 600)
        tokens = sampler.sample(logits, np.zeros(2, dtype=np.int64), np.arange(2))
    assert tokens.tolist() == [7, NOT_FINITE]


def test_an_empty_batch() -> None:
    empty = np.zeros(0, dtype=np.int64)
    assert sampler_of([params()], 16).sample(torch.zeros(0, 16), empty, empty).shape == (0,)


@pytest.mark.parametrize(
    "logits", [torch.zeros(1, 15), torch.zeros(2, 16), torch.zeros(1, 16).double()]
)
def test_other_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="logits must be"):
        sampler_of([params()], 16).sample(logits, np.array([0]), np.array([0]))

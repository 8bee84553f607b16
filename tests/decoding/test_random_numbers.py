"""Random numbers: known answers, the documented function, uniformity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmanager.decoding.sampling.random_numbers import derive_seed, rounds, uniform

WORDS_32 = st.integers(0, 2**32 - 1)


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(10):
        high_0, low_0 = divmod(0xD2511F53 * c[0], 2**32)
        high_1, low_1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high_1 ^ c[1] ^ k[0], low_1, high_0 ^ c[3] ^ k[1], low_0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def assert_even(cells: np.ndarray, num_cells: int) -> None:
    """Chi-square of counts that should all be the same."""
    counts = np.bincount(cells, minlength=num_cells)
    expected = len(cells) / num_cells
    statistic = float(((counts - expected) ** 2 / expected).sum())
    degrees = num_cells - 1
    assert statistic < degrees + 5 * np.sqrt(2 * degrees) + 10


def test_derived_seeds_are_the_known_answers_of_splitmix64() -> None:
    seeds = [derive_seed(1234567, number) for number in range(2)]
    assert seeds == [6457827717110365317, 3203168211198807973]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that Random123 ships
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_known_answers(counter: str, key: str, expected: str) -> None:
    words = [[int(word, 16) for word in text.split()] for text in (counter, key, expected)]
    arrays = [np.array([word], dtype=np.uint64) for word in words[0] + words[1]]
    assert [int(word[0]) for word in rounds(*arrays)] == words[2]
    assert scalar_philox(words[0], words[1]) == words[2]


@given(st.lists(st.tuples(*[WORDS_32] * 6), min_size=1, max_size=4))
def test_philox_is_the_scalar_one_in_every_column(columns: list[tuple[int, ...]]) -> None:
    words = np.array(columns, dtype=np.uint64).T
    expected = [scalar_philox(list(column[:4]), list(column[4:])) for column in columns]
    assert np.stack(rounds(*words)).T.tolist() == expected


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 5))
def test_uniform_is_the_documented_function(seed: int, position: int, draw: int) -> None:
    words = scalar_philox([position % 2**32, position >> 32, draw, 0], [seed % 2**32, seed >> 32])
    expected = ((words[0] << 32 | words[1]) >> 11) / 2**53
    assert uniform(np.array([seed], dtype=np.uint64), np.array([position]), draw) == [expected]


@pytest.mark.parametrize("varied", ["seed", "high seed", "position", "draw"])
def test_uniform_numbers_are_uniform_and_independent(varied: str) -> None:
    n = 40_000
    index = np.arange(n)
    seeds = np.full(n, 12345, dtype=np.uint64)
    positions = np.full(n, 77)
    if varied == "draw":
        numbers = np.concatenate([uniform(seeds[:1], positions[:1], draw) for draw in range(4000)])
    elif varied == "position":
        numbers = uniform(seeds, index)
    else:
        shift = np.uint64(32 if varied == "high seed" else 0)
        numbers = uniform(index.astype(np.uint64) << shift, positions)
    assert 0 <= numbers.min() and numbers.max() < 1
    assert_even((numbers * 64).astype(np.int64), 64)
    pairs = (numbers[:-1] * 8).astype(np.int64) * 8 + (numbers[1:] * 8).astype(np.int64)
    assert_even(pairs[::2], 64)

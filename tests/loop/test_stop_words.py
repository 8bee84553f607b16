"""The stop-word automaton against naive search."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gptmanager.decoding.end_rule import EndRule, restored_end_rule
from gptmanager.decoding.stop_words import StopWords

TOKENS = st.integers(0, 2)
WORDS = st.lists(st.lists(TOKENS, min_size=1, max_size=5), max_size=6)
ROOMS = st.integers(0, 4)
TEXTS = st.lists(TOKENS, max_size=40)


def naive_match(words: Sequence[Sequence[int]], text: Sequence[int]) -> int:
    return max((len(word) for word in words if text[-len(word) :] == word), default=0)


def naive_held(words: Sequence[Sequence[int]], text: list[int], room: int = 4) -> int:
    """What the first word to end in any continuation would cut off of the text."""
    cuts = [0]
    for token in range(3 if room else 0):
        matched = naive_match(words, [*text, token])
        cuts.append(matched - 1 if matched else naive_held(words, [*text, token], room - 1) - 1)
    return max(cuts)


def run(words: Sequence[Sequence[int]], text: Sequence[int]) -> list[tuple[int, int]]:
    """For each token the matched length and how many tokens are held back."""
    automaton, state, seen = StopWords(words), 0, []
    for token in text:
        state, matched = automaton.advance(state, token)
        seen.append((matched, automaton.held(state)))
    return seen


@given(WORDS, TEXTS)
def test_matches_are_those_of_naive_search(words: list[list[int]], text: list[int]) -> None:
    expected = [naive_match(words, text[:end]) for end in range(1, len(text) + 1)]
    assert [matched for matched, _ in run(words, text)] == expected


@given(WORDS, st.lists(TOKENS, max_size=6), ROOMS)
def test_held_is_what_may_yet_be_cut_off_and_no_more(
    words: list[list[int]], text: list[int], room: int
) -> None:
    automaton, state = StopWords(words), 0
    for token in text:
        state, matched = automaton.advance(state, token)
        if matched:
            return
    assert automaton.held(state, room) == naive_held(words, text, room)
    if room == 4:  # no word is longer than 5
        assert automaton.held(state) == naive_held(words, text, room)


@given(WORDS, TEXTS)
def test_replaying_the_history_gives_the_state_back(
    words: list[list[int]], text: list[int]
) -> None:
    states = []
    for automaton in (StopWords(words), StopWords(words)):
        state = 0
        for token in text:
            state, _ = automaton.advance(state, token)
        states.append(state)
    assert states[0] == states[1]


@given(WORDS, TEXTS)
def test_what_is_not_held_is_never_taken_back(words: list[list[int]], text: list[int]) -> None:
    """A stream that shows all but the held tokens has shown nothing of a word that then ends."""
    shown = 0
    for end, (matched, held) in enumerate(run(words, text), start=1):
        if matched:
            assert shown <= end - matched
            return
        shown = max(shown, end - held)


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        pytest.param([], [1, 2], [(0, 0), (0, 0)], id="no words"),
        pytest.param([[]], [1], [(0, 0)], id="an empty word never matches"),
        pytest.param([[7]], [3, 7], [(0, 0), (1, 0)], id="one token is never held"),
        pytest.param([[1, 2]], [1, 1, 2], [(0, 1), (0, 1), (2, 0)], id="restart on itself"),
        pytest.param(
            [[1, 2, 3], [2]], [1, 2, 3], [(0, 0), (1, 2), (3, 0)], id="the nested one ends first"
        ),
        pytest.param(
            [[3], [2, 3], [1, 2, 3]], [1, 2, 3], [(0, 1), (0, 2), (3, 0)], id="the longest is cut"
        ),
        pytest.param(
            [[1, 2, 3, 4], [2, 3, 5]],
            [1, 2, 3, 5],
            [(0, 1), (0, 2), (0, 3), (3, 0)],
            id="a failed longer word leaves the shorter one alive",
        ),
        pytest.param([[1, 2], [1, 3]], [1, 3], [(0, 1), (2, 0)], id="a shared prefix"),
        pytest.param([[1, 1, 1]], [1, 1, 2], [(0, 1), (0, 2), (0, 0)], id="released when it fails"),
    ],
)
def test_examples(words: list[list[int]], text: list[int], expected: list[tuple[int, int]]) -> None:
    assert run(words, text) == expected


def test_many_words_that_share_prefixes_stay_small() -> None:
    words = [[token] * length + [1000 + token] for token in range(20) for length in range(1, 30)]
    automaton = StopWords(words)
    edges = sum(len(edges) for edges in automaton._next)
    assert edges <= 2 * sum(len(word) for word in words)


@pytest.mark.parametrize("words", [None, [[1, 2], [3]]])
def test_a_restored_end_rule_ends_where_the_first_one_did(words):
    stop_words = None if words is None else StopWords(words)
    rule = EndRule(9, frozenset({7}), stop_words, include_stop=True)
    restored = restored_end_rule(rule.state(), [7])
    assert restored.state() == rule.state() and restored.end_ids == rule.end_ids
    assert restored.find(0, 3, 1) == rule.find(0, 3, 1)


def test_at_the_end_no_token_waits_for_a_word_that_does_not_fit():
    rule = EndRule(4, stop_words=StopWords([[1, 2, 3]]))
    state, _ = rule.find(0, 1, 1)
    assert [rule.num_final(state, length) for length in (1, 2, 3)] == [0, 1, 3]

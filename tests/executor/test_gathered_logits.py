"""`GatheredLogits` alone: which logits the rows of a step need, and for whom they are copied."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager.executor.choice.gathered_logits import (
    ContextPart,
    GatheredLogits,
    split_context,
    with_context,
)
from gptmanager.executor.packed_rows import PackedRows
from gptmanager.request.output_options import NO_EXTRAS, OutputConfig
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import Row, SequenceStart

PROMPT = 10
LOGITS, SCORES = OutputConfig(context_logits=True), OutputConfig(num_prompt_log_probs=0)
TOP, BOTH = OutputConfig(num_top_log_probs=3), LOGITS._replace(num_prompt_log_probs=2)
GENERATED, CHOSEN = OutputConfig(generation_logits=True), OutputConfig(log_probs=True)


def start(slot, config, prompt_len=PROMPT):
    # after a pause, the tokens generated before it follow the prompt
    tokens = (1,) * (prompt_len + 4)
    return SequenceStart(slot, tokens, prompt_len, SamplingParams(), output_config=config)


def row(slot, position=0, num_tokens=PROMPT, **given):
    return Row(10 + slot, 0, slot, position, num_tokens, **{"samples": True, **given})


def loaded(*configs):
    made = GatheredLogits(len(configs))
    made.load([start(slot, config) for slot, config in enumerate(configs)])
    return made


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (NO_EXTRAS, (False, False, False, False)),
        (LOGITS, (True, False, False, False)),
        (SCORES, (True, False, False, False)),
        (GENERATED, (False, True, False, False)),
        (CHOSEN, (False, False, True, False)),
        (TOP, (False, False, True, True)),
        (OutputConfig(num_top_log_probs=1), (False, False, True, True)),
    ],
    ids=["nothing", "logits", "scores", "generated", "chosen", "top", "best"],
)
def test_flags_show_whether_any_sequence_asks(config, flags):
    made, slots = GatheredLogits(2), np.array([0, 1])

    def found():
        return made.any_context, made.any_generation, made.any_log_probs, made.any_top

    assert found() == (False, False, False, False)
    made.load([start(0, NO_EXTRAS), start(1, config)])
    assert found() == flags and made.config(1) is config and made.config(0) is NO_EXTRAS
    assert made.wants_logits(slots) is flags[1] and made.wants_log_probs(slots) is flags[2]
    assert not made.wants_logits(slots[:1]) and not made.wants_log_probs(slots[:1])
    counts = made.num_top(slots)
    assert counts.tolist() == [0, config.num_top_log_probs] and counts.dtype == np.int32
    made.load([start(1, NO_EXTRAS)])
    assert found() == (False, False, False, False)


def test_a_flag_alone_does_not_want_the_logits_of_a_slot():
    made = loaded(GENERATED, NO_EXTRAS)
    assert made.wants_logits(np.array([1, 0])) and not made.wants_logits(np.array([1]))


def test_parts_of_contexts_end_with_the_prompt():
    """No logits score the token after the prompt, and tokens generated before a pause have none."""
    made = loaded(NO_EXTRAS, LOGITS, SCORES, BOTH, GENERATED)
    whole = [row(slot, 0, PROMPT + 4) for slot in range(5)]
    assert made.context_parts(whole) == [
        ContextPart(1, whole[1], 10, 0),
        ContextPart(2, whole[2], 0, 9),
        ContextPart(3, whole[3], 10, 9),
    ]
    assert [part.num_tokens for part in made.context_parts(whole)] == [10, 9, 10]
    chunks = [row(3, 4, 3), row(3, 8, 6), row(3, 9, 1), row(3, 10, 2), row(2, 9, 1)]
    found = [(part.number, *part[2:]) for part in made.context_parts(chunks)]
    assert found == [(0, 3, 3), (1, 2, 1), (2, 1, 0)]


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (100, [[10, 10, 10]]),
        (18, [[10, 10, 10]]),
        (9, [[10, 10], [10]]),
        (12, [[10, 10, 3], [7]]),
        (5, [[5], [5, 10, 1], [5], [4]]),
    ],
)
def test_batches_have_a_limited_number_of_tokens_to_score(most, sizes):
    made = loaded(SCORES, NO_EXTRAS, SCORES)
    rows = [row(slot, num_drafts=2) for slot in range(3)]
    batches = [*made.batches(rows, most)]
    assert [[it.num_tokens for it in batch] for batch in batches] == sizes
    for own in rows:
        pieces = [it for batch in batches for it in batch if it.slot == own.slot]
        assert [it.samples for it in pieces] == [False] * (len(pieces) - 1) + [True]
        assert [it.num_drafts for it in pieces] == [0] * (len(pieces) - 1) + [2]
        ends = [it.position + it.num_tokens for it in pieces]
        assert [it.position for it in pieces] == [0, *ends[:-1]] and ends[-1] == PROMPT


def test_logits_of_adjacent_rows_are_copied_together():
    made = loaded(GENERATED, NO_EXTRAS, GENERATED, GENERATED)
    logits, copied = torch.arange(24.0).view(12, 2), []

    def to_cpu(own):
        copied.append(len(own))
        return own.clone()

    slots, firsts = np.array([2, 0, 1, 3, 1]), np.array([0, 2, 3, 7, 11, 12])
    found = made.generation_logits(slots, firsts, logits, to_cpu)
    assert [number for number, _ in found] == [0, 1, 3] and copied == [3, 4]
    for number, own in found:
        assert torch.equal(own, logits[firsts[number] : firsts[number + 1]])
    assert made.generation_logits(slots[2:3], firsts[:2], logits, to_cpu) == ()
    assert len(made.generation_logits(slots[3:4], firsts[:2], logits, to_cpu)) == 1


def test_logits_of_contexts_follow_those_to_sample_from():
    lines = np.arange(3)
    rows = PackedRows(
        *(lines, np.array([0, 4, 10, 11], dtype=np.int32), np.full(3, 10, dtype=np.int32)),
        *(np.zeros(11, dtype=np.int64), np.zeros(11, dtype=np.int64)),
        *(np.array([9, 10]), np.array([1, 2]), 2),
    )
    parts = [ContextPart(0, row(0), 2, 3), ContextPart(1, row(1), 4, 0)]
    found = with_context(rows, parts)
    assert found.sample_index.tolist() == [9, 10, 0, 1, 2, 4, 5, 6, 7]
    assert found.sample_rows.tolist() == [1, 2, 0, 0, 0, 1, 1, 1, 1]
    assert found.samples_prompts and not rows.samples_prompts
    logits = torch.arange(9.0).unsqueeze(1)
    sampled, pieces = split_context(logits, parts)
    assert sampled.flatten().tolist() == [0, 1]
    assert [it.flatten().tolist() for it in pieces] == [[2, 3, 4], [5, 6, 7, 8]]

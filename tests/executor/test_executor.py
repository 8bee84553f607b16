"""One step without a manager: which line belongs to whom, and what a quiet step passes."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gptmanager
from gptmanager import OptionalParams
from gptmanager.assembly.backend import StepOptions
from gptmanager.assembly.cpu_backend import CpuBackend
from gptmanager.assembly.sizing import Sizes
from gptmanager.decoding.lines import Lines
from gptmanager.executor.packed_rows import offsets
from gptmanager.executor.step_in_flight import SamplingRows, accepted
from gptmanager.request.output_options import OutputConfig
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import BlockAppend, Drafts, Row, Schedule, SequenceStart

PACKAGE = Path(gptmanager.__file__).parent


class CountingModel:
    """The token after t is t + 1."""

    nbytes = 0
    spec = SimpleNamespace(
        num_layers=1, num_kv_heads=1, head_dim=8, vocab_size=32, max_position_embeddings=64
    )

    def forward(self, batch, kv_pool):
        self.batch = batch
        logits = torch.zeros(len(batch.sample_index), 32)
        next_tokens = batch.token_ids[batch.sample_index] + 1
        logits[torch.arange(len(logits)), next_tokens] = 1.0
        return logits


def executor(num_slots=4, max_beam_width=1):
    options = StepOptions(Lines(num_slots, max_beam_width))
    return CpuBackend(OptionalParams()).executor(
        CountingModel(), Sizes(8, 16, 64, 63, False, False, 64), options
    )


def start(slot, *tokens, config=None):
    given = {} if config is None else {"output_config": config}
    return SequenceStart(slot, tokens, len(tokens), SamplingParams(greedy=True), **given)


def context(*starts):
    return Schedule(
        0,
        tuple(Row(10 + s.slot, 0, s.slot, 0, len(s.tokens), True) for s in starts),
        starts=starts,
        block_appends=tuple(BlockAppend(s.slot, 0, (s.slot,)) for s in starts),
    )


def generation(position, *slots):
    return Schedule(1, (), tuple(Row(10 + slot, 0, slot, position, 1, True) for slot in slots))


def run(executor, schedule):
    step = executor.forward(schedule)
    executor.sample(step)
    return executor.result(step)


def test_each_beam_of_each_slot_has_a_line_of_its_own():
    lines = Lines(3, 4)
    found = [lines.of(slot, beam) for slot in range(3) for beam in range(4)]
    assert found == list(range(lines.count))
    assert [lines.slot_of(line) for line in found] == [0] * 4 + [1] * 4 + [2] * 4
    slots, beams = np.array([2, 0]), np.array([3, 1])
    assert lines.of(slots, beams).tolist() == [11, 1] and lines.of(slots).tolist() == [8, 0]


def test_lines_are_computed_in_one_place():
    arithmetic = re.compile(r"(\*|//|%) *[\w.]*max_beam_width|max_beam_width *(\*|//|%|\+)")
    files = [*PACKAGE.glob("executor/**/*.py"), *PACKAGE.glob("decoding/**/*.py")]
    assert len(files) > 20
    found = {path.name for path in files if arithmetic.search(path.read_text("utf-8"))}
    assert found == {"lines.py"}


def test_memory_includes_the_cache_and_the_tables():
    tables, pool = executor(num_slots=3).runner.tables, executor().runner.kv_pool
    assert executor(num_slots=3).memory.cpu == pool.nbytes + 4 * (
        tables.tokens.size + tables.blocks.size  # int32
    )


def test_a_sampled_token_is_the_next_input():
    own = executor()
    assert run(own, context(start(0, 3, 4), start(2, 7, 8))).tokens.tolist() == [[5], [9]]
    assert run(own, generation(2, 0, 2)).tokens.tolist() == [[6], [10]]
    assert own.runner.model.batch.token_ids.tolist() == [5, 9]


@pytest.mark.parametrize("config", [None, OutputConfig(log_probs=True)])
def test_a_quiet_step_passes_four_files(config):
    """A step without optional outputs runs no code for them."""
    own, files = executor(), set()
    run(own, context(start(0, 3, 4), start(1, 7, 8, config=config)))

    def note(frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            files.add(path.relative_to(PACKAGE).as_posix())

    sys.setprofile(note)
    try:
        result = run(own, generation(2, 0, 1))
    finally:
        sys.setprofile(None)
    assert result.tokens.tolist() == [[6], [10]] and (result.extras is None) == (config is None)
    executing = ["torch_executor", "runner", "choice/token_chooser"]
    executing += [] if config is None else ["choice/gathered_logits"]
    expected = {f"executor/{name}.py" for name in executing} | {"decoding/sampling/sampling.py"}
    assert {file for file in files if file.startswith(("executor/", "decoding/"))} == expected


@pytest.mark.parametrize(
    "counts, expected", [([2, 0, 3], [0, 1, 0, 1, 2]), ([], [])], ids=["some", "none"]
)
def test_offsets_begin_anew_for_each_count(counts, expected):
    """None: an early piece of a context yields no token, whatever drafts its row has."""
    assert offsets(np.array(counts, dtype=np.int64)).tolist() == expected


def test_a_step_has_no_result_before_it_is_sampled():
    own = executor()
    step = own.forward(context(start(0, 3, 4)))
    with pytest.raises(RuntimeError, match="not sampled"):
        own.result(step)


# Drafts ------------------------------------------------------------------------------------------

WORDS = st.integers(0, 1)  # few, so that drafts are often right


@given(drafts=st.lists(st.lists(WORDS, max_size=4), min_size=1, max_size=4), data=st.data())
def test_a_row_keeps_its_right_drafts_and_the_choice_after_them(drafts, data):
    rows = tuple(Row(n, 0, n, 8, 1 + len(it), True, 1, len(it)) for n, it in enumerate(drafts))
    firsts = np.cumsum([0, *(1 + len(it) for it in drafts)])
    tokens = np.array([data.draw(WORDS) for _ in range(firsts[-1])], dtype=np.int32)
    given = tuple(Drafts(n, 9, tuple(it)) for n, it in enumerate(drafts) if it)
    sampled = SamplingRows(rows, np.arange(len(rows)), firsts, tokens, tokens, given)
    found, counts, values = accepted(sampled, tokens, tokens + 0.5)
    for n, draft in enumerate(drafts):
        own, right = tokens[firsts[n] : firsts[n + 1]].tolist(), 0
        while right < len(draft) and draft[right] == own[right]:
            right += 1
        assert counts[n] == right + 1 and found[n, : right + 1].tolist() == own[: right + 1]
        assert values[n, : right + 1].tolist() == [token + 0.5 for token in own[: right + 1]]
        assert not found[n, right + 1 :].any() and not values[n, right + 1 :].any()

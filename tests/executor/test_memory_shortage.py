"""Steps that do not fit into memory: run in parts, and only what fits in no part is ended."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, random_model
from hypothesis import given
from hypothesis import strategies as st

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.executor.out_of_memory import BatchSplitter
from gptmanager.executor.packed_rows import PackedRows, halves
from gptmanager.executor.runner import Computed
from gptmanager.kernels import CpuKernels
from gptmanager.models.model import load_model
from gptmanager.testing import ContractChecker, RecordingCallbacks

from_tokens = InferenceRequest.from_tokens
POISON = 77


class ShortOfMemory:
    """A model whose batches have `limit` tokens at most, and none of a token that is too large."""

    def __init__(self, limit, error=torch.OutOfMemoryError):
        config = CONFIGS["llama"]
        source = (config, random_model(config).state_dict())
        self._model = load_model(source, kernels=CpuKernels(deterministic=True))
        self.spec, self.nbytes = self._model.spec, self._model.nbytes
        self.limit, self.error = limit, error
        self.sizes = []

    def forward(self, batch, kv_pool):
        if len(batch.token_ids) > self.limit or POISON in batch.token_ids:
            raise self.error("out of memory: tried to allocate 2.00 GiB")
        self.sizes.append(len(batch.token_ids))
        return self._model.forward(batch, kv_pool)


def run(model, requests, policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT, beams=1, **options):
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    with GptManager(
        model,
        ModelType.INFLIGHT_FUSED_BATCHING,
        beams,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        optional_params=OptionalParams(
            KvCacheConfig(max_tokens=512, tokens_per_block=8, enable_block_reuse=True),
            max_batch_size=4,
            **options,
        ),
    ) as manager:
        assert manager.wait_idle(60), manager.exception
        assert manager.audit().ok
    checker.check()
    return host


def requests():
    wanted = {"return_context_logits": True, "return_log_probs": True}
    return [
        from_tokens(1, list(range(5, 40)), 6, **wanted),
        from_tokens(2, list(range(9, 20)), 9),
        from_tokens(3, list(range(30, 70)), 5, beam_width=2),
        from_tokens(4, list(range(50, 60)), 7, temperature=0.8, random_seed=3),
        from_tokens(5, list(range(5, 30)), 7),
    ]


@pytest.mark.parametrize("limit", [1, 3, 16])
def test_a_step_that_is_too_large_runs_in_parts(limit, caplog):
    whole, short = ShortOfMemory(10**9), ShortOfMemory(limit)
    expected = run(whole, requests(), beams=2)
    with caplog.at_level(logging.WARNING, "gptmanager"):
        found = run(short, requests(), beams=2)
    assert max(whole.sizes) > 16 >= max(short.sizes)
    assert "does not fit into memory and runs in parts" in caplog.text
    for request in requests():
        one, other = found.final(request.request_id), expected.final(request.request_id)
        assert not one.error
        for name, tensor in other.tensors.items():
            if name != "request_metrics":
                assert torch.equal(one.tensors[name], tensor), name


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
@pytest.mark.parametrize("place", [0, 11, 19])
def test_what_fits_in_no_part_ends_alone(place, error):
    poisoned = list(range(20))
    poisoned[place] = POISON
    model = ShortOfMemory(10**9, error)
    good = [from_tokens(i, list(range(i, 30)), 6) for i in (1, 3)]
    host = run(model, [good[0], from_tokens(2, poisoned, 6), good[1]])
    error = host.final(2).error
    assert error.startswith("CapacityError: no memory for one token: ") and "2.00 GiB" in error
    for request in good:
        alone = run(model, [from_tokens(9, request.input_ids.tolist(), 6)])
        assert host.output(request.request_id) == alone.output(9)


def test_ever_fewer_of_the_batches_that_run_in_parts_are_reported(caplog):
    splitter, every = BatchSplitter(3, torch.device("cpu")), np.arange(2)
    starts = np.arange(3, dtype=np.int32)
    rows = PackedRows(every, starts, starts[1:], every, every, every, every, 0)
    reported = []
    for number in range(1, 18):
        caplog.clear()
        splitter.run(rows, "no memory", lambda rows: Computed(torch.zeros(len(rows.lines), 3)))
        reported += [number] * len(caplog.records)
        text = "a batch of 2 sequences and 2 tokens does not fit into memory and runs in parts; "
        text += f"this is batch {number} that was split"
        assert all(record.getMessage().startswith(text) for record in caplog.records)
    assert reported == [1, 2, 4, 8, 16]


def test_parts_that_write_their_logits_to_the_same_memory():
    memory = torch.zeros(4, 3)

    def replay(rows):
        if len(rows.lines) > 2:
            raise AssertionError("too large")
        number = torch.from_numpy(rows.lines).float()
        return Computed(memory[: len(number)].copy_(number[:, None].expand(-1, 3)))

    every = np.arange(4)
    starts = np.arange(5, dtype=np.int32)
    rows = PackedRows(every, starts, starts[1:], every, every, every, every, 0)
    computed = BatchSplitter(3, torch.device("cpu")).run(rows, "no memory", replay)
    assert computed.logits[:, 0].tolist() == [0, 1, 2, 3]


def test_nothing_that_was_not_computed_is_found_again():
    model = ShortOfMemory(10**9)
    host = RecordingCallbacks()
    tokens = list(range(20))
    with GptManager(
        model,
        ModelType.INFLIGHT_FUSED_BATCHING,
        **host.keywords(),
        optional_params=OptionalParams(
            KvCacheConfig(max_tokens=512, tokens_per_block=8, enable_block_reuse=True),
            max_batch_size=4,
        ),
    ) as manager:
        model.limit = 0
        host.submit(from_tokens(1, tokens, 4))
        assert manager.wait_idle(60)
        assert host.final(1).error
        model.limit = 10**9
        host.submit(from_tokens(2, tokens, 4))
        assert manager.wait_idle(60)
        after = host.output(2)
    assert after == run(model, [from_tokens(2, tokens, 4)]).output(2)


@given(data=st.data(), counts=st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_halves_are_the_whole_in_order(data, counts):
    num_context = data.draw(st.integers(0, len(counts)))
    lengths = [count + data.draw(st.integers(0, 5)) for count in counts]
    ends = np.cumsum(counts)
    num_tokens = int(ends[-1])
    sampled = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=8))
    rows = PackedRows(
        lines=np.arange(len(counts)) * 10,
        row_starts=np.concatenate(([0], ends)).astype(np.int32),
        kv_lengths=np.array(lengths, dtype=np.int32),
        positions=np.concatenate(
            [np.arange(m - n, m) for n, m in zip(counts, lengths, strict=True)]
        ),
        token_lines=np.repeat(np.arange(len(counts)) * 10, counts),
        sample_index=np.array(sampled, dtype=np.int64),
        sample_rows=np.searchsorted(ends, sampled, side="right"),
        num_context_rows=num_context,
    )

    def tokens(rows):
        """(line, position, KV length that its queries see to the end) of each packed token."""
        for row, line in enumerate(rows.lines):
            first, last = rows.row_starts[row : row + 2]
            for index in range(first, last):
                assert rows.token_lines[index] == line
                position = rows.kv_lengths[row] - (last - index)
                assert rows.positions[index] == position
                yield line, position, row < rows.num_context_rows

    whole = list(tokens(rows))
    parts = halves(rows)
    assert bool(parts) == (num_tokens > 1)
    if parts:
        assert [token for part, _ in parts for token in tokens(part)] == whole
        assert sorted(p for _, places in parts for p in places) == list(range(len(sampled)))
        for part, places in parts:
            own = list(tokens(part))
            for place, index, row in zip(places, part.sample_index, part.sample_rows, strict=True):
                assert own[index] == whole[sampled[place]]
                assert part.row_starts[row] <= index < part.row_starts[row + 1]

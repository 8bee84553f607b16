"""Models with a state for each slot: it is cleared, counted, computed again, and never shared."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from cuda_headers import require_cuda_headers
from stateful_runs import run_many

from gptmanager import (
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    ParallelConfig,
    PromptLookup,
)
from gptmanager.errors import ConfigError
from gptmanager.memory.slot_states import StateShape, state_bytes
from gptmanager.testing import RecordingCallbacks
from gptmanager.testing.hosts import ScriptedSpec

FUSED = ModelType.INFLIGHT_FUSED_BATCHING
MODULUS = 89


@dataclass(frozen=True)
class StatefulSpec(ScriptedSpec):
    states: tuple[StateShape, ...] = field(
        default=(StateShape((2,), torch.int64), StateShape((3, 5)), StateShape((2,), torch.int64))
    )


class Digesting:
    """A model whose next token is a digest of all tokens, which only its states have seen."""

    nbytes = 0

    def __init__(self) -> None:
        self.spec = StatefulSpec(MODULUS, 100)
        self.fails_at: set[int] = set()  # the numbers of forwards that fail after changing states
        self.num_forwards = 0

    def forward(self, batch: Any, kv_pool: Any) -> torch.Tensor:
        self.num_forwards += 1
        states = kv_pool.states.tensors[0]
        digests = []
        for (start, stop), slot in zip(
            pairwise(batch.row_starts.tolist()), batch.slots.tolist(), strict=True
        ):
            count, digest = states[slot].tolist()
            assert count == batch.positions[start]  # cleared where another sequence begins
            for token in batch.token_ids[start:stop].tolist():
                count, digest = count + 1, (31 * digest + token + count) % MODULUS
                digests.append(digest)
            states[slot] = torch.tensor([count, digest])
        if self.num_forwards in self.fails_at:
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2.00 GiB")
        logits = torch.zeros(len(batch.sample_index), MODULUS)
        chosen = [digests[at] for at in batch.sample_index.tolist()]
        logits[range(len(chosen)), chosen] = 1
        return logits


def continued(prompt: Any, count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        digest = 0
        for number, token in enumerate(text):
            digest = (31 * digest + token + number) % MODULUS
        text.append(digest)
    return text[len(prompt) :]


@pytest.mark.parametrize(
    ("count", "options"),
    [(200, {}), (200, {"enable_trt_overlap": True}), (20, {"device": "emulator"})],
    ids=["plain", "overlap", "device"],
)
@pytest.mark.every(2)
def test_each_of_200_requests_is_as_alone(count: int, options: dict[str, Any]) -> None:
    if "device" in options:
        require_cuda_headers()
    model = Digesting()
    model.spec = replace(model.spec, num_layers=1)  # kernels of devices copy blocks of a layer
    host = run_many(model, lambda own, size: [continued(it, size) for it in own], count, **options)
    assert host.total("Paused Requests") > 0  # and their states were computed again


def run(model: Any, requests: Any, kind: ModelType = FUSED, **options: Any) -> RecordingCallbacks:
    host = RecordingCallbacks(requests)
    params = OptionalParams(exclude_input_in_output=True, **options)
    with GptManager(model, kind, optional_params=params, **host.keywords()) as manager:
        manager.wait_idle()
    return host


@pytest.mark.parametrize("kind", [ModelType.V1, ModelType.INFLIGHT_BATCHING])
def test_other_batching_schemes_keep_states_apart(kind: ModelType) -> None:
    requests = [InferenceRequest.from_tokens(i, [i, 5, i], 4 + i) for i in range(8)]
    cache = KvCacheConfig(enable_block_reuse=None)
    host = run(Digesting(), requests, kind, max_batch_size=3, kv_cache_config=cache)
    assert [host.output(i) for i in range(8)] == [continued([i, 5, i], 4 + i) for i in range(8)]


def test_states_are_counted() -> None:
    request, used = [InferenceRequest.from_tokens(1, [1], 2)], []
    for size in (5, 6):
        host = run(Digesting(), request, max_batch_size=size, run_ahead=0, max_seq_len=50)
        used.append(json.loads(host.statistics[-1])["Runtime CPU Memory Usage"])
    # and the tables: of tokens, and of one block
    states = (2 + 2) * 8 + 15 * 4
    assert used[1] - used[0] == states + 4 * (50 + 1)
    assert state_bytes(Digesting().spec.states) == states


def test_states_that_do_not_fit_are_refused() -> None:
    model = Digesting()
    model.spec = replace(model.spec, states=(StateShape((1 << 40,)),))
    with pytest.raises(
        ConfigError, match=r"max_batch_size = 256: the states of 256 sequences need"
    ):
        run(model, [])


def test_a_step_that_is_short_of_memory_does_not_run_twice() -> None:
    model = Digesting()
    model.fails_at = {3}
    requests = [InferenceRequest.from_tokens(i, [i, 5], 6) for i in range(5)]
    host = run(model, requests, max_batch_size=2)
    errors = [host.final(i).error for i in range(5)]
    assert [bool(error) for error in errors] == [True, True, False, False, False]
    assert "out of memory" in errors[0]
    assert all(host.output(i) == continued([i, 5], 6) for i in (2, 3, 4))


CACHED = "cached blocks do not contain it"


@pytest.mark.parametrize(
    ("options", "width", "reason"),
    [
        ({"kv_cache_config": KvCacheConfig(enable_block_reuse=True)}, 1, CACHED),
        (
            {"kv_cache_config": KvCacheConfig(enable_block_reuse=None, host_cache_size=1 << 20)},
            1,
            CACHED,
        ),
        ({"speculative_decoding_config": PromptLookup()}, 1, "it cannot go back to the token"),
        ({"parallel_config": ParallelConfig()}, 1, "ranks do not split it"),
        ({}, 2, "it cannot be shared by sequences"),
    ],
    ids=["reuse", "host tier", "lookup", "ranks", "beams"],
)
def test_what_a_state_rules_out_is_refused_by_name(
    options: dict[str, Any], width: int, reason: str
) -> None:
    name = next(iter(options), "max_beam_width")
    if name == "kv_cache_config":
        name = "host_cache_size" if options[name].host_cache_size else "enable_block_reuse"
    host = RecordingCallbacks()
    with pytest.raises(
        ConfigError, match=f"{name} = .* refused: the model keeps a state.*{reason}"
    ):
        GptManager(
            *(Digesting(), FUSED, width),
            optional_params=OptionalParams(**options),
            **host.keywords(),
        )


def test_drafts_of_a_request_are_refused_by_name() -> None:
    request = InferenceRequest.from_tokens(1, [1, 2], 4, draft_input_ids=[3])
    text = "draft_input_ids is refused: the model keeps a state, which cannot go back"
    assert text in run(Digesting(), [request]).final(1).error


def test_reuse_that_is_on_by_default_is_off(caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="gptmanager")
    requests = [InferenceRequest.from_tokens(i, [7] * 40, 5) for i in range(3)]
    cache = KvCacheConfig(enable_block_reuse=None, tokens_per_block=8)
    host = run(Digesting(), requests, max_batch_size=1, kv_cache_config=cache)
    assert "block reuse is off: the model keeps a state for each sequence" in caplog.text
    assert all(host.output(i) == continued([7] * 40, 5) for i in range(3))

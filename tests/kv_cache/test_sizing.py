"""Sizes: how large the pool is by default, and which chunks a step must be able to hold."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model

from gptmanager import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PromptLookup,
    SchedulerConfig,
)
from gptmanager.assembly.options import checked_optional_params
from gptmanager.assembly.sizing import MemoryBudget, size
from gptmanager.assembly.stateful import without_states
from gptmanager.errors import ConfigError
from gptmanager.memory.slot_states import StateShape
from gptmanager.testing import RecordingCallbacks, ScriptedModel

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
GIB = 1 << 30


@dataclass(frozen=True)
class Spec:
    vocab_size: int = 100
    max_position_embeddings: int = 1000
    num_layers: int = 2
    num_kv_heads: int = 2
    head_dim: int = 8  # 256 bytes of float32 a token


FUSED = ModelType.INFLIGHT_FUSED_BATCHING


def sizes(
    window=None,
    *,
    sink=None,
    block=16,
    room=GIB,
    policy=None,
    beams=1,
    model_type=FUSED,
    shared=True,
    **options,
):
    params = OptionalParams(
        kv_cache_config=KvCacheConfig(
            tokens_per_block=block, max_attention_window=window, sink_token_length=sink
        ),
        **{"max_batch_size": 4, **options},
    )
    scheduler = SchedulerConfig() if policy is None else SchedulerConfig(policy)
    params = checked_optional_params(params)
    return size(params, scheduler, Spec(), model_type, beams, MemoryBudget(room, shared=shared))


def test_pages_of_8_bits_are_twice_as_many_as_of_16():
    counts = [
        size(
            OptionalParams(), SchedulerConfig(), Spec(), FUSED, 1, MemoryBudget(GIB, dtype, False)
        ).num_blocks
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    ]
    assert counts[0] > 1000
    assert 2 * counts[0] <= counts[1] <= 2 * counts[0] + 1


# The pool of a CPU by default ----------------------------------------------------------------


def test_without_a_window_there_is_room_for_whole_sequences():
    assert sizes().num_blocks == 4 * 1000 // 16
    assert sizes(max_seq_len=160).num_blocks == 4 * 10
    assert sizes(max_seq_len=160, beams=3).num_blocks == 4 * 3 * 10


@pytest.mark.parametrize("shared", [True, False])
def test_v1_has_a_row_for_each_sequence_and_no_more(shared, caplog):
    caplog.set_level(logging.INFO, "gptmanager")
    v1 = sizes(model_type=ModelType.V1, max_seq_len=160, beams=3, shared=shared)
    assert (v1.num_blocks, v1.tokens_per_block, v1.contiguous) == (4 * 3, 160, True)
    assert "1920 tokens in the contiguous KV cache" in caplog.text
    few = sizes(model_type=ModelType.V1, max_seq_len=160, beams=3, room=1 << 18, shared=shared)
    assert few.num_blocks < 12


@pytest.mark.parametrize(
    ("window", "sink", "blocks"),
    [(32, None, 3), (33, None, 4), (1, None, 2), (32, 1, 4), (64, 17, 7)],
)
def test_with_a_window_the_pool_holds_the_rings(window, sink, blocks, caplog):
    caplog.set_level(logging.INFO, "gptmanager")
    found = sizes(window, sink=sink)
    assert found.window.num_blocks == blocks
    assert found.num_blocks == 4 * blocks
    assert found.max_seq_len == 1000 and not found.pool_limited
    assert f"max KV cache blocks per sequence: {blocks}" in caplog.text


def test_a_ring_that_is_longer_than_any_sequence_takes_what_the_sequence_takes():
    assert sizes(150, max_seq_len=160).num_blocks == 4 * 10
    assert sizes(160, max_seq_len=160).attention_window is None


def test_what_is_free_still_bounds_the_rings():
    token = 2 * 2 * 2 * 8 * 4
    assert sizes(32, room=4 * 7 * 16 * token).num_blocks == 7


# Chunks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "block", "unit"),
    [(None, 16, 16), (32, 16, 256), (32, 100, 300), (32, 300, 300), (999, 16, 16), (998, 16, 256)],
)
def test_with_a_window_a_chunk_is_blocks_of_256_tokens(window, block, unit):
    assert sizes(window, block=block, enable_chunked_context=True).chunk_unit == unit


@pytest.mark.parametrize(
    ("window", "max_num_tokens", "text"),
    [
        (None, 15, "max_num_tokens = 15 is less than one context chunk of tokens_per_block = 16"),
        (32, 255, "max_num_tokens = 255 is less than one context chunk of 256 tokens: with "),
        (
            32,
            15,
            "KvCacheConfig.max_attention_window = 32 a chunk is a number of blocks of 16 tokens",
        ),
    ],
)
@pytest.mark.parametrize("how", [{"enable_chunked_context": True}, {"policy": MAX_UTILIZATION}])
def test_a_step_that_holds_no_chunk_is_refused_with_its_numbers(window, max_num_tokens, text, how):
    with pytest.raises(ConfigError, match=text):
        sizes(window, max_num_tokens=max_num_tokens, **how)


def test_a_step_that_holds_a_chunk_or_any_prompt_is_enough():
    assert sizes(32, max_num_tokens=256, enable_chunked_context=True).chunked
    assert sizes(32, max_num_tokens=159, max_seq_len=160, enable_chunked_context=True).chunked
    with pytest.raises(ConfigError, match="max_num_tokens = 158 is less"):
        sizes(32, max_num_tokens=158, max_seq_len=160, enable_chunked_context=True)
    assert not sizes(32, max_num_tokens=15).chunked  # whole contexts, of up to 15 tokens


@pytest.mark.parametrize("chunking", ContextChunkingPolicy)
def test_every_chunking_policy_starts_with_a_step_that_holds_any_prompt(chunking):
    options = OptionalParams(
        KvCacheConfig(tokens_per_block=64),
        max_num_tokens=7,
        max_seq_len=8,
        enable_chunked_context=True,
    )
    host = RecordingCallbacks([InferenceRequest.from_tokens(1, [5, 6, 7, 8, 5, 6, 7], 1)])
    source = checkpoint(random_model(CONFIGS["llama"]))
    scheduler = SchedulerConfig(context_chunking_policy=chunking)
    with GptManager(source, FUSED, 1, scheduler, optional_params=options, **host.keywords()):
        assert not host.final(1).error


def test_a_step_holds_one_token_of_each_beam():
    text = "max_num_tokens = 2 must be at least max_beam_width = 3: "
    with pytest.raises(ConfigError, match=text):
        sizes(beams=3, max_num_tokens=2)
    options = OptionalParams(
        KvCacheConfig(tokens_per_block=1), max_num_tokens=3, enable_chunked_context=True
    )
    request = InferenceRequest.from_tokens(1, [5, 6, 7, 8], 4, beam_width=3)
    host = RecordingCallbacks([request])
    source = checkpoint(random_model(CONFIGS["llama"]))
    with GptManager(source, FUSED, 3, optional_params=options, **host.keywords()):
        assert not host.final(1).error


def test_a_step_holds_the_drafts_of_a_request():
    text = r"max_num_tokens = 3 must be above PromptLookup.max_draft_tokens = 3: "
    with pytest.raises(ConfigError, match=text):
        sizes(max_num_tokens=3, speculative_decoding_config=PromptLookup(max_draft_tokens=3))
    options = OptionalParams(
        KvCacheConfig(max_tokens=128),
        max_num_tokens=4,
        speculative_decoding_config=PromptLookup(max_draft_tokens=3, min_ngram=1),
    )
    host = RecordingCallbacks([InferenceRequest.from_tokens(1, [5, 5, 5, 5], 20)])
    with GptManager(ScriptedModel(lambda _: 5), FUSED, optional_params=options, **host.keywords()):
        assert not host.final(1).error
    assert len(host.statistics) < 20  # drafts were accepted


def test_the_rings_of_the_default_pool_serve_a_full_batch_side_by_side():
    """Prompts of more than a step, in rings that the default pool holds all at once."""
    source = checkpoint(random_model({**CONFIGS["llama"], "max_position_embeddings": 400}))
    host = RecordingCallbacks(
        [InferenceRequest.from_tokens(i, [(7 * i + j) % 96 for j in range(300)], 8) for i in (0, 1)]
    )
    with GptManager(
        source,
        ModelType.INFLIGHT_FUSED_BATCHING,
        1,
        SchedulerConfig(),
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(tokens_per_block=16, max_attention_window=32),
            max_batch_size=2,
            max_num_tokens=300,
            enable_chunked_context=True,
        ),
        **host.keywords(),
    ) as manager:
        assert manager.wait_idle(60)
    assert [len(host.output(i)) for i in (0, 1)] == [308, 308]
    records = [json.loads(record) for record in host.statistics]
    assert records[0]["Max KV cache blocks"] == 2 * 3
    assert max(record["Used KV cache blocks"] for record in records) == 2 * 3


def test_states_leave_the_rest_of_the_memory(caplog):
    """A slot has a state, and with run-ahead each request may need two slots."""
    caplog.set_level(logging.INFO, "gptmanager")
    spec = SimpleNamespace(states=[StateShape((1 << 15,)), StateShape((1 << 15,), torch.float16)])
    needed = 8 * (4 + 2 << 15)
    params = OptionalParams(max_batch_size=4, run_ahead=1)
    left, num_snapshots = without_states(MemoryBudget(needed + 1), spec, params)
    assert (left.free_bytes, num_snapshots) == (1, 0)
    size = "a state of 196608 bytes for each sequence: 1.50 MiB for 8 sequences and 0 snapshots"
    assert size in caplog.text
    with pytest.raises(ConfigError, match=f"= 4: the states of 8 sequences need {needed} bytes"):
        without_states(MemoryBudget(needed), spec, params)
    params.kv_cache_config.enable_block_reuse = True
    assert without_states(MemoryBudget(needed + 196609), spec, params)[0].free_bytes == 1
    refused = "block_reuse needs a snapshot of 196608 bytes, and 196608 bytes are free"
    with pytest.raises(ConfigError, match=refused):
        without_states(MemoryBudget(needed + 196608), spec, params)

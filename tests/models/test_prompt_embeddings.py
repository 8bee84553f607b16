"""p-tuning: embeddings of a request's own against transformers' `inputs_embeds`."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.errors import InvalidRequestError
from gptmanager.loop.admission import admit
from gptmanager.loop.limits import Limits
from gptmanager.recorder import read_recording
from gptmanager.recorder.values import to_json
from gptmanager.replay import replay
from gptmanager.request.input_rows import HostRows
from gptmanager.testing import RecordingCallbacks

VOCAB, HIDDEN = 96, 32


def serve(model, requests, *, kv=None, **options):
    host = RecordingCallbacks(requests)
    kv_cache = KvCacheConfig(**{"max_tokens": 2048, "tokens_per_block": 4, **(kv or {})})
    policy = options.pop("policy", CapacitySchedulerPolicy.GUARANTEED_NO_EVICT)
    with GptManager(
        *(checkpoint(model), ModelType.INFLIGHT_FUSED_BATCHING, 1, SchedulerConfig(policy)),
        **host.keywords(),
        optional_params=OptionalParams(kv_cache_config=kv_cache, **options),
    ) as manager:
        assert manager.wait_idle(60)
        to_json(manager._worker.loop.state())
    assert not [response.error for response in host.responses if response.error]
    return host


def tables(count, rows=6):
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, rows, HIDDEN, generator=generator) / 3 for _ in range(count)]


def requests(**more):
    """Some with a table of their own, some with the same one, some with none."""
    chance = np.random.default_rng(1)
    first, second = tables(2)
    found = []
    for i, table in enumerate([first, second, first, None, second, first]):
        prompt = chance.integers(0, VOCAB, 5 + 3 * i).tolist()
        options = {}
        if table is not None:
            prompt[1:1] = [VOCAB + 2, VOCAB, VOCAB + 5, VOCAB + 2] + [VOCAB + 1] * (i % 3)
            options["prompt_embedding_table"] = table
        found.append(InferenceRequest.from_tokens(i, prompt, 20 - 2 * i, **options, **more))
    return found


def expected(model, request):
    """Greedy tokens by transformers, each from the embeddings of all before it."""
    ids = request.input_ids.tolist()
    count = int(request.max_new_tokens)
    embed = model.get_input_embeddings()
    table = request.tensors.get("prompt_embedding_table")
    with torch.no_grad():
        rows = [embed.weight[i] if i < VOCAB else table[0, i - VOCAB] for i in ids]
        for _ in range(count):
            logits = model(inputs_embeds=torch.stack(rows)[None], use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
            rows.append(embed.weight[ids[-1]])
    return ids


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"run_ahead": 1, "enable_chunked_context": True, "max_num_tokens": 8},
        {"kv": {"enable_block_reuse": True}, "max_batch_size": 1},
        {
            "kv": {"max_tokens": 48, "enable_block_reuse": True},
            "policy": CapacitySchedulerPolicy.MAX_UTILIZATION,
        },
    ],
    ids=str,
)
@pytest.mark.every(2)
def test_tokens_are_those_of_transformers(family, options):
    model = random_model(CONFIGS[family])
    host = serve(model, requests(), **options)
    for request in requests():
        assert host.output(request.request_id) == expected(model, request)


def test_blocks_are_shared_with_an_equal_table_only():
    model = random_model(CONFIGS["llama"])
    first, second = tables(2)
    prompt = [VOCAB, VOCAB + 1, *range(20)]

    def one(request_id, table):
        options = {} if table is None else {"prompt_embedding_table": table}
        ids = prompt if table is not None else [0, 0, *range(20)]
        return InferenceRequest.from_tokens(request_id, ids, 2, **options)

    order = [one(0, first), one(1, second), one(2, first.clone()), one(3, None)]
    host = serve(model, order, kv={"enable_block_reuse": True}, max_batch_size=1)
    cached = [float(host.final(i).tensors["request_metrics"][4]) for i in range(4)]
    assert cached[0] == cached[1] == cached[3] == 0 and cached[2] >= 20


def test_a_recording_knows_tables_by_their_digest(tmp_path):
    path = tmp_path / "run.jsonl"
    serve(random_model(CONFIGS["llama"]), requests(), recording_path=path)
    recording = read_recording(path)
    starts = [s for i in recording.iterations if i.schedule for s in i.schedule.starts]
    assert starts[0].prompt_table == HostRows(tables(1)[0].numpy()[0])
    assert starts[0].prompt_table.numbers is None and starts[3].prompt_table is None
    assert replay(recording).divergence is None


LIMITS = Limits(96, 64, 63, num_blocks=16, tokens_per_block=4, hidden_size=2)


def request(table, ids=(1,), **more):
    options = {"prompt_embedding_table": table} if table is not None else {}
    return InferenceRequest.from_tokens(0, list(ids), 3, **options, **more)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (request(None, [96]), r"input_ids\[0\] = 96 is outside the vocabulary of 96"),
        (request(np.zeros((2, 2)), [98]), r"input_ids\[0\] = 98 is outside the vocabulary of 98"),
        (request(np.zeros((2, 2)), [97], prompt_vocab_size=1), "outside the vocabulary of 97"),
        (request(np.zeros((2, 2)), prompt_vocab_size=3), "prompt_vocab_size = 3 is outside 1..2"),
        (
            request(None, prompt_vocab_size=3),
            "^Undefined tensor: prompt_embedding_table, but prompt_v",
        ),
        (request(np.zeros((2, 3))), r"has shape \[2, 3\], expected \[n, 2\] or \[1, n, 2\]"),
        (request(np.zeros((2, 2, 2))), r"has shape \[2, 2, 2\], expected"),
        (request(np.zeros(2)), r"has shape \[2\], expected"),
        (request(np.zeros((0, 2))), r"has shape \[0, 2\], expected"),
        (request(np.zeros((1, 2), dtype=int)), "has dtype int64, expected a float"),
        (request(np.full((1, 2), np.nan)), r"prompt_embedding_table\[0, 0\] = nan is not finite"),
        (
            request(np.full((1, 2), 1e300)),
            r"prompt_embedding_table\[0, 0\] = 1e\+300 is not finite in torch.float32: at most 3.4",
        ),
    ],
)
def test_what_is_wrong_is_named(wrong, text):
    with pytest.raises(InvalidRequestError, match=text):
        admit(wrong, LIMITS, 0.0)


def test_a_model_without_embeddings_refuses_tables():
    limits = dataclasses.replace(LIMITS, hidden_size=0)
    with pytest.raises(InvalidRequestError, match="the model takes none"):
        admit(request(np.zeros((1, 2))), limits, 0.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_dtype_is_taken(dtype):
    admitted = admit(request(torch.ones(1, 3, 2, dtype=dtype), [98]), LIMITS, 0.0)
    assert admitted.prompt_table.numbers.dtype == np.float32
    assert admitted.prompt_table == HostRows(np.ones((3, 2), dtype=np.float32))
    assert admitted.prompt_table != HostRows(np.ones((2, 3), dtype=np.float32))

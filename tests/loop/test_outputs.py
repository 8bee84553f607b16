"""Log probabilities and logits in responses: values, shapes, and that no schedule shows in them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from served_outputs import MAX_UTILIZATION, joined, serve

from gptmanager import (
    GptManager,
    InferenceRequest,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.recorder import read_recording
from gptmanager.recorder.values import to_json
from gptmanager.replay import replay
from gptmanager.testing import RecordingCallbacks, ScriptedModel

ALL = {
    "return_log_probs": True,
    "return_context_logits": True,
    "return_generation_logits": True,
}


@pytest.fixture(scope="module")
def llama():
    return random_model(CONFIGS["llama"]).double()


@pytest.fixture(scope="module")
def source(llama):
    config, weights = checkpoint(llama)
    return config | {"dtype": "float32", "torch_dtype": "float32"}, weights


def requests(**more):
    """Greedy and sampled ones, with penalties, ended by length, end_id or stop words."""
    chance = np.random.default_rng(5)
    result = []
    for i in range(9):
        options = dict(ALL) | more
        if i % 3:
            options |= {"temperature": 0.7 + 0.2 * i, "random_seed": i}
        if i % 3 == 2:
            options |= {"runtime_top_k": 9, "runtime_top_p": 0.9, "repetition_penalty": 1.4}
        if i % 4 == 1:
            options |= {"stop_words_list": [[t] for t in range(0, 96, 9)] + [[7, 8]]}
        if i % 4 == 3:
            options |= {
                "end_id": [5, 9],
                "presence_penalty": 0.5,
                "embedding_bias": [1.0] + [0.0] * 95,
            }
        prompt = chance.integers(0, 96, int(chance.integers(1, 40))).tolist()
        if i in (4, 7):
            prompt = prompt_of(result[1])[:24] + prompt
        result.append(InferenceRequest.from_tokens(i, prompt, 38 - 3 * i, **options))
    return result


def prompt_of(request):
    return request.input_ids.tolist()


EXTRAS = ("context_logits", "generation_logits", "output_log_probs", "cum_log_probs")
VOCAB = 96


def exact(llama, tokens):
    """The logits `[n, vocab]` of transformers in float64."""
    with torch.no_grad():
        return llama(torch.tensor([tokens]), use_cache=False).logits[0]


def test_values_are_those_of_transformers_in_float64(llama, source):
    host = serve(source, requests(include_stop_in_output=True))
    for request in requests():
        tensors = joined(host, request.request_id)
        prompt = prompt_of(request)
        length = int(tensors["sequence_length"])
        history = tensors["output_ids"][0, 0, :length].tolist()
        generated = history[len(prompt) :]
        logits = exact(llama, history[:-1])
        context, generation = tensors["context_logits"], tensors["generation_logits"]
        assert context.shape == (1, len(prompt), VOCAB)
        assert generation.shape == (1, 1, len(generated), VOCAB)
        assert context.dtype == generation.dtype == torch.float32
        torch.testing.assert_close(context[0].double(), logits[: len(prompt)], rtol=1e-4, atol=1e-4)
        raw = logits[len(prompt) - 1 :]
        torch.testing.assert_close(generation[0, 0].double(), raw, rtol=1e-4, atol=1e-4)
        if not request.request_id % 4 or request.request_id % 3 < 2 and request.request_id % 4 < 3:
            temperature = float(request.tensors.get("temperature", 1.0))
            log_probs = (raw / temperature).log_softmax(-1)
            wanted = log_probs.gather(1, torch.tensor(generated)[:, None])[:, 0]
            if request.request_id % 3 < 2:  # no repetition penalty
                got = tensors["output_log_probs"]
                assert got.shape == (1, 1, len(generated)) and got.dtype == torch.float32
                torch.testing.assert_close(got[0, 0].double(), wanted, rtol=1e-4, atol=1e-4)
        total = tensors["output_log_probs"].double().sum()
        torch.testing.assert_close(tensors["cum_log_probs"].double(), total.view(1, 1))


def test_log_probs_come_after_penalties_and_temperature_and_before_the_cuts(llama, source):
    bias = np.zeros(VOCAB, dtype=np.float32)
    bias[3], bias[4] = 2.0, -np.inf
    request = InferenceRequest.from_tokens(
        *(0, [3, 5, 8, 3], 12),
        return_log_probs=True,
        temperature=1.7,
        runtime_top_k=5,
        runtime_top_p=0.5,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        embedding_bias=bias,
    )
    host = serve(source, [request])
    history = host.output(0)
    logits = exact(llama, history[:-1])[3:]
    for index, (row, token) in enumerate(zip(logits, history[4:], strict=True)):
        row = row + torch.tensor(bias)
        before = history[: 4 + index]
        for seen in set(before):
            row[seen] = row[seen] / 1.3 if row[seen] > 0 else row[seen] * 1.3
            times = before[4:].count(seen)
            row[seen] -= 0.3 * times + 0.4 * (times > 0)
        wanted = (row / 1.7).log_softmax(-1)[token]
        got = host.final(0).tensors["output_log_probs"][0, 0, index]
        assert float(got) == pytest.approx(float(wanted), rel=1e-4, abs=1e-4)


def test_without_normalizing_it_is_the_logit(llama, source):
    options = {"return_log_probs": True, "temperature": 2.0, "runtime_top_k": 4}
    request = InferenceRequest.from_tokens(0, [1, 2, 3], 9, **options)
    host = serve(source, [request], normalize_log_probs=False)
    history = host.output(0)
    raw = exact(llama, history[:-1])[2:]
    wanted = raw.gather(1, torch.tensor(history[3:])[:, None])[:, 0] / 2.0
    tensors = host.final(0).tensors
    torch.testing.assert_close(
        tensors["output_log_probs"][0, 0].double(), wanted, rtol=1e-4, atol=1e-4
    )
    assert float(tensors["cum_log_probs"]) == pytest.approx(float(wanted.sum()), rel=1e-4)


@pytest.fixture(scope="module")
def alone(source):
    """Each request by itself."""
    host = serve(source, requests(), max_batch_size=1, deterministic=True)
    return {i: joined(host, i) for i in range(9)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_chunked_context": True, "max_num_tokens": 16},
        {"run_ahead": 1},
        {"run_ahead": 1, "enable_chunked_context": True, "max_num_tokens": 16},
        {"kv": {"enable_block_reuse": True}, "max_batch_size": 2},
        {
            "kv": {"enable_block_reuse": True, "max_tokens": 80},
            "policy": MAX_UTILIZATION,
            "enable_chunked_context": True,
            "max_num_tokens": 16,
        },
        {"kv": {"max_tokens": 80}, "policy": MAX_UTILIZATION},
        {"kv": {"max_tokens": 80}, "policy": MAX_UTILIZATION, "run_ahead": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.every(7)
def test_no_schedule_shows_bit_by_bit(source, alone, options, streaming):
    host = serve(source, requests(is_streaming=streaming), deterministic=True, **options)
    for i, wanted in alone.items():
        got = joined(host, i)
        for name in EXTRAS:
            assert torch.equal(got[name], wanted[name]), (i, name)
    paused = [float(r.tensors["request_metrics"][3]) for r in host.responses if r.is_final]
    assert (max(paused) > 0) == (options.get("policy") is MAX_UTILIZATION)


def test_context_logits_ignore_what_is_cached_and_leave_it_for_others(source):
    prompt = list(range(40))
    plain = InferenceRequest.from_tokens(0, prompt, 2)
    asking = InferenceRequest.from_tokens(1, prompt, 2, return_context_logits=True)
    after = InferenceRequest.from_tokens(2, prompt, 2)
    for first in ([plain, asking], [asking, after]):
        host = serve(source, first, kv={"enable_block_reuse": True}, max_batch_size=1)
        cached = {r.request_id: float(r.tensors["request_metrics"][4]) for r in host.responses}
        assert cached[1] == 0
        assert cached.get(2, 32) >= 32
        assert host.final(1).tensors["context_logits"].shape == (1, 40, VOCAB)


def names(response):
    return list(response.tensors)


def test_names_order_and_dummies(source):
    few = InferenceRequest.from_tokens(0, [1, 2], 3)
    some = InferenceRequest.from_tokens(1, [1, 2], 3, return_log_probs=True)
    stream = InferenceRequest.from_tokens(2, [1, 2], 3, is_streaming=True, **ALL)
    plain = InferenceRequest.from_tokens(3, [1, 2], 3, is_streaming=True)
    host = serve(source, [few, some, stream, plain])
    ends = ["finish_reasons", "request_metrics"]
    tokens = ["output_ids", "sequence_length"]
    assert names(host.final(0)) == [*tokens, *EXTRAS[:2], *ends]
    assert names(host.final(1)) == [*tokens, *EXTRAS, *ends]
    first, second, last = host.of(2)
    assert names(first) == [*tokens, *EXTRAS, "output_offset"]
    assert names(second) == [*tokens, *EXTRAS[1:], "output_offset"]
    assert names(last) == [*tokens, *EXTRAS, "output_offset", *ends]
    assert [names(r) for r in host.of(3)] == [
        [*tokens, "output_offset"],
        [*tokens, "output_offset"],
        [*tokens, *EXTRAS[:2], "output_offset", *ends],
    ]
    for i in (0, 1, 3):
        assert host.final(i).tensors["context_logits"].shape == (1, 1, 1)
        assert host.final(i).tensors["generation_logits"].shape == (1, 1, 1, 1)
    assert first.tensors["context_logits"].shape == (1, 2, VOCAB)
    assert last.tensors["context_logits"].shape == (1, 0, VOCAB)
    assert [r.tensors["generation_logits"].shape[2] for r in host.of(2)] == [1, 1, 1]
    cumulated = torch.cat([r.tensors["output_log_probs"] for r in host.of(2)], 2).cumsum(2)
    assert torch.allclose(
        cumulated, torch.stack([r.tensors["cum_log_probs"] for r in host.of(2)], 2)
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_stop_words_have_no_log_probs_unless_they_are_output(streaming):
    model = ScriptedModel(lambda history: history[-1] + 1)
    stop = {"stop_words_list": [[6, 7]], "is_streaming": streaming}
    for keeps, count in ((False, 2), (True, 4)):
        request = InferenceRequest.from_tokens(
            0, [3], 20, include_stop_in_output=keeps, **ALL, **stop
        )
        tensors = joined(serve(model, [request]), 0)
        generated = tensors["output_ids"].shape[2] if streaming else 0
        assert tensors["output_log_probs"].shape == (1, 1, count)
        assert tensors["generation_logits"].shape[:3] == (1, 1, count)
        assert not streaming or generated == count


def test_the_gather_flags_ask_for_everybody(source):
    request = InferenceRequest.from_tokens(0, [1, 2], 3)
    flags = {"gather_context_logits": True, "gather_generation_logits": True}
    tensors = serve(source, [request], **flags).final(0).tensors
    assert tensors["context_logits"].shape == (1, 2, VOCAB)
    assert tensors["generation_logits"].shape == (1, 1, 3, VOCAB)


def test_a_request_cut_short_returns_the_outputs_so_far():
    """Cancelled before it runs, and in the middle."""
    model = ScriptedModel(lambda history: 1, vocab_size=7, max_position_embeddings=4096)
    waiting = InferenceRequest.from_tokens(1, [1, 2], 3, queue_timeout_s=0.0, **ALL)
    running = InferenceRequest.from_tokens(0, [1, 2], 4000, is_streaming=True, **ALL)
    host = RecordingCallbacks([running, waiting])
    send = host.send_response

    def stop_soon(request_id, tensors, is_final, error):
        send(request_id, tensors, is_final, error)
        if len(host.of(0)) == 3:
            host.stop(0)

    callbacks = host.keywords() | {"send_response_cb": stop_soon}
    with GptManager(
        *(model, ModelType.INFLIGHT_FUSED_BATCHING, 1, SchedulerConfig()),
        **callbacks,
        optional_params=OptionalParams(max_batch_size=1, max_active_requests=2),
    ) as manager:
        assert manager.wait_idle(60)
    shapes = {name: tuple(host.final(1).tensors[name].shape) for name in EXTRAS}
    assert shapes == dict(zip(EXTRAS, [(1, 0, 7), (1, 1, 0, 7), (1, 1, 0), (1, 1)], strict=True))
    tensors = joined(host, 0)
    assert tensors["output_log_probs"].shape[2] == tensors["output_ids"].shape[2] < 4000


def test_what_is_sent_is_the_host_s_to_change(source):
    host = serve(source, [InferenceRequest.from_tokens(0, [1, 2], 3, **ALL)] * 1)
    for name in EXTRAS:
        host.final(0).tensors[name].add_(1.0)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_recording_holds_no_logits_and_replays(source, tmp_path, streaming):
    path = tmp_path / "run.jsonl"
    options = {"kv": {"max_tokens": 80}, "policy": MAX_UTILIZATION}
    serve(source, requests(is_streaming=streaming), recording_path=path, **options)
    assert path.stat().st_size < 200_000
    recording = read_recording(path)
    assert recording.end is not None and recording.end.reason == "drained"
    assert replay(recording).divergence is None


def test_the_black_box_can_copy_the_loop_while_logits_are_held():
    host, held = RecordingCallbacks(), []

    def send(request_id, tensors, is_final, error):
        host.send_response(request_id, tensors, is_final, error)
        loop = host.manager._worker.loop
        if not is_final:
            held.append(len(loop.table.extras))
            to_json(loop.state())

    with GptManager(
        *(ScriptedModel(lambda history: 1), ModelType.INFLIGHT_FUSED_BATCHING, 1),
        SchedulerConfig(),
        **(host.keywords() | {"send_response_cb": send}),
    ) as host.manager:
        stream = InferenceRequest.from_tokens(0, [1, 2], 9, is_streaming=True)
        host.submit(stream, InferenceRequest.from_tokens(1, [1, 2], 12, **ALL))
        assert host.manager.wait_idle(60)
    assert held == [1] * 8 and not [r.error for r in host.responses if r.error]

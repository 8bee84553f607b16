"""The best tokens of each position, and how likely prompts were: by the logits that hosts may have,
whatever the schedule.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st
from served_outputs import MAX_UTILIZATION, joined, serve

from gptmanager import GptManager, InferenceRequest, ModelType, PromptLookup
from gptmanager.callbacks.queue.result import ResponseCollector
from gptmanager.decoding.sampling.best_tokens import best_ids
from gptmanager.decoding.sampling.sampling import Sampler
from gptmanager.errors import InvalidRequestError
from gptmanager.executor import torch_executor
from gptmanager.executor.choice import prompt_scores
from gptmanager.recorder import read_recording
from gptmanager.replay import replay
from gptmanager.request.output_options import OutputConfig
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.testing import ContractChecker, ContractViolation, RecordingCallbacks, ScriptedModel

VOCAB = 96
TOP = ("top_log_probs", "top_log_prob_ids")
PROMPT = ("prompt_log_probs", "prompt_top_log_probs", "prompt_top_log_prob_ids")
LOGITS = {"return_context_logits": True, "return_generation_logits": True}
ASKED = {"num_top_log_probs": 5, "num_prompt_log_probs": 3}


def request(number, prompt, count, **options):
    return InferenceRequest.from_tokens(number, prompt, count, **options)


def best(logits, count):
    """By plain torch: log probabilities of the best `count`, and these."""
    values, ids = logits.double().log_softmax(-1).sort(dim=-1, descending=True, stable=True)
    return values[..., :count].float(), ids[..., :count].int()


def assert_best(log_probs, ids, logits, count):
    values, wanted = best(logits, count)
    torch.testing.assert_close(log_probs, values, atol=1e-5, rtol=1e-5)
    assert torch.equal(ids, wanted) and ids.dtype == torch.int32


def assert_prompt(tensors, prompt, count):
    context = tensors["context_logits"][:, :-1]
    own = context.double().log_softmax(-1).gather(2, torch.tensor([prompt[1:]])[..., None])
    torch.testing.assert_close(
        tensors["prompt_log_probs"], own[..., 0].float(), atol=1e-5, rtol=1e-5
    )
    if count:
        assert_best(*(tensors[name] for name in PROMPT[1:]), context, count)
    else:
        assert not tensors.keys() & {*PROMPT[1:]}


@given(
    prompts=st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), max_size=3),
    top=st.sampled_from([0, 1, 20, 96, 128]),
    of_prompt=st.sampled_from([-1, 0, 1, 20, 128]),
    temperature=st.sampled_from([None, 0.0, 0.7, 3.0]),
    normalized=st.booleans(),
    streaming=st.booleans(),
    chunked=st.booleans(),
)
@settings(max_examples=5 * FUZZ, deadline=None, derandomize=True)
def test_they_are_those_of_the_logits(
    source, prompts, top, of_prompt, temperature, normalized, streaming, chunked
):
    asked = {"num_top_log_probs": top, "num_prompt_log_probs": of_prompt, "return_log_probs": True}
    options = LOGITS | asked | {"temperature": temperature, "is_streaming": streaming}
    requests = [request(i, prompt, 4, **options) for i, prompt in enumerate(prompts)]
    schedule = {"enable_chunked_context": True, "max_num_tokens": 16} if chunked else {}
    host = serve(source, requests, normalize_log_probs=normalized, **schedule)
    for number, prompt in enumerate(prompts):
        collector = ResponseCollector(requests[number])
        for response in host.of(number):
            collector.add(response.tensors.items())
        tensors = collector.result().tensors
        logits = tensors["generation_logits"] / (temperature or 1.0)
        if top:
            found, ids = (tensors[name] for name in TOP)
            if normalized:
                assert_best(found, ids, logits, min(top, VOCAB))
            else:
                torch.testing.assert_close(found, logits.gather(3, ids.long()))
            chosen = torch.tensor(collector.result().generated_ids)[..., None]
            own = tensors["output_log_probs"][..., None].expand_as(found)
            assert torch.equal(found[ids == chosen], own[ids == chosen])
        else:
            assert not tensors.keys() & {*TOP}
        if of_prompt < 0:
            assert not tensors.keys() & {*PROMPT}
        elif normalized:
            assert_prompt(tensors, prompt, min(of_prompt, VOCAB))
        elif of_prompt:
            context, ids = tensors["context_logits"][:, :-1], tensors[PROMPT[2]].long()
            torch.testing.assert_close(tensors[PROMPT[1]], context.gather(2, ids))


def favor(request_id, logits, tokens, stream, client_id):
    logits[..., 7:9] = 90.0


KINDS = (
    {},
    {"temperature": 0.8, "repetition_penalty": 1.4, "bad_words_list": [[3], [5, 6]]},
    {"beam_width": 2},
    {"num_return_sequences": 3, "temperature": 1.1},
    {"stop_words_list": [[t, t + 1] for t in range(95)], "temperature": 2.0},
    {"draft_input_ids": [1, 2], "temperature": 0.9},
    {"logits_post_processor": favor},
)


def mixed(**more):
    chance = np.random.default_rng(3)
    found = []
    for number, kind in enumerate(KINDS):
        prompt = chance.integers(0, VOCAB, 9 + 5 * number).tolist()
        if number == 6:
            prompt = [*prompt_of(found[1]), *prompt]
        options = ASKED | LOGITS | {"return_log_probs": True, "random_seed": number} | kind | more
        found.append(request(number, prompt, 26 - number, **options))
    return found


def prompt_of(asked):
    return asked.input_ids.tolist()


@pytest.fixture(scope="module")
def alone(source):
    host = serve(source, mixed(), max_batch_size=1, deterministic=True, max_beam_width=3)
    return {number: joined(host, number) for number in range(len(KINDS))}


def test_every_kind_of_request_has_them(alone):
    for number, asked in enumerate(mixed()):
        tensors = alone[number]
        assert_prompt(tensors, prompt_of(asked), 3)
        logits, found = tensors["generation_logits"], tensors["top_log_probs"]
        assert found.shape == (*logits.shape[:3], 5)
        if number in (0, 2, 3, 5):  # nothing changes the logits
            temperature = KINDS[number].get("temperature", 1.0)
            for beam in range(logits.shape[1]):
                rows = logits[:, beam] / temperature
                length = int(tensors["sequence_length"][0, beam]) - len(prompt_of(asked))
                own = (tensors[name][0, beam, :length] for name in TOP)
                assert_best(*own, rows[0, :length], 5)
    assert (alone[6]["top_log_prob_ids"][..., :2] == torch.tensor([7, 8])).all()
    assert torch.equal(alone[6]["top_log_probs"][..., 0], alone[6]["top_log_probs"][..., 1])


SMALL = {"kv": {"max_tokens": 104}, "policy": MAX_UTILIZATION}


@pytest.mark.parametrize(
    ("streaming", "options"),
    [
        (True, {"enable_chunked_context": True, "max_num_tokens": 16, "run_ahead": 1}),
        (False, {"kv": {"enable_block_reuse": True}, "max_batch_size": 2}),
        (True, {"enable_chunked_context": True, "max_num_tokens": 64, **SMALL}),
        (False, {"run_ahead": 1, "speculative_decoding_config": PromptLookup(3, min_ngram=1)}),
    ],
    ids=str,
)
def test_no_schedule_shows_bit_by_bit(source, alone, streaming, options, monkeypatch):
    monkeypatch.setattr(torch_executor, "MOST_LOGITS", 7 * VOCAB)  # contexts are cut, too
    requests = mixed(is_streaming=streaming)
    host = serve(source, requests, deterministic=True, max_beam_width=3, **options)
    for number, wanted in alone.items():
        got = joined(host, number)
        for name in PROMPT if streaming and number in (2, 3) else (*TOP, *PROMPT):
            assert torch.equal(got[name], wanted[name]), (number, name)
    if options.get("policy") is MAX_UTILIZATION:
        finals = [response for response in host.responses if response.is_final]
        assert max(float(final.tensors["request_metrics"][3]) for final in finals) > 0


def test_a_prompt_is_computed_whole_and_left_for_others(source):
    prompt = list(range(40))
    asked = [request(0, prompt, 2), request(1, prompt, 2, **ASKED), request(2, prompt, 2)]
    host = serve(source, asked, kv={"enable_block_reuse": True}, max_batch_size=1)
    cached = [float(host.final(number).tensors["request_metrics"][4]) for number in range(3)]
    assert cached[:2] == [0, 0] and cached[2] >= 32
    assert host.final(1).tensors["prompt_log_probs"].shape == (1, 39)


@pytest.mark.parametrize("most", [1, 5, 64])
def test_few_logits_are_held_at_a_time(source, most, monkeypatch):
    """Whatever the lengths of the prompts, and how many there are."""
    monkeypatch.setattr(torch_executor, "MOST_LOGITS", most * VOCAB)
    sizes = []
    scored = prompt_scores.PromptScorer.score
    run = torch_executor.Runner.run

    def watched(self, rows):
        sizes.append(len(rows.sample_index))
        return run(self, rows)

    monkeypatch.setattr(torch_executor.Runner, "run", watched)
    monkeypatch.setattr(
        *(prompt_scores.PromptScorer, "score"),
        lambda self, logits, *given, **named: (
            sizes.append(len(logits)) or scored(self, logits, *given, **named)
        ),
    )
    prompts = [list(range(40)), [5], list(range(30, 70)), list(range(9))]
    options = {"num_prompt_log_probs": 2, "return_log_probs": True}
    host = serve(source, [request(i, prompt, 1, **options) for i, prompt in enumerate(prompts)])
    assert max(sizes) <= most + len(prompts)
    monkeypatch.undo()
    plain = serve(source, [request(i, p, 1, **(options | LOGITS)) for i, p in enumerate(prompts)])
    for number, prompt in enumerate(prompts):
        assert_prompt(plain.final(number).tensors, prompt, 2)
        for name in PROMPT:
            wanted = plain.final(number).tensors[name]
            torch.testing.assert_close(host.final(number).tensors[name], wanted)


def test_a_step_without_top_log_probs_computes_none(source, monkeypatch):
    for owner, name in (
        (prompt_scores.PromptScorer, "score"),
        (torch_executor.TorchExecutor, "_context_logits"),
        (torch_executor.TorchExecutor, "_prompt_log_probs"),
        (torch_executor.ContextPart, "__new__"),
    ):
        monkeypatch.setattr(owner, name, lambda *args, **named: 1 / 0)
    monkeypatch.setattr("gptmanager.executor.choice.token_chooser.TopTokens", None)
    monkeypatch.setattr("gptmanager.executor.choice.token_chooser.best_ids", None)
    host = serve(source, [request(0, [1, 2, 3], 4, return_log_probs=True)])
    assert host.final(0).tensors["output_log_probs"].shape == (1, 1, 4)


def test_log_probs_after_the_end_of_a_request_with_top_log_probs(source):
    """A step may have no row of a request that asks for them, while others ask for log probs."""
    others = [request(i, [1 + i, 2], 6, return_log_probs=True) for i in (1, 2)]
    host = serve(source, [request(0, [1, 2], 2, num_top_log_probs=3), *others])
    for own in others:
        alone = serve(source, [request(own.request_id, own.input_ids, 6, return_log_probs=True)])
        found, expected = (it.final(own.request_id).tensors for it in (host, alone))
        torch.testing.assert_close(found["output_log_probs"], expected["output_log_probs"])


def test_streams_have_them_with_their_tokens(source):
    """Held back with what may be a stop word; of the prompt in the first response alone."""
    words = [[t, u] for t in range(0, VOCAB, 2) for u in range(95)]
    asked = request(0, [1, 2, 3], 20, is_streaming=True, stop_words_list=words, **ASKED)
    responses = serve(source, [asked]).of(0)
    told = [name for name in PROMPT for response in responses[:1] if name in response.tensors]
    assert told == [*PROMPT]
    assert not any({*PROMPT} & response.tensors.keys() for response in responses[1:])
    for response in responses:
        assert response.tensors["top_log_probs"].shape[2] == response.tensors["output_ids"].shape[2]


def test_rounding_makes_no_log_prob_positive():
    sampler = Sampler(1, 2)
    sampler.load(0, SamplingParams(greedy=False), 1, OutputConfig(num_top_log_probs=2))
    chosen, known = np.array([1], np.int32), np.float32([-9.9])  # more than -10.00005
    logits, lines = torch.tensor([[10.0, 0.0]]), np.array([0])
    found = sampler.log_probs_of(np.array([[0, 1]]), logits, lines, chosen, known)
    assert found.tolist() == [[0.0, known[0]]]


def test_of_equal_ones_the_lowest_id_comes_first():
    scores = torch.tensor([[1.0, 3, 3, 1, 1, -torch.inf], [-torch.inf] * 3 + [0.0, -torch.inf, 0]])
    assert best_ids(scores, 4).tolist() == [[1, 2, 0, 3], [3, 5, 0, 1]]
    assert best_ids(scores, 9).tolist() == [[1, 2, 0, 3, 4, 5], [3, 5, 0, 1, 2, 4]]


def test_what_is_banned_has_no_probability(source):
    bias = np.full(VOCAB, -np.inf, dtype=np.float32)
    bias[[9, 4]] = 0.0
    asked = request(0, [1, 2], 3, num_top_log_probs=4, embedding_bias=bias)
    tensors = serve(source, [asked]).final(0).tensors
    assert tensors["top_log_prob_ids"][0, 0].sort(1).values.tolist() == [[0, 1, 4, 9]] * 3
    assert tensors["top_log_prob_ids"][0, 0, :, 2:].tolist() == [[0, 1]] * 3
    assert torch.isneginf(tensors["top_log_probs"][0, 0, :, 2:]).all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_top_log_probs": 129}, "num_top_log_probs = 129 is outside 0..128"),
        ({"num_top_log_probs": -1}, "num_top_log_probs = -1 is outside 0..128"),
        ({"num_prompt_log_probs": 200}, "num_prompt_log_probs = 200 is outside -1..128"),
        ({"num_prompt_log_probs": -2}, "num_prompt_log_probs = -2 is outside -1..128"),
        ({"num_top_log_probs": 1.5}, "num_top_log_probs"),
        (
            {"num_prompt_log_probs": 0, "prompt_embedding_table": np.zeros((1, 32), np.float32)},
            "num_prompt_log_probs = 0 is refused with prompt_embedding_table",
        ),
    ],
)
def test_what_is_refused(source, options, text):
    host = RecordingCallbacks([request(0, [1, 2], 2, **options), request(1, [1, 2], 2)])
    with GptManager(source, ModelType.INFLIGHT_FUSED_BATCHING, 1, **host.keywords()) as manager:
        assert manager.wait_idle(60)
    assert host.final(0).error.startswith(InvalidRequestError.__name__)
    assert text in host.final(0).error
    assert not host.final(1).error


def test_a_request_cut_short_returns_the_outputs_so_far(source):
    asked = [request(i, [1, 2, 3], 9, queue_timeout_s=[None, 0.0][i], **ASKED) for i in (0, 1)]
    tensors = serve(source, asked, max_batch_size=1, max_active_requests=2).final(1).tensors
    shapes = [tuple(tensors[name].shape) for name in (*TOP, *PROMPT)]
    assert shapes == [(1, 1, 0, 5), (1, 1, 0, 5), (1, 0), (1, 0, 3), (1, 0, 3)]


def test_a_recording_with_them_replays(source, tmp_path):
    path = tmp_path / "run.jsonl"
    options = {"kv": {"max_tokens": 128}, "policy": MAX_UTILIZATION, "max_beam_width": 3}
    serve(source, mixed()[:6], recording_path=path, **options)
    recording = read_recording(path)
    assert recording.end is not None and recording.end.reason == "drained"
    assert replay(recording).divergence is None


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("top_log_probs", None, "lacks top_log_probs"),
        ("top_log_prob_ids", lambda ids: ids[..., :1, :], "has 1 positions"),
        ("top_log_probs", lambda values: values.double(), "top_log_probs is torch.float64"),
        ("prompt_log_probs", None, "lacks prompt_log_probs"),
        ("top_log_probs", lambda values: values, "^request 0 has no final response$"),
    ],
)
def test_the_contract_checker_knows_them(name, change, text):
    asked = request(0, [1, 2], 3, is_streaming=True, **ASKED)
    host = RecordingCallbacks([asked])
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    next(iter(checker.get_inference_requests(1)))
    ids = torch.zeros(1, 1, 2, 5, dtype=torch.int32)
    tensors = {
        "output_ids": torch.zeros(1, 1, 2, dtype=torch.int32),
        "sequence_length": torch.tensor([[2]]),
        "output_offset": torch.tensor([0]),
        "top_log_probs": ids.float(),
        "top_log_prob_ids": ids,
        "prompt_log_probs": torch.zeros(1, 1),
    }
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    checker.send_response(0, [*tensors.items()], False, "")
    with pytest.raises(ContractViolation, match=text):
        checker.check()


def test_a_model_of_a_host_gives_them_too():
    asked = request(0, [1, 2], 3, return_log_probs=True, **ASKED)
    tensors = serve(ScriptedModel(lambda history: history[-1] + 1), [asked]).final(0).tensors
    assert tensors["top_log_prob_ids"][0, 0, :, 0].tolist() == [3, 4, 5]
    assert torch.equal(tensors["top_log_probs"][..., 0], tensors["output_log_probs"])
    assert tensors["prompt_top_log_prob_ids"][0, 0, 0] == 2

"""Logits post-processors in whole managers: what they see, what they change, what they cannot."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict

import numpy as np
import pytest
import torch
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st
from logits_requests import END_ID, VOCAB_SIZE, expected, next_token, output, request, serve

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    ModelType,
    OptionalParams,
)
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.processors.rows import ModelStream
from gptmanager.errors import ConfigError
from gptmanager.recorder import black_box
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart
from gptmanager.testing import RecordingCallbacks, ScriptedModel

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def chosen_by_a_processor(history):
    """Another function of the whole history."""
    return (sum(history) * 3 + history[0] + len(history)) % END_ID


def choose_by_history(request_id, logits, tokens, stream, client_id):
    logits[0, 0, chosen_by_a_processor(tokens[0])] = 1e6


class Spy:
    """Writes down what it is called with, and does what `act` does."""

    def __init__(self, act=choose_by_history):
        self.act = act
        self.lengths = defaultdict(list)  # by request: tokens of the history at each call
        self.calls = []

    def __call__(self, request_id, logits, tokens, stream, client_id):
        self.lengths[request_id].append(len(tokens[0]))
        self.calls.append((request_id, client_id))
        return self.act(request_id, logits, tokens, stream, client_id)


class Batch(Spy):
    """The same, for all requests of a step at once."""

    def process_batch(self, request_ids, logits, tokens, stream, client_ids):
        self.calls.append((list(request_ids), list(client_ids)))
        for i, one_logits, one_tokens in zip(request_ids, logits, tokens, strict=True):
            self.lengths[i].append(len(one_tokens[0]))
            self.act(i, one_logits, one_tokens, stream, None)


def metrics(host, request_id):
    return host.final(request_id).tensors["request_metrics"].tolist()


# What it is called with ---------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("prompt_len", [1, 30])
def test_it_sees_the_whole_history_once_for_every_token(prompt_len, run_ahead):
    spy = Spy()
    asked = [request(i, prompt_len + i, 5, logits_post_processor=spy) for i in range(3)]
    host = serve(asked, run_ahead=run_ahead, max_num_tokens=32, enable_chunked_context=True)
    for one in asked:
        prompt = one.input_ids.tolist()
        assert output(host, one) == expected(prompt, 5, chosen_by_a_processor)
        # not for a chunk that leaves its context unfinished, and never twice
        assert spy.lengths[one.request_id] == list(range(len(prompt), len(prompt) + 5))


def test_others_in_the_batch_are_not_touched():
    asked = [
        request(i, logits_post_processor=choose_by_history if i % 2 else None) for i in range(6)
    ]
    host = serve(asked)
    for one in asked:
        choose = chosen_by_a_processor if one.request_id % 2 else next_token
        assert output(host, one) == expected(one.input_ids.tolist(), 6, choose)


@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("form", [Spy, Batch])
@pytest.mark.parametrize("reuse", [False, True])
def test_pauses_never_show(form, run_ahead, reuse):
    spy = form()
    asked = [
        request(i, 4, 30, logits_post_processor=spy, is_streaming=bool(i % 2)) for i in range(5)
    ]
    host = serve(
        asked, MAX_UTILIZATION, 72, reuse, max_num_tokens=16, max_seq_len=40, run_ahead=run_ahead
    )
    assert sum(metrics(host, i)[3] for i in range(5)) > 0  # pauses
    for one in asked:
        assert output(host, one) == expected(one.input_ids.tolist(), 30, chosen_by_a_processor)
        assert set(spy.lengths[one.request_id]) == set(range(4, 34))


def test_a_row_whose_request_has_ended_is_not_processed():
    """Under run-ahead a row is launched behind the end; its processor is not called."""

    def end_at_the_fourth(request_id, logits, tokens, stream, client_id):
        if len(tokens[0]) == 6:
            logits[0, 0, END_ID] = 1e6

    spy = Spy(end_at_the_fourth)
    host = serve([request(1, 3, 20, logits_post_processor=spy, end_id=END_ID)], run_ahead=1)
    assert host.final(1).tensors["finish_reasons"].tolist() == [[1]]
    assert spy.lengths[1] == [3, 4, 5, 6]


def test_client_ids_may_be_shared_and_absent():
    spy = Spy()
    asked = [
        request(i, 3, 2, logits_post_processor=spy, client_id=c)
        for i, c in ((1, 7), (2, 7), (3, None))
    ]
    serve(asked)
    assert set(spy.calls) == {(1, 7), (2, 7), (3, None)}


def test_what_it_is_given():
    seen = []

    def look(request_id, logits, tokens, stream, client_id):
        seen.append((logits.dtype, list(logits.shape), tokens))
        with stream:
            stream.synchronize()
        assert (stream.cuda_stream, stream.stream_id, stream.device_index) == (0, 0, -1)

    host = serve([request(1, 3, 1, logits_post_processor=look)])
    assert not host.final(1).error
    assert seen == [(torch.float32, [1, 1, VOCAB_SIZE], [request(1).input_ids.tolist()])]


def test_a_stream_nests_on_the_cpu():
    stream = ModelStream(torch.device("cpu"))
    with stream as one, one as other:
        assert one is other is stream


@pytest.mark.parametrize("spoil", [list.clear, list.pop, lambda tokens: tokens.append(1)])
def test_a_processor_that_changes_the_tokens_gets_the_right_ones_again(spoil):
    def act(request_id, logits, tokens, stream, client_id):
        choose_by_history(request_id, logits, tokens, stream, client_id)
        spoil(tokens[0])

    host = serve([request(1, logits_post_processor=act), request(2)])
    assert output(host, request(1)) == expected(
        request(1).input_ids.tolist(), 6, chosen_by_a_processor
    )
    assert output(host, request(2)) == expected(request(2).input_ids.tolist(), 6, next_token)


# What it returns ----------------------------------------------------------------------------------


def test_a_returned_tensor_replaces_the_logits():
    def replace(request_id, logits, tokens, stream, client_id):
        mine = torch.zeros_like(logits)
        mine[0, 0, chosen_by_a_processor(tokens[0])] = 1.0
        return mine

    host = serve([request(1, logits_post_processor=replace)])
    wanted = expected(request(1).input_ids.tolist(), 6, chosen_by_a_processor)
    assert output(host, request(1)) == wanted


def test_returning_the_logits_it_was_given_is_fine():
    def act(request_id, logits, tokens, stream, client_id):
        choose_by_history(request_id, logits, tokens, stream, client_id)
        return logits

    host = serve([request(1, logits_post_processor=act)])
    wanted = expected(request(1).input_ids.tolist(), 6, chosen_by_a_processor)
    assert output(host, request(1)) == wanted


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda logits: logits[0], r"returned a torch.float32 tensor \[1, 50\] on cpu, expected"),
        (lambda logits: logits.double(), r"returned a torch.float64 tensor \[1, 1, 50\]"),
        (
            lambda logits: logits[..., :9],
            r"\[1, 1, 9\] on cpu, expected torch.float32 \[1, 1, 50\]",
        ),
        (lambda logits: 5, "returned a value of type int, expected None or a tensor"),
        (lambda logits: logits[0, 0, 1000], "raised IndexError"),
    ],
)
def test_a_wrong_answer_ends_its_request_only(answer, text):
    def act(request_id, logits, tokens, stream, client_id):
        return answer(logits) if len(tokens[0]) == 5 else None

    asked = [request(1, logits_post_processor=act, is_streaming=True), request(2)]
    host = serve(asked)
    error = host.final(1).error
    assert error.startswith("CallbackError: logits_post_processor ") and "act" in error
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(error)
    assert host.output(1) == expected(request(1).input_ids.tolist(), 2, next_token)
    assert output(host, asked[1]) == expected(request(2).input_ids.tolist(), 6, next_token)


# Errors -------------------------------------------------------------------------------------------


class Broken:
    """Raises at the third token."""

    name = "broken by design"

    def __init__(self, error=ValueError):
        self.error = error
        self.calls = 0

    def __call__(self, request_id, logits, tokens, stream, client_id):
        self.calls += 1
        if len(tokens[0]) >= 5:
            logits.fill_(float("nan"))
            raise self.error("no such token")


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("run_ahead", [0, 1])
@pytest.mark.parametrize("max_new_tokens", [3, 6])  # 3: it would have ended with that token
def test_an_error_ends_only_its_request(run_ahead, max_new_tokens, error, caplog):
    broken = Broken(error)
    asked = [
        request(1, 3, max_new_tokens, logits_post_processor=broken),
        *(request(i, 3, 9) for i in (2, 3)),
    ]
    host = serve(asked, run_ahead=run_ahead)
    assert len(host.of(1)) == 1
    text = f"CallbackError: logits_post_processor broken by design raised {error.__name__}: no such"
    assert host.final(1).error.startswith(text)
    assert broken.calls == 3
    for one in asked[1:]:
        assert output(host, one) == expected(one.input_ids.tolist(), 9, next_token)
    assert "broken by design failed; it ends the requests [1]" in caplog.text
    assert host.health.callbacks["LogitsPostProcessor"].errors == 1


@pytest.mark.parametrize(
    "kind", [{}, {"beam_width": 3}, {"num_return_sequences": 2}, {"draft_input_ids": [1, 2, 3]}]
)
@pytest.mark.parametrize("max_new_tokens", [3, 6])
@pytest.mark.parametrize("prompt_len", [3, 4, 5])  # it fails at its third token, or sooner
@pytest.mark.parametrize("options", [{"run_ahead": 1}, {"enable_trt_overlap": True}, {}], ids=str)
@pytest.mark.every(5)
def test_an_error_next_to_requests_that_do_not_run_ahead(options, prompt_len, max_new_tokens, kind):
    """For those a result comes before the next schedule, its failure only after that."""

    def break_later(request_id, logits, tokens, stream, client_id):
        if len(tokens[0]) >= 5:
            raise ValueError("no such token")

    asked = [
        request(1, prompt_len, max_new_tokens, logits_post_processor=break_later, **kind),
        request(2, 3, 9, draft_input_ids=[7]),
    ]
    host = serve(asked, max_beam_width=3, **options)
    assert "break_later raised ValueError" in host.final(1).error
    assert output(host, asked[1]) == expected(asked[1].input_ids.tolist(), 9, next_token)


def test_the_id_of_a_request_that_failed_is_free_again():
    """An error of a row behind the end must not reach the next request of that id."""

    class Late:
        def process_batch(self, request_ids, logits, tokens, stream, client_ids):
            for one, history in zip(logits, tokens, strict=True):
                if len(history[0]) == 5:
                    one[0, 0, END_ID] = 1e6
                if len(history[0]) == 6:  # the wasted row
                    raise ValueError("too late")

    host = RecordingCallbacks([request(1, 3, 20, end_id=END_ID)])
    send = host.send_response

    def send_response(request_id, tensors, is_final, error):
        send(request_id, tensors, is_final, error)
        if is_final and len(host.responses) == 1:
            host.submit(request(1, 7, 4, end_id=END_ID))

    with GptManager(
        ScriptedModel(next_token, vocab_size=VOCAB_SIZE),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(
            run_ahead=1, max_batch_size=4, logits_post_processor_batched=Late()
        ),
        **{**host.keywords(), "send_response_cb": send_response},
    ) as manager:
        assert manager.wait_idle(20)
    assert [response.error for response in host.responses] == ["", ""]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_odd_logits_harm_their_own_row_only(value):
    def act(request_id, logits, tokens, stream, client_id):
        logits.fill_(value)

    asked = [request(1, logits_post_processor=act), request(2), request(3, temperature=1.0)]
    host, alone = serve(asked), serve([request(3, temperature=1.0)])
    assert host.final(1).error.startswith("LogitsError: ")
    assert output(host, asked[1]) == expected(request(2).input_ids.tolist(), 6, next_token)
    assert host.output(3) == alone.output(3)


def test_one_that_overstays_its_budget_is_named(caplog):
    caplog.set_level(logging.WARNING, logger="gptmanager")
    asked = [request(1, 3, 5, logits_post_processor=Spy())]
    serve(asked, logits_post_processor_budget_s=0.0)
    warnings = [r.getMessage() for r in caplog.records if "its budget is" in r.getMessage()]
    assert len(warnings) == 3  # the 1st, 2nd and 4th of five calls
    assert warnings[0].startswith("logits_post_processor Spy took ")
    caplog.clear()
    for budget_s in (None, 3600.0):
        host = serve(
            [request(1, logits_post_processor=Spy())], logits_post_processor_budget_s=budget_s
        )
        assert not host.final(1).error
    assert "budget" not in caplog.text


def test_names():
    def names_of(processor):
        host = serve([request(1, 3, 1, logits_post_processor=processor)])
        return host.final(1).error

    def fails(*arguments):
        raise ValueError("x")

    assert "test_names.<locals>.fails raised" in names_of(fails)
    assert "partial raised" in names_of(functools.partial(fails))


@given(
    data=st.data(),
    policy=st.sampled_from(list(CapacitySchedulerPolicy)),
    chunked=st.booleans(),
    reuse=st.booleans(),
    run_ahead=st.integers(0, 1),
    blocks=st.integers(12, 30),
)
@settings(max_examples=12 * FUZZ)
def test_no_schedule_shows(data, policy, chunked, reuse, run_ahead, blocks):
    """Whoever runs with whom, when, in which chunks, paused or not."""
    spy, shared, broken = Spy(), Batch(), Broken()
    processors = [None, spy, shared, broken]
    asked = []
    for i in range(data.draw(st.integers(1, 8))):
        processor = data.draw(st.sampled_from(processors))
        lengths = data.draw(st.tuples(st.integers(1, 15), st.integers(1, 20)))
        streams = data.draw(st.booleans())
        asked.append(request(i, *lengths, logits_post_processor=processor, is_streaming=streams))
    host = serve(
        asked,
        policy,
        blocks * 4,
        max_seq_len=40,
        enable_chunked_context=chunked or policy is MAX_UTILIZATION,
        max_num_tokens=16,
        run_ahead=run_ahead,
        reuse=reuse,
    )
    for one in asked:
        prompt, count = one.input_ids.tolist(), int(one.max_new_tokens)
        if one.logits_post_processor is broken:
            fails = len(prompt) + count > 5
            assert bool(host.final(one.request_id).error) == fails
            continue
        choose = next_token if one.logits_post_processor is None else chosen_by_a_processor
        assert output(host, one) == expected(prompt, count, choose)
    for seen in (spy, shared):
        for request_id, lengths in seen.lengths.items():
            start = len(asked[request_id].input_ids)
            end = start + int(asked[request_id].max_new_tokens)
            assert set(lengths) == set(range(start, end))


def test_what_has_ended_is_let_go_of():
    """Neither a slot nor a step keeps a processor, and a step without any pays one `if`."""
    spy = Spy()
    processing = PostProcessing(Lines(2))
    handle = RequestProcessor(spy)
    processing.start(SequenceStart(1, (4, 5), 2, SamplingParams(), handle))
    step = torch.zeros(1, VOCAB_SIZE), [3], np.array([1]), np.array([2])
    tokens = np.full((2, 9), 4, dtype=np.int32)
    processing.run(*step, tokens)
    assert processing.sequences and spy.lengths[3] == [2]
    handle.end()
    processing.run(*step, tokens)
    assert not processing.sequences and spy.lengths[3] == [2] and handle.post_processor is None


# Shared by several requests -----------------------------------------------------------------------


def test_requests_that_share_an_object_share_the_call():
    first, second = Batch(), Batch()
    asked = [
        request(i, 3, 4, logits_post_processor=first if i < 3 else second, client_id=i + 10)
        for i in range(5)
    ]
    host = serve([*asked, request(9)])
    assert first.calls == [([0, 1, 2], [10, 11, 12])] * 4
    assert second.calls == [([3, 4], [13, 14])] * 4
    for one in asked:
        assert output(host, one) == expected(one.input_ids.tolist(), 4, chosen_by_a_processor)
    assert output(host, request(9)) == expected(request(9).input_ids.tolist(), 6, next_token)


@pytest.mark.parametrize("as_function", [False, True])
def test_the_batched_one_of_the_manager_serves_requests_without_their_own(as_function):
    own, batched = Spy(), Batch()
    asked = [request(1, logits_post_processor=own), request(2, client_id=5), request(3)]
    option = batched.process_batch if as_function else batched
    host = serve(asked, logits_post_processor_batched=option)
    assert set(own.lengths) == {1} and set(batched.lengths) == {2, 3}
    assert batched.calls[0] == ([2, 3], [5, None])
    for one in asked:
        assert output(host, one) == expected(one.input_ids.tolist(), 6, chosen_by_a_processor)


def test_an_error_in_a_shared_call_ends_every_request_of_it():
    class Fragile:
        def process_batch(self, request_ids, logits, tokens, stream, client_ids):
            raise OSError("gone")

    shared = Fragile()
    asked = [request(i, logits_post_processor=shared if i < 2 else None) for i in range(3)]
    host = serve(asked)
    for i in (0, 1):
        text = "CallbackError: logits_post_processor "
        assert host.final(i).error.startswith(text) and "Fragile raised" in host.final(i).error
    assert output(host, asked[2]) == expected(asked[2].input_ids.tolist(), 6, next_token)


def test_a_batched_one_may_answer_for_each_request():
    class Answers:
        def process_batch(self, request_ids, logits, tokens, stream, client_ids):
            replaced = torch.zeros_like(logits[1])
            replaced[0, 0, 8] = 1.0
            answers = {0: None, 1: replaced, 2: ValueError("not this one")}
            return [answers[request_id] for request_id in request_ids]

    shared = Answers()
    asked = [request(i, 3, 2, logits_post_processor=shared) for i in range(3)]
    host = serve([*asked, request(4)])
    assert output(host, asked[0]) == expected(asked[0].input_ids.tolist(), 2, next_token)
    assert output(host, asked[1])[:1] == [8]
    assert host.final(2).error.endswith("Answers raised ValueError: not this one")


def test_answers_of_another_number_end_them_all():
    class Answers:
        def process_batch(self, request_ids, logits, tokens, stream, client_ids):
            return [None]

    shared = Answers()
    host = serve([request(i, logits_post_processor=shared) for i in range(2)])
    assert host.final(0).error.endswith("returned 1 values for 2 requests")


def test_a_batched_option_that_is_not_callable_is_refused():
    with pytest.raises(ConfigError, match="logits_post_processor_batched is of type int"):
        serve([], logits_post_processor_batched=3)


# Recorded -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_a_recording_survives_processors(tmp_path, run_ahead):
    path = tmp_path / "run.jsonl"
    asked = [
        request(1, logits_post_processor=choose_by_history, client_id=4),
        request(2, logits_post_processor=Broken()),
        request(3, logits_post_processor=Batch(), is_streaming=True),
        request(4),
        request(5, logits_post_processor="nobody"),
        request(6, logits_post_processor=object()),
    ]
    host = serve(asked, MAX_UTILIZATION, 56, recording_path=path, run_ahead=run_ahead)
    recording = read_recording(path)
    start = recording.iterations[0].schedule.starts[0]
    assert start.processor.name == "choose_by_history" and start.client_id == 4
    report = replay(recording)
    assert report.divergence is None and report.compared == len(recording.iterations)
    assert host.final(5).error.startswith(
        "InvalidRequestError: logits_post_processor is of type str"
    )
    assert host.final(6).error.startswith(
        "InvalidRequestError: logits_post_processor is of type object"
    )


def test_a_black_box_survives_processors(tmp_path, monkeypatch):
    # on a busy machine a state may take so long that the next one would be after the failure
    monkeypatch.setattr(black_box, "_STATE_NS_PER_ITERATION", 1 << 40)
    path = tmp_path / "box.jsonl"

    def crash(history):
        if len(history) == 1000:
            raise RuntimeError("the device is on fire")
        return next_token(history)

    host = RecordingCallbacks(
        [request(i, 3, 1200, logits_post_processor=Spy(lambda *_: None)) for i in range(3)]
    )
    with GptManager(
        ScriptedModel(crash, vocab_size=VOCAB_SIZE),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(max_batch_size=4, black_box_path=path),
        **host.keywords(),
    ):
        for request_id in range(3):
            host.final(request_id, timeout=30)
    recording = read_recording(path)
    assert recording.header.state is not None
    report = replay(recording)
    assert report.divergence is None and "on fire" in report.broke_off

"""What hosts test themselves with finds what it should, and nothing else."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gptmanager import GptManager, InferenceRequest, ModelType, NamedTensor, OptionalParams
from gptmanager.errors import ConfigError, ManagerDeadError
from gptmanager.manager.inspection import AuditReport
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import BeamFork, BlockAppend, Drafts, Row, Schedule, SequenceStart
from gptmanager.testing import (
    ContractChecker,
    ContractViolation,
    RecordingCallbacks,
    ScriptedExecutor,
    ScriptedModel,
)

# The contract checker ---------------------------------------------------------------------------


def ints(name, values):
    return NamedTensor(name, torch.tensor(values, dtype=torch.int32))


def partial(tokens, offset):
    return [
        ints("output_ids", [[tokens]]),
        ints("sequence_length", [[len(tokens)]]),
        ints("output_offset", [offset]),
    ]


ENDING = [
    ints("finish_reasons", [[3]]),
    NamedTensor("request_metrics", torch.zeros(7, dtype=torch.float64)),
]


def whole(tokens):
    return [*partial(tokens, 0)[:2], *ENDING]


class Bench:
    """A checker whose host asks for some requests, and whose manager is played by the test."""

    def __init__(self, *requests):
        self.host = RecordingCallbacks(requests)
        self.checker = ContractChecker(
            self.host.get_inference_requests,
            self.host.send_response,
            tolerates_duplicates=True,
        )
        self.get()

    def get(self):
        return list(self.checker.get_inference_requests(-1))

    def send(self, request_id, tensors, is_final=False, error=""):
        self.checker.send_response(request_id, tensors, is_final, error)

    def violation(self, manager=None):
        with pytest.raises(ContractViolation) as violation:
            self.checker.check(manager)
        return str(violation.value)


def request(request_id, *, streaming=True):
    return InferenceRequest.from_tokens(request_id, [1, 2], 5, is_streaming=streaming)


def test_what_keeps_the_contract_passes():
    bench = Bench(request(1), request(2, streaming=False), request(3), request(4))
    bench.send(1, partial([5], 0))
    bench.send(3, partial([5, 6], 0))
    bench.send(1, partial([6, 7], 1))
    bench.send(2, whole([1, 2, 8]), True)
    bench.send(3, [], True, "CallbackError: gone")
    bench.send(1, [*partial([], 3), *ENDING], True)
    bench.send(4, [*partial([9], 0), *ENDING], True)

    bench.checker.check()
    # and the host has seen it all
    assert bench.host.output(1) == [5, 6, 7]
    assert len(bench.host.responses) == 7


def test_a_missing_final():
    bench = Bench(request(1), request(2))
    bench.send(2, partial([5], 0))
    assert bench.violation() == ("request 1 has no final response; request 2 has no final response")


def test_a_second_final():
    bench = Bench(request(1, streaming=False))
    bench.send(1, whole([1, 2, 8]), True)
    bench.send(1, whole([1, 2, 8]), True)
    assert bench.violation() == "a second final response to request 1"


def test_an_error_after_the_final():
    bench = Bench(request(1, streaming=False))
    bench.send(1, whole([1, 2, 8]), True)
    bench.send(1, [], True, "ManagerDeadError: the manager was shut down")
    assert bench.violation() == "a second final response to request 1"


def test_a_response_after_the_final():
    bench = Bench(request(1))
    bench.send(1, [*partial([5], 0), *ENDING], True)
    bench.send(1, partial([6], 1))
    assert bench.violation() == "a response to request 1 after its final response"


def test_a_response_to_an_unknown_request():
    bench = Bench()
    bench.send(7, partial([6], 0))
    assert bench.violation() == "a response to request 7, which Get has not returned"


def test_an_id_may_be_used_again_after_its_final():
    bench = Bench(request(1))
    bench.send(1, [*partial([5], 0), *ENDING], True)
    bench.host.submit(request(1))
    bench.get()
    bench.send(1, partial([6], 0))
    bench.send(1, [*partial([7], 1), *ENDING], True)
    bench.checker.check()


@pytest.mark.parametrize("offset", [0, 2])
def test_a_gap_or_a_repetition_in_the_offsets(offset):
    bench = Bench(request(1))
    bench.send(1, partial([5], 0))
    bench.send(1, [*partial([6], offset), *ENDING], True)
    assert bench.violation() == f"request 1: output_offset {offset}, expected 1"


def test_a_stream_in_the_wrong_order():
    bench = Bench(request(1))
    bench.send(1, partial([6], 1))
    bench.send(1, partial([5], 0))
    bench.send(1, [*partial([], 2), *ENDING], True)
    assert "output_offset 1, expected 0" in bench.violation()


def test_a_partial_response_without_streaming():
    bench = Bench(request(1, streaming=False))
    bench.send(1, whole([1, 2, 8]))
    bench.send(1, whole([1, 2, 8]), True)
    assert (
        bench.violation()
        == "request 1 does not stream, yet got a response before its final response"
    )


def test_an_empty_response_that_is_not_final():
    bench = Bench(request(1))
    bench.send(1, partial([], 0))
    bench.send(1, [*partial([], 0), *ENDING], True)
    assert bench.violation() == "request 1: a response without tokens that is not final"


@pytest.mark.parametrize(("tensors", "is_final"), [(partial([5], 0), True), ([], False)])
def test_an_error_with_tensors_or_that_is_not_final(tensors, is_final):
    bench = Bench(request(1))
    bench.send(1, tensors, is_final, "CallbackError: gone")
    assert "the error response to request 1 has tensors or is not final" in bench.violation()


@pytest.mark.parametrize(
    ("tensors", "lacking"),
    [
        ([*partial([5], 0)[:2], *ENDING], "output_offset"),
        (partial([5], 0), "finish_reasons', 'request_metrics"),
        ([*partial([5], 0)[1:], *ENDING], "output_ids"),
    ],
)
def test_a_response_without_what_belongs_to_it(tensors, lacking):
    bench = Bench(request(1))
    bench.send(1, tensors, True)
    assert bench.violation() == f"request 1: a response lacks ['{lacking}']"


def test_log_probabilities_that_were_not_asked_for():
    bench = Bench(request(1))
    tensors = {"top_log_probs": torch.zeros(1, 1, 1, 5), "prompt_log_probs": torch.zeros(1, 1)}
    bench.send(1, [*partial([5], 0), *tensors.items(), *ENDING], True)
    assert bench.violation() == (
        "request 1: top_log_probs was not asked for; "
        "request 1: a response has unexpected prompt_log_probs"
    )


def test_misshapen_output():
    bench = Bench(request(1), request(2))
    tensors = dict(partial([5], 0))
    shape = [*tensors.items()]
    bench.send(1, [("output_ids", tensors["output_ids"][0]), *shape[1:], *ENDING], True)
    bench.send(2, [("output_ids", tensors["output_ids"][:, :, :0]), *shape[1:], *ENDING], True)
    assert bench.violation() == (
        "request 1: output_ids is torch.int32 [1, 1]; "
        "request 2: sequence_length exceeds output_ids [1, 1, 0]"
    )


def test_a_duplicate_id_is_answered_with_its_own_error():
    duplicate = "DuplicateRequestIdError: request id 1 belongs to another request"
    bench = Bench(request(1), request(1))
    bench.send(1, [], True, duplicate)
    bench.send(1, partial([5], 0))  # the first goes on
    bench.send(1, [*partial([6], 1), *ENDING], True)
    bench.checker.check()


def test_a_duplicate_id_that_is_not_answered():
    bench = Bench(request(1), request(1))
    bench.send(1, [*partial([6], 0), *ENDING], True)
    assert bench.violation() == "the second request 1 has no final response"


def test_a_duplicate_id_that_is_taken_for_the_first():
    bench = Bench(request(1), request(1))
    bench.send(1, [*partial([6], 0), *ENDING], True)
    bench.send(1, [*partial([6], 0), *ENDING], True)
    assert "a second final response to request 1" in bench.violation()


def test_an_error_of_a_duplicate_that_is_none():
    bench = Bench(request(1))
    bench.send(1, [*partial([6], 0), *ENDING], True)
    bench.send(1, [], True, "DuplicateRequestIdError: request id 1 belongs to another request")
    assert "a second final response to request 1" in bench.violation()


def ledger(owners, problems=()):
    report = AuditReport(not problems, tuple(problems), 9, 9 - len(owners), len(owners), owners)
    return SimpleNamespace(audit=lambda: report)


def test_leaked_blocks():
    bench = Bench(request(1))
    bench.send(1, [*partial([6], 0), *ENDING], True)

    bench.checker.check(ledger({}))
    assert bench.violation(ledger({3: (1,)})) == "block 3 leaked: it is held by requests [1]"
    assert bench.violation(ledger({}, ["5 free + 3 used of 9 blocks"])) == (
        "5 free + 3 used of 9 blocks"
    )


def test_a_block_of_a_live_request_has_not_leaked():
    bench = Bench(request(1))
    assert bench.violation(ledger({3: (1, 7)})) == "request 1 has no final response"


def test_a_get_that_raises_half_way():
    def get(room):
        yield request(1)
        raise ConnectionError

    checker = ContractChecker(get, lambda *response: None)
    requests = checker.get_inference_requests(4)
    assert next(requests).request_id == 1
    with pytest.raises(ConnectionError):
        next(requests)
    with pytest.raises(ContractViolation, match="request 1 has no final"):
        checker.check()


def test_stop_signals_of_a_generator_reach_the_manager_also_before_its_error():
    def poll():
        yield 1
        raise ConnectionError

    checker = ContractChecker(list, lambda *response: None, poll)
    stops = checker.poll_stop_signal()
    assert next(iter(stops)) == 1
    with pytest.raises(ConnectionError):
        list(stops)
    with pytest.raises(ContractViolation, match="Poll raised ConnectionError"):
        checker.check()


def test_whatever_a_host_returns_reaches_the_manager():
    checker = ContractChecker(lambda room: ["nonsense"], lambda *response: None)
    assert list(checker.get_inference_requests(1)) == ["nonsense"]
    with pytest.raises(ContractViolation, match="Get returned 'nonsense', expected an Inference"):
        checker.check()


# Hosts that break the contract ---------------------------------------------------------------


def complaints(host_get=lambda room: [], send=lambda *response: None, poll=None, **options):
    """What a checker says of a host, after one Get of room for 2, its answers, and a Poll."""
    checker = ContractChecker(host_get, send, poll, **options)
    with suppress(Exception):
        for one in checker.get_inference_requests(2):
            with suppress(Exception):
                checker.send_response(one.request_id, [*partial([6], 0), *ENDING], True, "")
    with suppress(Exception):
        list(checker.poll_stop_signal())
    try:
        checker.check()
    except ContractViolation as violation:
        return str(violation)
    return "\n".join(checker.notes)


def fail(*arguments):
    raise ConnectionError("no")


def test_a_host_that_keeps_the_contract():
    assert not complaints(lambda room: [request(1), request(2)], poll=lambda: {1, 99})


@pytest.mark.parametrize(
    ("host", "text"),
    [
        ({"host_get": fail}, "Get raised ConnectionError: no"),
        ({"host_get": lambda room: None}, "Get returned None, expected an iterable"),
        ({"host_get": lambda room: [None]}, "Get returned None, expected an InferenceRequest"),
        (
            {"host_get": lambda room: [request(1)], "send": fail},
            "SendResponse raised ConnectionError: no for the final response to request 1, which is",
        ),
        ({"poll": fail}, "Poll raised ConnectionError: no"),
        ({"poll": lambda: None}, "Poll returned None, expected a set of request ids"),
        ({"poll": lambda: {"1"}}, "Poll returned '1', expected a request id"),
        (
            {"host_get": lambda room: [request(i) for i in range(3)]},
            "returned 3 requests when asked for",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_complaints_name_the_broken_rule(host, text):
    assert text in complaints(**host)


@pytest.mark.parametrize("name", ["Get", "SendResponse", "Poll"])
def test_a_callback_that_takes_seconds_is_reported(name):
    now = [0.0]

    def wait(which, answer):
        now[0] += 3.0 * (which == name)
        return answer

    said = complaints(
        lambda room: wait("Get", [request(1)]),
        lambda *response: wait("SendResponse", None),
        lambda: wait("Poll", set()),
        clock=lambda: now[0],
    )
    assert said == f"{name} took longer than 1 s: it blocks the loop"


def test_a_request_that_is_returned_twice():
    one = request(1)
    for again, text in ((one, "Get returned request 1 twice"), (request(1), "while another")):
        checker = ContractChecker(lambda room, both=(one, again): both, fail)
        list(checker.get_inference_requests(-1))
        with pytest.raises(ContractViolation, match=text):
            checker.check()


def test_a_request_that_is_changed_after_get_has_returned_it():
    def changed(**values):
        one = request(1)
        checker = ContractChecker(lambda room: [one], lambda *response: None)
        list(checker.get_inference_requests(1))
        for name, value in values.items():
            setattr(one, name, value)
        checker.send_response(1, [*partial([6], 0), *ENDING], True, "")
        try:
            checker.check()
        except ContractViolation as violation:
            return str(violation)

    assert changed() is None
    was = "request 1 was changed after Get had returned it: "
    assert changed(priority=0.9) == was + "priority"
    assert changed(max_new_tokens=99) == was + "request_output_len"
    assert changed(random_seed=5) == was + "random_seed"


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4).to(torch.float8_e4m3fn),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(1).expand(2**40),
        torch.zeros(4, device="meta"),
        torch.zeros(4).to_sparse(),
        torch.full((2, 3), torch.nan),
        np.broadcast_to(np.float32(0), 2**40),
        np.array([2**70, "x"], dtype=object),
    ],
    ids=str,
)
def test_tensors_that_no_request_may_hold_are_kept_in_mind(tensor):
    one = request(1)
    one.embedding_bias = tensor
    checker = ContractChecker(lambda room: [one], lambda *response: None)
    list(checker.get_inference_requests(1))
    checker.send_response(1, [], True, "InvalidRequestError: no bias")
    checker.check()


def test_one_number_of_a_tensor_changed_after_get():
    one = request(1)
    one.embedding_bias = torch.zeros(1).to(torch.float8_e4m3fn).expand(100)
    checker = ContractChecker(lambda room: [one], lambda *response: None)
    list(checker.get_inference_requests(1))
    one.embedding_bias[0] = 1
    checker.send_response(1, [], True, "InvalidRequestError: no bias")
    with pytest.raises(ContractViolation, match="embedding_bias"):
        checker.check()


# A manager under the checker ---------------------------------------------------------------------


def count_up(history):
    return history[-1] + 1


def serve(host, checker=None, next_token=count_up, **options):
    keywords = host.keywords()
    if checker is not None:
        keywords["get_inference_requests_cb"] = checker.get_inference_requests
        keywords["send_response_cb"] = checker.send_response
    return GptManager(
        ScriptedModel(next_token),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=OptionalParams(**options),
        **keywords,
    )


def test_a_manager_keeps_the_contract_of_the_checker():
    requests = [request(i, streaming=bool(i % 2)) for i in range(6)]
    bad = InferenceRequest.from_tokens(9, [1], 0)
    host = RecordingCallbacks([*requests, request(1), bad])
    checker = ContractChecker(
        host.get_inference_requests, host.send_response, tolerates_duplicates=True
    )

    with serve(host, checker) as manager:
        assert manager.wait_idle(30)
        checker.check(manager)

    assert [response.error.partition(":")[0] for response in host.of(1) if response.error] == [
        "DuplicateRequestIdError"
    ]
    assert host.of(9)[0].error.startswith("InvalidRequestError")
    assert host.output(3) == [3, 4, 5, 6, 7]
    assert host.output(4) == [1, 2, 3, 4, 5, 6, 7]


def test_the_scripted_model_counts_and_decides():
    model = ScriptedModel(lambda history: sum(history) % 7, vocab_size=7)
    host = RecordingCallbacks([InferenceRequest.from_tokens(1, [3, 2], 3)])
    with GptManager(model, ModelType.INFLIGHT_FUSED_BATCHING, **host.keywords()) as manager:
        assert manager.wait_idle(30)

    assert host.output(1) == [3, 2, 5, 3, 6]
    assert (model.num_forwards, model.num_tokens) == (3, 2 + 1 + 1)
    assert len(host.statistics) == 3


@pytest.mark.parametrize("option", ["vocab_size", "max_position_embeddings"])
def test_a_scripted_model_has_tokens_and_positions(option):
    assert ScriptedModel(count_up, **{option: 1}).spec
    with pytest.raises(ConfigError, match=f"ScriptedModel.{option} = 0 must be"):
        ScriptedModel(count_up, **{option: 0})


@pytest.mark.parametrize("token", [-1, 1000])
def test_a_script_that_leaves_the_vocabulary_is_reported(token):
    host = RecordingCallbacks([request(1)])
    manager = serve(
        host, next_token=lambda history: token, black_box_iterations=0, max_step_failures=1
    )
    assert f"next_token([1, 2]) = {token}" in host.final(1).error
    manager.wait(30)
    assert "must be from 0 to 999" in str(manager.exception)
    with pytest.raises(ManagerDeadError):
        manager.notify()


# The recording callbacks -------------------------------------------------------------------------


def test_get_gives_no_more_than_there_is_room_for():
    host = RecordingCallbacks([request(i) for i in range(5)])
    assert [r.request_id for r in host.get_inference_requests(2)] == [0, 1]
    assert [r.request_id for r in host.get_inference_requests(-1)] == [2, 3, 4]
    assert host.get_inference_requests(3) == []
    host.submit(request(5))
    assert host.get_inference_requests(0) == []
    assert host.rooms == [2, -1, 3, 0]


def test_final_waits_for_another_thread():
    host = RecordingCallbacks()
    timer = threading.Timer(0.05, host.send_response, (1, whole([1, 2, 3]), True, ""))
    timer.start()
    final = host.final(1)
    timer.join()

    assert final.is_final and final.tensors["output_ids"].tolist() == [[[1, 2, 3]]]
    with pytest.raises(TimeoutError, match="no final response to request 2"):
        host.final(2, timeout=0.01)


def test_stops_are_repeated_until_the_final():
    host = RecordingCallbacks()
    host.stop(1, 2)
    host.send_response(1, partial([5], 0), False, "")
    assert host.poll_stop_signal() == {1, 2}
    host.send_response(1, [*partial([6], 1), *ENDING], True, "")
    assert host.poll_stop_signal() == {2}
    assert host.output(1) == [5, 6]


def test_submit_wakes_a_manager_and_stop_stops():
    host = RecordingCallbacks()
    with serve(host, next_token=lambda history: 7, idle_poll_s=None) as manager:
        host.manager = manager
        assert manager.wait_idle(30)
        host.stop(1)  # first, so that the request cannot end before
        host.submit(InferenceRequest.from_tokens(1, [1], 2000, is_streaming=True))
        final = host.final(1)
    assert final.tensors["finish_reasons"].tolist() == [[5]]  # CANCELLED
    assert set(host.output(1)) <= {7}


# The scripted executor ---------------------------------------------------------------------------


def row(position, num_tokens, slot=0, *, samples=True):
    return Row(1, 0, slot, position, num_tokens, samples)


def start(slot=0, tokens=(1, 2, 3, 4, 5)):
    sampling = SamplingParams(
        greedy=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        min_length=0,
        end_ids=(),
    )
    return SequenceStart(slot, tuple(tokens), len(tokens), sampling)


def schedule(context=(), generation=(), starts=(), appends=()):
    return Schedule(0, tuple(context), tuple(generation), tuple(starts), tuple(appends))


def run(executor, *schedules):
    tokens = []
    for step in map(executor.forward, schedules):
        executor.sample(step)
        tokens.append(executor.result(step).tokens.tolist())
    return tokens


def test_the_executor_runs_chunks_and_generation():
    executor = ScriptedExecutor(sum, tokens_per_block=4)
    assert run(
        executor,
        schedule([row(0, 4, samples=False)], starts=[start()], appends=[BlockAppend(0, 0, (7,))]),
        schedule([row(4, 1)], appends=[BlockAppend(0, 1, (3,))]),
        schedule(generation=[row(5, 1)]),
    ) == [[], [[15]], [[30]]]
    assert len(executor.schedules) == 3


FIRST = schedule([row(0, 5)], starts=[start()], appends=[BlockAppend(0, 0, (7, 3))])


@pytest.mark.parametrize(
    ("impossible", "text"),
    [
        (schedule(generation=[row(6, 1)]), "cannot continue"),  # leaves a position out
        (schedule(generation=[row(4, 1)]), "cannot continue"),  # computes one again
        (schedule(generation=[row(5, 2)]), "cannot continue"),  # needs an unknown token
        (schedule(generation=[row(5, 0)]), "cannot continue"),  # computes nothing
        (schedule(generation=[row(5, 1, slot=1)]), "no sequence has started in slot 1, beam 0"),
        (schedule(appends=[BlockAppend(0, 1, (4,))]), "slot 0 has 2 blocks"),  # replaces one
        (schedule(appends=[BlockAppend(0, 3, (4,))]), "slot 0 has 2 blocks"),  # leaves one out
        (schedule(appends=[BlockAppend(2, 0, (4,))]), "no sequence has started in slot 2, beam 0"),
        (Schedule(0, drafts=(Drafts(0, 5, (9,)),)), "slot 0 has 6 tokens"),
        (Schedule(0, beam_forks=(BeamFork(0, 5, (0,), (9,)),)), "does not continue its parents"),
    ],
)
def test_the_executor_refuses_what_cannot_follow(impossible, text):
    executor = ScriptedExecutor(sum, tokens_per_block=4)
    run(executor, FIRST)
    with pytest.raises(ValueError, match=text):
        executor.forward(impossible)


@pytest.mark.parametrize(("shared", "num_copied"), [(7, 0), (8, 4), (8, 3)])
def test_the_executor_refuses_a_block_that_holds_other_tokens(shared, num_copied):
    """Also a copied block, and one that was copied in part."""

    def step(tokens):
        begin, blocks = start(1, tokens), BlockAppend(1, 0, (shared, 9))
        copies = ((7, 8, num_copied),) if num_copied else ()
        return Schedule(1, (row(4, 1, slot=1),), (), (begin,), (blocks,), copies)

    executor = ScriptedExecutor(sum, tokens_per_block=4)
    run(executor, FIRST)
    with pytest.raises(ValueError, match=f"block {shared} does not hold the tokens from 0 on"):
        executor.forward(step((1, 2, 9, 4, 5)))
    if num_copied == 3:
        with pytest.raises(ValueError, match="block 8 does not hold"):
            executor.forward(step((1, 2, 3, 4, 5)))
    else:
        assert run(executor, step((1, 2, 3, 4, 5))) == [[[15]]]


def test_the_executor_accepts_drafts_before_the_first_wrong_one():
    executor = ScriptedExecutor(count_up, tokens_per_block=4)
    assert run(executor, FIRST) == [[[6]]]
    appends, rows = (BlockAppend(0, 2, (9,)),), (Row(1, 0, 0, 5, 4, True, num_drafts=3),)
    guess = (Drafts(0, 6, (7, 9, 9)),)  # the third is what follows the second
    step = executor.forward(Schedule(1, (), rows, (), appends, drafts=guess))
    executor.sample(step)
    found = executor.result(step)
    assert found.tokens.tolist() == [[7, 8]] and found.num_tokens.tolist() == [2]
    # and goes on after them, without the block of the wrong ones
    assert run(executor, schedule(generation=[row(7, 1)])) == [[[9]]]


def test_the_executor_has_candidates_of_each_beam():
    executor = ScriptedExecutor(count_up, tokens_per_block=8)
    begin = start()._replace(beam_width=2, num_candidates=4)
    first = executor.forward(
        schedule([row(0, 5)._replace(beam_width=2)], (), [begin], [BlockAppend(0, 0, (7,))])
    )
    executor.sample(first)
    assert executor.result(first).tokens.tolist() == [[6]]
    (beams,) = executor.result(first).beams
    assert beams.tokens == ((6, 7, 8, 9),) and sorted(beams.log_probs[0])[::-1] == [
        *beams.log_probs[0]
    ]
    step = executor.forward(
        Schedule(
            1,
            generation_rows=(row(5, 1)._replace(beam_width=2),),
            block_appends=(BlockAppend(0, 0, (8,), 1),),
            block_copies=((7, 8, 5),),
            beam_forks=(BeamFork(0, 5, (0, 0), (6, 8)),),
        )
    )
    executor.sample(step)
    (beams,) = executor.result(step).beams
    assert beams.tokens == ((7, 8, 9, 10), (9, 10, 11, 12))
    assert executor.result(step).tokens.tolist() == [[7]]


def test_the_executor_refuses_a_position_without_a_block():
    executor = ScriptedExecutor(sum, tokens_per_block=5)
    run(
        executor,
        schedule([row(0, 5)], starts=[start()], appends=[BlockAppend(0, 0, (7,))]),
    )
    with pytest.raises(ValueError, match="cannot continue"):
        executor.forward(schedule(generation=[row(5, 1)]))


def test_a_slot_that_is_taken_again_begins_anew():
    executor = ScriptedExecutor(sum, tokens_per_block=4)
    run(executor, FIRST)
    again = schedule([row(0, 2)], starts=[start(tokens=(8, 9))], appends=[BlockAppend(0, 0, (1,))])
    assert run(executor, again) == [[[17]]]

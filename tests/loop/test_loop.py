"""The token loop alone: order, delivery, ends, run-ahead, forced pauses; no thread, no model."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from loop_driver import (
    AHEAD,
    ForcedPauses,
    LoopDriver,
    expected_beams,
    expected_output,
    next_token,
    no_evict,
)

from gptmanager.config import FinishReason, PromptLookup
from gptmanager.decoding.search.beam_search import BeamParams
from gptmanager.errors import SchedulerError
from gptmanager.loop.responses import REQUEST_METRICS, final_tensors
from gptmanager.loop.scheduler_call import check_output
from gptmanager.request.inference_request import InferenceRequest
from gptmanager.request.llm_request import LlmRequest, LlmRequestState
from gptmanager.scheduler import MaxUtilizationScheduler, RequestScheduler, SchedulerOutput
from gptmanager.statistics import PhaseTimes
from gptmanager.step import NO_TOKEN, NOT_FINITE, StepResult

each_mode = pytest.mark.parametrize("mode", AHEAD, ids=str)


def request(request_id, prompt, max_new_tokens, **by_name):
    return InferenceRequest.from_tokens(request_id, prompt, max_new_tokens, **by_name)


def reason(response):
    return FinishReason(int(response.tensors["finish_reasons"]))


@each_mode
def test_requests_of_mixed_lengths_generate_what_each_generates_alone(mode):
    driver = LoopDriver(**mode)
    prompts = {i: [i + 1, 7, 3 * i][: 1 + i % 3] for i in range(10)}
    driver.submit(*(request(i, p, 1 + 2 * i, is_streaming=i % 2 == 0) for i, p in prompts.items()))
    driver.run()
    for i, prompt in prompts.items():
        expected = expected_output(prompt, 1 + 2 * i)
        assert driver.output(i) == (expected if i % 2 == 0 else prompt + expected)
        assert reason(driver.final(i)) is FinishReason.LENGTH


def test_one_forward_an_iteration_and_contexts_precede_generation():
    driver = LoopDriver()
    driver.submit(request(1, [1, 2, 3], 4))
    driver.loop.iterate()
    driver.submit(request(2, [4, 5], 3))
    driver.run()
    second = driver.executor.schedules[1]
    assert [row.request_id for row in second.context_rows] == [2]
    assert [row.request_id for row in second.generation_rows] == [1]
    assert [row.request_id for row in second.sampling_rows] == [2, 1]
    assert len(driver.executor.schedules) == len(driver.host.counts) == 4


@each_mode
def test_chunked_contexts_yield_one_token_at_their_last_chunk(mode):
    prompt = list(range(1, 24))
    driver = LoopDriver(chunked=True, max_num_tokens=8, **mode)
    driver.submit(request(1, prompt, 3))
    driver.run()
    chunks = [s.context_rows[0] for s in driver.executor.schedules if s.context_rows]
    assert [(row.position, row.num_tokens, row.samples) for row in chunks] == [
        (0, 8, False),
        (8, 8, False),
        (16, 7, True),
    ]
    assert driver.output(1) == prompt + expected_output(prompt, 3)


@each_mode
def test_end_id_ends_the_request_and_is_not_output(mode):
    tokens = expected_output([5, 6], 8)
    driver = LoopDriver(**mode)
    driver.submit(
        request(1, [5, 6], 8, end_id=tokens[3]),
        request(2, [5, 6], 8, end_id=tokens[3], include_stop_in_output=True),
    )
    driver.run()
    first = tokens.index(tokens[3])
    assert driver.output(1) == [5, 6] + tokens[:first]
    assert driver.output(2) == [5, 6] + tokens[: first + 1]
    assert reason(driver.final(1)) is FinishReason.END_ID
    # padded with end_id to prompt + max_new_tokens
    output_ids = driver.final(1).tensors["output_ids"]
    assert output_ids.shape == (1, 1, 10)
    assert set(output_ids[0, 0, 2 + first :].tolist()) == {tokens[3]}


@each_mode
@pytest.mark.parametrize("include", [False, True])
def test_stop_words_are_held_back_while_they_may_still_match(mode, include):
    tokens = expected_output([9], 10)
    word = tokens[4:7]
    near_miss = [tokens[2], (tokens[3] + 1) % 100]
    driver = LoopDriver(**mode)
    driver.submit(
        request(
            *(1, [9], 10),
            stop_words_list=[near_miss, word],
            is_streaming=True,
            include_stop_in_output=include,
        )
    )
    driver.run()
    assert driver.output(1) == (tokens[:7] if include else tokens[:4])
    assert reason(driver.final(1)) is FinishReason.STOP_WORDS
    # the near miss held a token back for one step, then two came at once; what is kept is not held
    sizes = [int(r.tensors["sequence_length"]) for r in driver.host.callbacks.of(1)]
    assert (2 in sizes) is not include


@each_mode
def test_a_stop_takes_effect_before_the_next_launch_and_gives_the_tokens_so_far(mode):
    driver = LoopDriver(**mode)
    driver.submit(request(1, [1], 50), request(2, [2], 6))
    for _ in range(4):
        driver.loop.iterate()
    launched = len(driver.executor.schedules)
    driver.host.callbacks.stop(1, 77)  # 77 is not known: ignored
    driver.loop.iterate()
    driver.run()
    assert reason(driver.final(1)) is FinishReason.CANCELLED
    output = driver.output(1)[1:]
    assert output == expected_output([1], len(output))
    rows = [row for s in driver.executor.schedules[launched + 1 :] for row in s.generation_rows]
    assert all(row.request_id == 2 for row in rows)
    assert driver.output(2) == [2] + expected_output([2], 6)


def test_a_stopped_request_that_waits_ends_without_tokens():
    driver = LoopDriver(max_batch_size=1)
    driver.submit(request(1, [1], 9), request(2, [2], 9, is_streaming=True))
    driver.loop.iterate()
    driver.host.callbacks.stop(2)
    driver.run()
    final = driver.final(2)
    assert reason(final) is FinishReason.CANCELLED
    assert final.tensors["output_ids"].shape == (1, 1, 0)
    assert driver.output(1) == [1] + expected_output([1], 9)


@each_mode
def test_forced_pauses_are_invisible_and_no_token_is_sent_twice(mode):
    driver = LoopDriver(**mode, scheduler=ForcedPauses)
    driver.submit(request(1, [1, 2], 20, is_streaming=True), request(2, [3], 15))
    for iteration in range(60):
        if iteration % 4 == 3:
            driver.scheduler.victims.update({1, 2} if iteration % 8 == 3 else {1})
        driver.loop.iterate()
    driver.run()
    assert driver.output(1) == expected_output([1, 2], 20)  # the checker has seen the offsets
    assert driver.output(2) == [3] + expected_output([3], 15)
    assert sum(len(s.paused) for s in driver.executor.schedules) > 2
    metrics = driver.final(1).tensors["request_metrics"]
    assert metrics[REQUEST_METRICS.index("pauses")] > 2


def beams_of(response):
    ids, lengths = response.tensors["output_ids"], response.tensors["sequence_length"]
    return [ids[0, i, :length].tolist() for i, length in enumerate(lengths[0].tolist())]


@each_mode
@pytest.mark.parametrize("policy", [no_evict, MaxUtilizationScheduler])
@pytest.mark.parametrize("chunked", [False, True])
def test_beams_of_several_widths_run_in_one_batch(mode, policy, chunked):
    driver = LoopDriver(num_blocks=40, policy=policy, chunked=chunked, max_num_tokens=24, **mode)
    requests = {}
    for i in range(8):
        prompt, width = [i + 1, 7, 3 * i, 5, 2][: 1 + i % 5], 1 + i % 4
        requests[i] = prompt, 3 + i, width
        driver.submit(request(i, prompt, 3 + i, beam_width=width, len_penalty=i / 4))
    driver.run()
    for i, (prompt, max_new_tokens, width) in requests.items():
        found = beams_of(driver.final(i))
        if width == 1:
            assert found == [prompt + expected_output(prompt, max_new_tokens)]
        else:
            expected = expected_beams(prompt, max_new_tokens, BeamParams(width, i / 4))
            assert found == [prompt + text for text in expected]


@each_mode
def test_streamed_beams_are_never_taken_back(mode):
    """What was sent begins every beam of the final response."""
    driver = LoopDriver(num_blocks=60, scheduler=ForcedPauses, **mode)
    driver.submit(request(1, [1, 2], 16, beam_width=3, is_streaming=True))
    for iteration in range(30):
        if iteration == 9:
            driver.scheduler.victims.add(1)
        driver.loop.iterate()
    driver.run()
    *partial, final = driver.host.callbacks.of(1)
    sent = []
    for response in partial:
        assert len({tuple(beam) for beam in beams_of(response)}) == 1
        assert response.tensors["output_offset"].tolist() == [len(sent)]
        sent += beams_of(response)[0]
    assert sent and final.tensors["output_offset"].tolist() == [len(sent)]
    found = [sent + beam for beam in beams_of(final)]
    assert found == expected_beams([1, 2], 16, BeamParams(3))
    assert final.tensors["request_metrics"][REQUEST_METRICS.index("pauses")] == 1


def test_a_stopped_search_gives_the_beams_so_far():
    driver = LoopDriver(num_blocks=60)
    driver.submit(request(1, [1, 2], 16, beam_width=2), request(2, [3], 4, beam_width=2))
    driver.loop.iterate()
    driver.loop.iterate()
    driver.host.callbacks.stop(1)
    driver.run()
    final = driver.final(1)
    assert final.tensors["finish_reasons"].tolist() == [[FinishReason.CANCELLED] * 2]
    assert [len(beam) for beam in beams_of(final)] == [5, 5]
    assert beams_of(driver.final(2))[0][:1] == [3]


def repeating_token(history):
    """A text that copies itself now and then."""
    return history[-6] if len(history) > 8 and len(history) % 11 else next_token(history)


@each_mode
@pytest.mark.parametrize("policy", [no_evict, MaxUtilizationScheduler])
@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.every(5)
def test_guesses_do_not_show_in_the_tokens(mode, policy, reuse):
    """Fewer steps, the same tokens; under pauses, ends, and beside requests without guesses."""
    outputs = {}
    for lookup in (None, PromptLookup(max_draft_tokens=5, max_ngram=2, min_ngram=1)):
        driver = LoopDriver(
            num_blocks=16,
            policy=policy,
            script=repeating_token,
            reuse=reuse,
            chunked=True,
            scheduler=ForcedPauses,
            lookup=lookup,
            **mode,
        )
        for i in range(6):
            options = {
                "end_id": 17 * i % 100,
                "stop_words_list": [[3 * i, 5]],
                "is_streaming": i % 2,
            }
            driver.submit(request(i, [i, 1, 2, i, 1], 8 + 5 * i, **options))
        for iteration in range(12):
            if iteration in (4, 9):
                driver.scheduler.victims.update({1, 4})
            driver.loop.iterate()
        driver.run()
        outputs[lookup] = {i: driver.output(i) for i in range(6)}
    assert driver.loop.confirmation.drafts.accepted > 10
    first, second = outputs.values()
    assert first == second


def test_a_hosts_guesses_are_verified_with_the_context():
    driver = LoopDriver(max_num_tokens=64)
    expected = expected_output([1, 2, 3], 9)
    wrong = [*expected[:3], (expected[3] + 1) % 100, expected[4]]
    driver.submit(
        request(1, [1, 2, 3], 9, draft_input_ids=expected[:4]),
        request(2, [1, 2, 3], 9, draft_input_ids=wrong),
        request(3, [1, 2, 3], 3, draft_input_ids=expected[:8]),
        request(4, list(range(20)), 4, draft_input_ids=[7, 7, 7]),
    )
    driver.run()
    for i in (1, 2, 3):
        assert driver.output(i) == [1, 2, 3] + expected[: 3 if i == 3 else 9]
    assert driver.output(4) == list(range(20)) + expected_output(range(20), 4)
    rows = [row for s in driver.executor.schedules for row in s.context_rows if row.num_drafts]
    assert {row.request_id: row.num_drafts for row in rows}.keys() >= {1, 2, 3}
    assert driver.loop.confirmation.drafts.accepted >= 4 + 3


def test_a_duplicate_of_a_live_id_is_rejected_and_the_id_is_free_after_the_final():
    driver = LoopDriver()
    driver.submit(request(5, [1], 3), request(5, [2], 3))
    driver.run()
    first, second = driver.host.callbacks.of(5)
    assert first.error.startswith("DuplicateRequestIdError: ") and first.is_final
    assert not second.error
    driver.submit(request(5, [2], 3))
    driver.run()
    assert driver.host.callbacks.of(5)[2].tensors["output_ids"][0, 0, 0] == 2


def test_a_failed_send_ends_only_its_request_with_one_final_error():
    driver = LoopDriver()
    driver.submit(request(1, [1], 9, is_streaming=True), request(2, [2], 9, is_streaming=True))
    driver.host.fail_to_send = lambda request_id, is_final: request_id == 1
    driver.run()
    assert driver.final(1).error == "RuntimeError: the client has gone"
    assert len(driver.host.callbacks.of(1)) == 2
    assert driver.output(2) == expected_output([2], 9)


def test_higher_priority_runs_first_and_equals_keep_their_order():
    driver = LoopDriver(max_batch_size=1)
    driver.submit(request(1, [1], 2), request(2, [2], 2), request(3, [3], 2, priority=0.9))
    driver.run()
    order = [s.context_rows[0].request_id for s in driver.executor.schedules if s.context_rows]
    assert order == [3, 1, 2]


def test_a_context_keeps_the_drafts_of_its_host_where_drafts_are_looked_up():
    driver = LoopDriver(lookup=PromptLookup())
    guess = expected_output([5, 6, 7], 4)[1:]
    driver.submit(request(1, [5, 6, 7], 8, draft_input_ids=guess))
    driver.run()
    assert driver.executor.schedules[0].context_rows[0].num_drafts == 3
    assert driver.output(1) == [5, 6, 7, *expected_output([5, 6, 7], 8)]


def test_no_limit_of_active_requests_is_reported_as_minus_one():
    for most, reported in ((8, 8), (None, -1)):
        driver = LoopDriver(max_active=most)
        driver.submit(request(1, [1], 2))
        driver.run()
        assert {counts.max_active for counts in driver.host.counts} == {reported}


def test_a_pause_changes_neither_the_time_in_the_queue_nor_the_cached_tokens():
    driver = LoopDriver(reuse=True, scheduler=ForcedPauses)
    driver.submit(request(1, [1, 2, 3, 4, 5, 6], 8))
    for _ in range(3):
        driver.loop.iterate()
    driver.scheduler.victims.add(1)
    driver.run()
    metrics = dict(zip(REQUEST_METRICS, driver.final(1).tensors["request_metrics"], strict=True))
    assert metrics["pauses"] == 1  # after which its own blocks are found
    assert metrics["queue_s"] == metrics["cached_tokens"] == 0


def test_a_pause_before_the_first_token_keeps_the_drafts_of_the_host():
    """They continue the prompt, which is computed again."""
    driver = LoopDriver(max_num_tokens=8, chunked=True, scheduler=ForcedPauses)
    prompt, guess = list(range(12)), expected_output(range(12), 3)
    driver.submit(request(1, prompt, 8, draft_input_ids=guess))
    driver.loop.iterate()
    driver.scheduler.victims.add(1)
    driver.run()
    rows = [row for s in driver.executor.schedules for row in s.context_rows]
    assert [row.num_drafts for row in rows] == [0, 0, 3]  # the first chunk runs twice
    assert driver.output(1) == prompt + expected_output(prompt, 8)


def test_a_deadline_is_missed_after_its_time_and_not_at_it():
    driver = LoopDriver(max_batch_size=1)
    driver.submit(
        request(1, [1], 40, deadline_s=3.0),  # the fake clock ticks once an iteration
        request(2, [2], 3, queue_timeout_s=4.0),
    )
    driver.submit(request(3, [3], 3, queue_timeout_s=3.0))
    driver.run()
    assert [reason(driver.final(i)) for i in (1, 2, 3)] == [
        *(FinishReason.TIMED_OUT, FinishReason.LENGTH, FinishReason.TIMED_OUT)
    ]
    assert len(driver.output(1)) == 1 + 4


@pytest.mark.parametrize(("fault", "num_cached"), [(NOT_FINITE, 0), (NO_TOKEN, 3)])
def test_only_blocks_of_a_request_with_invalid_logits_are_not_reused(fault, num_cached):
    prompt = [*range(1, 10)]
    ended = len(prompt) + 1
    driver = LoopDriver(reuse=True, script=lambda history: fault if len(history) == ended else 7)
    driver.submit(request(1, prompt, 5))
    driver.run()
    assert driver.final(1).error.startswith("LogitsError")
    assert driver.kv_cache.reuse_counts.cached_blocks == num_cached


def test_deadline_and_queue_timeout_end_a_request_with_what_it_has():
    driver = LoopDriver(max_batch_size=1)
    driver.submit(
        request(1, [1], 40, deadline_s=5.5),  # the fake clock ticks once an iteration
        request(2, [2], 3, queue_timeout_s=2.5),
        request(3, [3], 3, queue_timeout_s=200.0),
    )
    driver.run()
    assert reason(driver.final(1)) is FinishReason.TIMED_OUT
    output = driver.output(1)[1:]
    assert output == expected_output([1], len(output)) and len(output) == 6
    assert reason(driver.final(2)) is FinishReason.TIMED_OUT
    assert driver.output(2) == [2]
    assert reason(driver.final(3)) is FinishReason.LENGTH


def test_get_is_asked_for_the_room_that_is_left_and_not_with_zero():
    driver = LoopDriver(max_active=2)
    driver.submit(*(request(i, [i + 1], 3) for i in range(5)))
    driver.run()
    rooms = driver.host.callbacks.rooms
    assert rooms[0] == 2 and 0 not in rooms and max(rooms) <= 2
    unbounded = LoopDriver(max_active=None)
    unbounded.submit(*(request(i, [i + 1], 3) for i in range(5)))
    unbounded.run()
    assert set(unbounded.host.callbacks.rooms) == {-1}


def test_counts_are_those_of_the_schedule():
    driver = LoopDriver(max_batch_size=2, tokens_per_block=4, num_blocks=20)
    driver.submit(request(1, [1, 2, 3], 3), request(2, [4, 5], 2), request(3, [6], 1))
    driver.run()
    first, second, third = driver.host.counts
    assert (first.active, first.context, first.generation, first.context_tokens) == (3, 2, 0, 5)
    assert (second.active, second.context, second.generation) == (3, 0, 2)
    assert (third.active, third.context, third.generation) == (2, 1, 1)
    assert third.free_blocks == third.total_blocks == 20
    assert [c.iteration for c in driver.host.counts] == [0, 1, 2]


class Misbehaving(RequestScheduler):
    """Returns what `answer` makes of a good scheduler's output."""

    def __init__(self, scheduler, answer):
        self.scheduler = scheduler
        self.answer = answer

    def schedule_request(self, active_requests, inflight_request_ids):
        return self.answer(self.scheduler.schedule_request(active_requests, inflight_request_ids))


def foreign(output):
    return SchedulerOutput([*output.context_requests, object.__new__(Foreign)], [], [])


class Foreign:
    request_id = 99


def twice(output):
    first, second = output.context_requests
    return SchedulerOutput([first, second, second], [], [])


def wrong_phase(output):
    return SchedulerOutput(output.generation_requests, output.context_requests, [])


def raises(output):
    raise ZeroDivisionError("of mine")


def empty_chunk(output):
    for chosen in output.context_requests:
        chosen.context_chunk_size = 0
    return output


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (foreign, "which is not active"),
        (twice, "returned request 2 twice"),
        (wrong_phase, "as a generation request"),
        (raises, "raised ZeroDivisionError: of mine"),
        (empty_chunk, "as a context request"),
        (lambda output: None, "returned None, expected lists of requests"),
        (lambda output: output.context_requests[0], r"returned LlmRequest\(1,.*, expected lists"),
        (lambda output: ([1], [], []), r"returned \(\[1\], \[\], \[\]\), expected lists"),
    ],
)
def test_a_scheduler_that_breaks_its_contract_is_named(answer, text):
    driver = LoopDriver(scheduler=lambda scheduler: Misbehaving(scheduler, answer))
    driver.submit(request(1, [1], 3), request(2, [2], 3))
    with pytest.raises(SchedulerError, match="Misbehaving.*" + text):
        driver.run()
    driver.loop.abort(RuntimeError("dead"))
    driver.check_empty()


@pytest.mark.parametrize(
    ("num_tokens", "changes"),
    [
        (10, {}),
        (12, {"num_draft_tokens": 2}),
        (6, {"estimated_reusable_tokens": 4}),
        (7, {"estimated_reusable_tokens": 4, "context_current_position": 3}),
        (3, {"context_chunk_size": 3, "num_draft_tokens": 2}),
        (5, {"state": LlmRequestState.GENERATION_IN_PROGRESS, "num_draft_tokens": 4}),
    ],
)
def test_a_step_may_have_exactly_its_limit_of_tokens(num_tokens, changes):
    chosen = LlmRequest(1, 10, 5, **changes)
    generates = chosen.state is LlmRequestState.GENERATION_IN_PROGRESS
    output = SchedulerOutput([], [chosen], []) if generates else SchedulerOutput([chosen], [], [])

    def check(limit):
        check_output(output, {1: chosen}, (), max_batch_size=1, max_num_tokens=limit)

    check(num_tokens)
    with pytest.raises(SchedulerError, match=f"returned {num_tokens} tokens"):
        check(num_tokens - 1)


def test_a_scheduler_that_overcommits_memory_is_named():
    class TakesAll(RequestScheduler):
        def schedule_request(self, active_requests, inflight_request_ids):
            context = [r for r in active_requests if r.state is LlmRequestState.CONTEXT_INIT]
            return SchedulerOutput(context, [], [])

    driver = LoopDriver(scheduler=lambda _: TakesAll(), num_blocks=3, tokens_per_block=4)
    driver.submit(request(1, [1] * 8, 2), request(2, [1] * 8, 2))
    with pytest.raises(SchedulerError, match="TakesAll scheduled request 2"):
        driver.run()
    driver.loop.abort(RuntimeError("dead"))
    driver.check_empty()


def test_rows_of_several_tokens_are_applied_in_order_and_cut_at_the_end():
    """The seam that drafts need: a result row may carry n tokens."""
    driver = LoopDriver()
    driver.submit(request(1, [1], 3))
    loop = driver.loop
    loop.take_in(loop.fetch())
    step = loop.forward(loop.allocate(loop.schedule(), 0.0, None))
    tokens = expected_output([1], 5)
    result = StepResult(np.array([tokens], dtype=np.int32), 0.0, np.array([5], dtype=np.int32))
    loop.respond(*loop.apply(step, result))
    assert driver.output(1) == [1] + tokens[:3]
    driver.check_empty()


@pytest.mark.parametrize(("num_blocks", "max_batch_size"), [(40, 1), (15, 4)])
def test_a_newcomer_of_higher_rank_does_not_strand_a_half_run_context(num_blocks, max_batch_size):
    """Neither for want of a slot nor of the blocks that the other holds."""
    driver = LoopDriver(
        num_blocks=num_blocks,
        max_batch_size=max_batch_size,
        max_num_tokens=8,
        max_active=None,
        chunked=True,
    )
    driver.submit(request(1, [1] * 30, 20))
    driver.loop.iterate()
    driver.submit(request(2, [2] * 30, 20, priority=0.9))
    driver.run()
    assert driver.output(1) == [1] * 30 + expected_output([1] * 30, 20)
    assert driver.output(2) == [2] * 30 + expected_output([2] * 30, 20)


def test_a_scheduler_may_do_with_its_list_what_it_likes():
    class Clears(RequestScheduler):
        def __init__(self, scheduler):
            self.scheduler = scheduler

        def schedule_request(self, active_requests, inflight_request_ids):
            output = self.scheduler.schedule_request(active_requests[:], inflight_request_ids)
            active_requests.clear()
            return tuple(output)  # a plain tuple will do

    driver = LoopDriver(scheduler=Clears)
    driver.submit(request(1, [1], 5))
    driver.run()
    assert driver.output(1) == [1] + expected_output([1], 5)


@pytest.mark.parametrize("answer", [None, (), ([], []), 7, ([1], [], []), ([None], [], [])])
def test_an_invalid_schedule_is_a_scheduler_error(answer):
    driver = LoopDriver(scheduler=lambda s: Misbehaving(s, lambda output: answer))
    driver.submit(request(1, [1], 3))
    with pytest.raises(SchedulerError, match="Misbehaving"):
        driver.run()


def test_a_final_response_that_cannot_be_built_becomes_an_error_of_its_request(monkeypatch):
    def fails(request, *args):
        if request.request_id == 1:
            raise MemoryError("no room for the response")
        return final_tensors(request, *args)

    driver = LoopDriver()
    driver.submit(request(1, [1], 1), request(2, [1], 9))
    monkeypatch.setattr(driver.loop.table, "_final", fails)
    driver.run()
    assert driver.final(1).error == (
        "StepError: the final response cannot be created: MemoryError: no room for the response"
    )
    assert driver.output(2) == [1] + expected_output([1], 9)
    driver.check_empty()


def test_requests_fetched_but_not_admitted_are_answered_by_the_abort():
    class Unhashable(dict):
        def values(self):
            raise RuntimeError("of a broken loop")

    driver = LoopDriver()
    driver.loop.table._timed = Unhashable()
    driver.submit(request(1, [1], 1), request(2, [1], 9))
    with pytest.raises(RuntimeError, match="of a broken loop"):
        driver.loop.iterate()
    driver.loop.abort(RuntimeError("dead"))
    driver.check_empty()


def test_next_token_depends_on_order():
    assert next_token([1, 2]) != next_token([2, 1])


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ({}, {}),
        ({"run_ahead": 1}, {}),
        ({"run_ahead": 1}, {"beam_width": 2}),
        ({"run_ahead": 1}, {"draft_input_ids": [3, 4]}),
        (
            {
                "overlap": True,
                "num_blocks": 10,
                "max_batch_size": 2,
                "policy": MaxUtilizationScheduler,
            },
            {},
        ),
    ],
    ids=str,
)
def test_the_phases_of_an_iteration_do_not_overlap(mode, kind):
    """Each look at the clock takes a microsecond, each wait for a result 1,000."""
    now = itertools.count(step=1000)

    class Slow:
        def __init__(self, executor):
            self.forward, self.sample, self._result = (
                *(executor.forward, executor.sample),
                executor.result,
            )

        def result(self, step):
            for _ in range(1000):
                next(now)
            return self._result(step)

    driver = LoopDriver(**mode)
    driver.loop.executor = Slow(driver.executor)
    driver.loop.phase_times = PhaseTimes(lambda: next(now))
    phases = []
    driver.host.report = lambda counts, phase_times: phases.append(phase_times.microseconds())
    driver.submit(*(request(i, [i, 5, 6], 6, **kind) for i in range(5)))
    driver.run()
    waits = 0
    for iteration in phases:
        total = iteration.pop("total")
        assert sum(iteration.values()) <= total
        assert all(taken < 200 for name, taken in iteration.items() if name != "result")
        waits += iteration.get("result", 0) >= 1000
    assert waits


def test_nothing_starts_on_blocks_that_a_recalled_result_has_removed_from_the_cache():
    shared = [1, 2, 3, 4, 5, 6, 7, 8]

    def script(history):
        return NOT_FINITE if len(history) == 9 and history[:8] == shared else next_token(history)

    driver = LoopDriver(
        script=script, overlap=True, reuse=True, num_blocks=5, policy=MaxUtilizationScheduler
    )
    driver.submit(request(1, shared, 8, priority=0.9), request(2, [9, 8, 7, 6], 8, priority=0.1))
    for _ in range(3):
        driver.loop.iterate()
    # Given a request that would share blocks with request 1, for which request 2 is recalled
    driver.submit(request(3, [*shared, 5, 6], 4))
    driver.run()
    assert driver.final(1).error.startswith("LogitsError: ")
    assert driver.output(2)[4:] == expected_output([9, 8, 7, 6], 8)
    assert driver.output(3)[10:] == expected_output([*shared, 5, 6], 4)
    driver.check_empty()

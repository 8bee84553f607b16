"""Any sequence of events over the TokenLoop: one final response each, no block lost, no hang.

The machine is driven by hypothesis; the model of what must come out is each request alone.
"""

from __future__ import annotations

import threading
import time

import pytest
from fuzz import FUZZ
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from loop_driver import (
    AHEAD,
    ForcedPauses,
    LoopDriver,
    expected_beams,
    expected_output,
    next_token,
    no_evict,
)

from gptmanager import (
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
)
from gptmanager.decoding.search.beam_search import BeamParams
from gptmanager.decoding.stop_words import StopWords
from gptmanager.scheduler import MaxUtilizationScheduler
from gptmanager.testing import ContractChecker, RecordingCallbacks, ScriptedModel

EXAMPLES, PARTS = 800 * FUZZ, 8
MAX_SEQ_LEN = 24
PROMPTS = st.lists(st.integers(0, 99), min_size=1, max_size=10)
ALIKE = st.lists(st.sampled_from([1, 1, 1, 2]), min_size=1, max_size=12)  # much to be reused


class LoopMachine(RuleBasedStateMachine):
    """Submit, duplicate, stop, pause, fail to send, break the step, shut down; in any order."""

    @initialize(
        ahead=st.sampled_from(AHEAD),
        chunked=st.booleans(),
        reuse=st.booleans(),
        num_host_blocks=st.sampled_from([0, 3, 12]),
        policy=st.sampled_from([no_evict, MaxUtilizationScheduler]),
        num_blocks=st.integers(6, 14),
        max_batch_size=st.integers(1, 4),
        max_active=st.sampled_from([2, 5, None]),
    )
    def build(
        self,
        ahead,
        chunked,
        reuse,
        num_host_blocks,
        policy,
        num_blocks,
        max_batch_size,
        max_active,
    ):
        self.driver = LoopDriver(
            num_blocks=num_blocks,
            tokens_per_block=4,
            max_batch_size=max_batch_size,
            max_num_tokens=MAX_SEQ_LEN if not chunked else 8,
            max_active=max_active,
            max_seq_len=MAX_SEQ_LEN,
            chunked=chunked,
            reuse=reuse,
            num_host_blocks=num_host_blocks,
            policy=policy,
            script=self.script,
            scheduler=ForcedPauses,
            **ahead,
        )
        self.driver.host.fail_to_send = lambda request_id, is_final: request_id in self.gone
        self.submitted = {}
        self.gone = set()
        self.broken = self.dead = False
        self.iterations = 0

    def script(self, history):
        if self.broken:
            raise FloatingPointError("the step is broken")
        return next_token(history)

    @precondition(lambda self: not self.dead)
    @rule(
        request_id=st.integers(0, 6),
        prompt=PROMPTS | ALIKE,
        max_new_tokens=st.integers(1, 10),
        streaming=st.booleans(),
        end_after=st.none() | st.integers(0, 9),
        stop_at=st.none() | st.integers(0, 7),
        priority=st.sampled_from([0.1, 0.5, 0.9]),
        beam_width=st.sampled_from([1, 1, 1, 2, 3]),
    )
    def submit(
        self,
        request_id,
        prompt,
        max_new_tokens,
        streaming,
        end_after,
        stop_at,
        priority,
        beam_width,
    ):
        tokens = expected_output(prompt, 10)
        options = {}
        if end_after is not None:
            options["end_id"] = tokens[end_after]
        if stop_at is not None:
            options["stop_words_list"] = [tokens[stop_at : stop_at + 3]]
        request = InferenceRequest.from_tokens(
            *(request_id, prompt, max_new_tokens),
            is_streaming=streaming,
            priority=priority,
            beam_width=beam_width,
            **options,
        )
        self.driver.submit(request)
        self.submitted.setdefault(request_id, []).append(
            (
                prompt,
                alone(prompt, max_new_tokens, **options),
                streaming,
                beams_alone(prompt, max_new_tokens, beam_width, **options),
            )
        )

    @precondition(lambda self: not self.dead)
    @rule(times=st.integers(1, 6))
    def iterate(self, times):
        for _ in range(times):
            self.iterations += 1
            try:
                self.driver.loop.iterate()
            except FloatingPointError as error:
                self.die(error)
                return

    @precondition(lambda self: not self.dead)
    @rule(request_id=st.integers(0, 8))
    def stop(self, request_id):
        self.driver.host.callbacks.stop(request_id)

    @precondition(lambda self: not self.dead)
    @rule(victims=st.sets(st.integers(0, 6), min_size=1, max_size=3))
    def pause(self, victims):
        self.driver.scheduler.victims |= victims

    @precondition(lambda self: not self.dead)
    @rule(request_id=st.integers(0, 6))
    def client_goes(self, request_id):
        self.gone.add(request_id)

    @precondition(lambda self: not self.dead and self.iterations > 8)  # the end of most: late
    @rule()
    def break_the_step(self):
        self.broken = True

    @precondition(lambda self: self.iterations > 8)
    @rule()
    def abort(self):
        """Also after a failed step, and twice: it changes nothing then."""
        self.die(RuntimeError("shut down"))

    def die(self, error):
        self.driver.loop.abort(error)
        self.dead = True

    @invariant()
    def accounts_are_right(self):
        if hasattr(self, "driver"):
            self.driver.loop.allocator.check()
            assert not self.driver.host.checker.violations

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        if not self.dead:
            try:
                driver.run()
            except FloatingPointError as error:
                self.die(error)
        if self.dead:
            driver.check_empty()
        for request_id, submissions in self.submitted.items():
            self.check_outputs(request_id, submissions)

    def check_outputs(self, request_id, submissions):
        """Every life of an id gave a prefix of what its request gives alone, or all of it."""
        lives = split_lives(driver_responses(self.driver, request_id))
        candidates = [(prompt, tokens) for prompt, tokens, *_ in submissions]
        searches = [(prompt, beams) for prompt, _, _, beams in submissions]
        for life in lives:
            final = life[-1]
            if final.error:
                continue
            streaming = "output_offset" in final.tensors
            cancelled = FinishReason.CANCELLED in final.tensors["finish_reasons"].tolist()[0]
            if final.tensors["sequence_length"].shape[1] > 1:
                found = beams_of(life)
                assert cancelled or any(
                    found == [([] if streaming else prompt) + beam for beam in beams]
                    for prompt, beams in searches
                ), (found, searches)
                continue
            output = [
                token
                for response in life
                for token in response.tensors["output_ids"][
                    0, 0, : int(response.tensors["sequence_length"])
                ].tolist()
            ]
            assert any(
                matches(output, [] if streaming else prompt, tokens, cancelled)
                for prompt, tokens in candidates
            ), (output, candidates)


def alone(prompt, max_new_tokens, end_id=None, stop_words_list=()):
    """The whole output of a request by definition, and what it generates with nothing cut off."""
    tokens = expected_output(prompt, min(max_new_tokens, MAX_SEQ_LEN - len(prompt)))
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] == end_id:
            return tokens[: count - 1], tokens
        for word in stop_words_list:
            if word and tokens[:count][-len(word) :] == word:
                return tokens[: count - len(word)], tokens
    return tokens, tokens


def beams_alone(prompt, max_new_tokens, beam_width, end_id=-1, stop_words_list=()):
    """What a request finds by definition; [] with one beam, for which `alone` stands."""
    words = [word for word in stop_words_list if word]
    return (
        []
        if beam_width == 1
        else expected_beams(
            prompt,
            min(max_new_tokens, MAX_SEQ_LEN - len(prompt)),
            BeamParams(beam_width),
            end_ids=frozenset({end_id} - {-1}),
            stop_words=StopWords(words) if words else None,
        )
    )


def beams_of(life):
    """The text of each beam: what was sent while it was stable, and the end."""
    texts = [[] for _ in life[-1].tensors["sequence_length"][0]]
    for response in life:
        lengths = response.tensors["sequence_length"][0].tolist()
        for text, row, length in zip(
            texts, response.tensors["output_ids"][0], lengths, strict=True
        ):
            text += row[:length].tolist()
    return texts


def matches(output, prompt, tokens, cancelled):
    cut, whole = tokens
    if output[: len(prompt)] != prompt:
        return False
    generated = output[len(prompt) :]
    return generated == cut or (cancelled and generated == whole[: len(generated)])


def driver_responses(driver, request_id):
    """All responses but the rejections of duplicates."""
    responses = driver.host.callbacks.of(request_id)
    return [r for r in responses if not r.error.startswith("DuplicateRequestIdError")]


def split_lives(responses):
    """An id may be used again after its final response."""
    lives, current = [], []
    for response in responses:
        current.append(response)
        if response.is_final:
            lives.append(current)
            current = []
    assert not current
    return lives


# in parts: one that is interrupted by a time limit ends otherwise than its history says, which
# hypothesis reports as a strategy that is flaky
@pytest.mark.timeout(300)
@pytest.mark.every(8)
@pytest.mark.parametrize("part", range(PARTS))
def test_any_sequence_of_events(part):
    run_state_machine_as_test(
        seed(part)(LoopMachine),
        settings=settings(
            max_examples=EXAMPLES // PARTS,
            stateful_step_count=25,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("number", range(50))
def test_any_sequence_of_events_with_real_threads(number):
    """The same promises through a manager: a host that submits, stops, raises and shuts down."""
    import random

    chance = random.Random(number)
    host = RecordingCallbacks()
    checker = ContractChecker(
        host.get_inference_requests, host.send_response, tolerates_duplicates=True
    )
    raising = chance.choice([None, "get", "send", "poll", "stats"])

    def maybe(name, callback):
        def call(*args):
            result = callback(*args)
            if name == raising and chance.random() < 0.1:
                raise LookupError(f"{name} of the host")
            return result

        return call

    def script(history):
        if breaks and len(history) > 15:
            raise FloatingPointError("the step is broken")
        return next_token(history)

    breaks = chance.random() < 0.2
    before = set(threading.enumerate())
    manager = GptManager(
        ScriptedModel(script, vocab_size=100, max_position_embeddings=64),
        ModelType.INFLIGHT_FUSED_BATCHING,
        get_inference_requests_cb=maybe("get", checker.get_inference_requests),
        send_response_cb=maybe("send", checker.send_response),
        poll_stop_signal_cb=maybe("poll", host.poll_stop_signal),
        return_batch_manager_stats_cb=maybe("stats", host.return_batch_manager_stats),
        optional_params=OptionalParams(
            kv_cache_config=KvCacheConfig(max_tokens=96, tokens_per_block=4),
            max_batch_size=3,
            run_ahead=number % 2,
            max_get_failures=1000,
            idle_poll_s=0.001,
        ),
    )
    for _ in range(chance.randrange(5, 25)):
        prompt = [chance.randrange(100) for _ in range(chance.randrange(1, 12))]
        request = InferenceRequest.from_tokens(
            chance.randrange(8),
            prompt,
            chance.randrange(1, 20),
            is_streaming=chance.random() < 0.5,
        )
        host.submit(request)
        if chance.random() < 0.3:
            host.stop(chance.randrange(8))
        if chance.random() < 0.3:
            time.sleep(0.001)
    manager.shutdown(drain=chance.random() < 0.5, timeout=20)
    assert manager.wait(0)
    if raising != "get":  # what a raising Get swallowed is the host's to answer
        checker.check(manager)
    assert manager.audit().used_blocks == 0
    assert not {t for t in set(threading.enumerate()) - before if t.is_alive()}

"""Ranks as threads of one process, fed the same intakes: one chooses, all decide the same.

Every rank has the whole network here: what is tried is the way of the results.
"""

from __future__ import annotations

import functools
import gc
import queue
import random
import threading
import time
import weakref
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS, checkpoint, random_model
from cuda_headers import require_cuda_headers
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_driver import ForcedPauses, ListHost

from gptmanager import (
    CapacitySchedulerPolicy,
    InferenceRequest,
    KvCacheConfig,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.assembly.assemble import place
from gptmanager.assembly.backend import StepOptions
from gptmanager.assembly.blueprint import Blueprint, build_loop
from gptmanager.assembly.cpu_backend import CpuBackend
from gptmanager.assembly.device_backend import DeviceBackend
from gptmanager.assembly.options import checked_optional_params
from gptmanager.assembly.sizing import size
from gptmanager.config import ParallelConfig, PromptLookup
from gptmanager.decoding.lines import Lines
from gptmanager.errors import CallbackError, LogitsError, RankError, response_text
from gptmanager.executor.forward_thread import ForwardThread
from gptmanager.executor.rank_executor import RankPlace
from gptmanager.executor.result_message import pack, unpack
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.kernels import CpuKernels
from gptmanager.models import load_model
from gptmanager.ranks.layout import RankLayout
from gptmanager.statistics import PhaseTimes
from gptmanager.step import (
    BeamCandidates,
    ContextLogits,
    Extras,
    Failure,
    PromptLogProbs,
    StepResult,
    TopLogProbs,
)

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB_SIZE, LONGEST = 48, 40
CONFIG = {
    **CONFIGS["llama"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
PATIENCE_S = 30.0
SOURCE = checkpoint(random_model(CONFIG))


# Messages -----------------------------------------------------------------------------------

tokens = st.integers(-2, 2**31 - 1)
names = st.sampled_from([CallbackError, LogitsError, type("OfAHost", (Exception,), {})])
numbers = st.floats(width=32, allow_nan=False)


@st.composite
def results(draw):
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    array = np.array(draw(st.lists(tokens, min_size=rows * columns, max_size=rows * columns)))
    counts = None
    if draw(st.booleans()):
        counts = np.array(draw(st.lists(st.integers(0, columns), min_size=rows, max_size=rows)))
        counts = counts.astype(np.int32)
    beams = []
    for lengths in draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), max_size=2)):
        own = tuple(tuple(draw(tokens) for _ in range(n)) for n in lengths)
        beams.append(BeamCandidates(own, tuple(tuple(draw(numbers) for _ in o) for o in own)))
    texts = draw(st.lists(st.text(st.characters(codec="utf-8"), max_size=9), max_size=2))
    failures = tuple(Failure(draw(st.integers(0, 2**64 - 1)), draw(names)(text)) for text in texts)
    extras = None
    if draw(st.booleans()):
        log_probs = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        logits = torch.randn(draw(st.integers(0, 2)), 4)
        top = TopLogProbs(1, logits.numpy(), np.arange(logits.numel()).reshape(logits.shape))
        of_prompt = PromptLogProbs(2**64 - 1, 3, 4, logits[:, 0], logits, logits.int())
        context = (ContextLogits(2**64 - 1, 3, 4, logits),)
        extras = Extras(log_probs, ((0, logits),), context, (top,), (of_prompt,))
    return StepResult(
        array.astype(np.int32).reshape(rows, columns),
        draw(st.floats(0, 1e9)),
        counts,
        tuple(beams),
        failures,
        draw(st.booleans()),
        extras,
    )


def check_equal(found, result):
    assert found.now == result.now and found.stale == result.stale
    np.testing.assert_array_equal(found.tokens, result.tokens)
    assert (found.num_tokens is None) == (result.num_tokens is None)
    if result.num_tokens is not None:
        np.testing.assert_array_equal(found.num_tokens, result.num_tokens)
    assert found.beams == result.beams
    assert [f.request_id for f in found.failures] == [f.request_id for f in result.failures]
    for own, other in zip(found.failures, result.failures, strict=True):
        assert response_text(own.error) == response_text(other.error)
        assert isinstance(own.error, LogitsError) == isinstance(other.error, LogitsError)


@pytest.mark.parametrize("text", ["", ": a", "CallbackError: a", "\ud800"])
def test_the_error_of_a_request_comes_back(text):
    none, failures = np.zeros((0, 1), dtype=np.int32), (Failure(5, CallbackError(text)),)
    result = StepResult(none, 1.0, None, (), failures, False, None)
    check_equal(unpack(pack(7, result), 7, 0), result)


@settings(max_examples=75 * FUZZ, deadline=None, database=None)
@given(results(), st.data())
def test_a_result_comes_back(result, data):
    rows = len(result.tokens)
    plain = unpack(pack(7, result), 7, rows)
    check_equal(plain, result)
    assert plain.extras is None
    message = pack(7, result, with_extras=True)
    whole = unpack(message, 7, rows)
    check_equal(whole, result)
    if result.extras is not None:
        np.testing.assert_array_equal(whole.extras.log_probs, result.extras.log_probs)
        for name in ("top_log_probs", "prompt_log_probs"):
            (own,), (other,) = getattr(whole.extras, name), getattr(result.extras, name)
            for one, same in zip(own, other, strict=True):
                np.testing.assert_array_equal(one, same)
        for (_, own), (_, other) in zip(
            whole.extras.generation_logits, result.extras.generation_logits, strict=True
        ):
            assert torch.equal(own, other)
        for own, other in zip(
            whole.extras.context_logits, result.extras.context_logits, strict=True
        ):
            assert torch.equal(own.logits, other.logits)
            assert replace_logits(own) == replace_logits(other)
    with pytest.raises(RankError, match="cannot be read"):
        unpack(message[: data.draw(st.integers(0, len(message) - 1))], 7, rows)
    with pytest.raises(RankError, match="1 bytes too many|drifted"):
        unpack(message + b"x", 7, rows)
    with pytest.raises(RankError, match="step 7 with .* that of step 8"):
        unpack(message, 8, rows)
    broken = bytearray(message)
    broken[data.draw(st.integers(0, len(broken) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        unpack(bytes(broken), 7, rows)
    except RankError:
        pass


def replace_logits(part):
    return part._replace(logits=None)


# Ranks --------------------------------------------------------------------------------------


class Link:
    """To the queues of the other ranks; or one of these."""

    def __init__(self, queues):
        self.queues = queues

    def send(self, message):
        assert type(message) is bytes
        for own in self.queues:
            own.put(message)

    def receive(self):
        return self.queues[0].get(timeout=PATIENCE_S)


def noted(inputs, forward, batch, pool):
    inputs.append(batch.token_ids.tolist())
    return forward(batch, pool)


class Rank:
    """A loop, its executor and its schedules."""

    def __init__(self, layout, host, link, params, config, replicates=False, beams=1, share=None):
        self.host = host
        kind = CpuBackend(OptionalParams(deterministic=True))
        if params.device:
            kind = place(replace(params, parallel_config=None))
        if isinstance(kind, DeviceBackend):
            model = kind.load(SOURCE, params)
        else:
            kernels = CpuKernels(deterministic=True)
            kernels.warm_up()
            model = load_model(SOURCE, kernels=kernels)
        sizes = size(params, config, model.spec)
        blueprint = Blueprint(params, config, sizes, VOCAB_SIZE, max_beam_width=beams)
        spot = None
        if link is not None:
            spot = RankPlace(layout, link, share, sends_extras=True, replicates=replicates)
        options = StepOptions(Lines(blueprint.num_slots, beams), params.max_batch_size, rank=spot)
        self.executor = kind.executor(model, sizes, options)
        self.loop = build_loop(blueprint, host, self.executor, phase_times=PhaseTimes(lambda: 0))
        self.loop.scheduler = self.pauses = ForcedPauses(self.loop.scheduler)
        self.schedules, self.inputs = [], []  # what the network was given, step by step
        model.forward = functools.partial(noted, self.inputs, model.forward)
        self.forward, self.executor.forward = self.executor.forward, self.note

    def note(self, schedule):
        self.schedules.append(schedule)
        return self.forward(schedule)


class Told(ListHost):
    """A host that says what rank 0's says."""

    def __init__(self):
        super().__init__()
        self.intakes = queue.Queue()
        self.last = None

    def fetch(self, room, num_active):
        return self.last

    def fail(self, failure):
        """It comes with rank 0's intake."""

    def respond(self, request_id, tensors, is_final, error):
        self.callbacks.send_response(request_id, tensors, is_final, error)


def follow(rank, errors):
    try:
        while (told := rank.host.intakes.get(timeout=PATIENCE_S)) is not None:
            rank.host.last, rank.pauses.victims = told
            rank.loop.iterate()
    except BaseException as error:  # noqa: B036 - the test's own thread tells
        errors.append(error)


def lead(ranks, turns):
    """Rank 0 turns, the others on threads; `turns` gives requests, stops and pauses by turn."""
    first, *others = ranks
    errors = []
    threads = [threading.Thread(target=follow, args=(rank, errors)) for rank in others]
    for thread in threads:
        thread.start()
    fetch = first.host.fetch

    def tell(room, num_active):
        intake = fetch(room, num_active)
        for rank in others:
            rank.host.intakes.put((intake, set(first.pauses.victims)))
        return intake

    first.host.fetch = tell
    number = 0
    try:
        while number < len(turns) or first.loop.active or first.loop.pending:
            requests, stops, victims = turns[number] if number < len(turns) else ((), False, False)
            first.host.callbacks.submit(*requests)
            started = [it.request_id for it in first.loop.active if it.slot >= 0]
            for request_id in started[:1] if stops else ():
                first.host.callbacks.stop(request_id)
            first.pauses.victims |= set(started[-1:] if victims else ())
            first.loop.iterate()
            number += 1
            assert number < 1000 and not errors, errors
    finally:
        for rank in others:
            rank.host.intakes.put(None)
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not errors and not any(thread.is_alive() for thread in threads), errors


def world(num_ranks, num_stages, params, config, **more):
    parts = num_ranks // num_stages
    queues = [queue.Queue() for _ in range(num_ranks - 1)]
    links = [Link(queues), *(Link([own]) for own in queues)]
    return [
        Rank(
            *(RankLayout(rank, parts, num_stages), ListHost() if rank == 0 else Told()),
            *(links[rank], params, config),
            **more,
        )
        for rank in range(num_ranks)
    ]


def options(num_stages, **more):
    ranks = ParallelConfig(pipeline_parallel_size=num_stages) if num_stages > 1 else None
    values = {
        "max_batch_size": 4,
        "max_num_tokens": 48,
        "max_seq_len": LONGEST,
        "deterministic": True,
        "kv_cache_config": KvCacheConfig(
            max_tokens=160, tokens_per_block=4, enable_block_reuse=True
        ),
        **more,
    }
    return checked_optional_params(OptionalParams(parallel_config=ranks, **values))


def halve(request_id, logits, history, stream, client_id):
    """A processor that looks at the whole history."""
    logits[..., sum(history[0]) % VOCAB_SIZE] += 3.0
    if len(history[0]) == 17:
        raise LookupError(f"of request {request_id}")


def load(seed):
    """Requests of all kinds, stops and pauses, by turn."""
    chance = random.Random(seed)
    turns = []
    for number in range(16):
        prompt = [chance.randrange(3) for _ in range(chance.randint(1, 12))]
        more = chance.choice([
            *({}, {"temperature": 0.9, "random_seed": number}, {"repetition_penalty": 1.3}),
            *({"beam_width": 2}, {"num_return_sequences": 2, "temperature": 1.0}),
            *({"draft_input_ids": prompt[:3]}, {"return_log_probs": True}),
            {"logits_post_processor": halve},
        ])  # fmt: skip
        request = InferenceRequest.from_tokens(
            number, prompt, chance.randint(2, 14), is_streaming=chance.random() < 0.3, **more
        )
        stops = chance.random() < 0.2
        victims = chance.random() < 0.3
        turns.append(([request], stops, victims))
        turns += [((), stops, victims)] * chance.choice([0, 0, 1, 3])
    return turns


def said(callbacks):
    """All responses, as values."""
    return [
        (r.request_id, r.is_final, r.error,
         {name: value.tolist() for name, value in r.tensors.items() if name != "request_metrics"})
        for r in callbacks.responses
    ]  # fmt: skip


MODES = {
    "one stage": (2, 1, {}),
    "one stage, ahead": (3, 1, {"run_ahead": 1}),
    "two stages": (2, 2, {}),
    "three stages": (3, 3, {}),
    "two by two": (4, 2, {"speculative_decoding_config": PromptLookup(3, 2, 1)}),
}


@pytest.mark.parametrize("policy", [0, 1], ids=["max_utilization", "no_evict"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.every(5)
def test_all_ranks_decide_the_same_and_answer_as_one_does(mode, policy):
    num_ranks, num_stages, more = MODES[mode]
    config = SchedulerConfig(
        [CapacitySchedulerPolicy.MAX_UTILIZATION, CapacitySchedulerPolicy.GUARANTEED_NO_EVICT][
            policy
        ]
    )
    seen = Counter()
    for seed in range(2 * FUZZ):
        params = options(num_stages, enable_chunked_context=True, **more)
        ranks = world(num_ranks, num_stages, params, config, beams=2)
        lead(ranks, load(seed))
        first, *others = ranks
        for rank in others:
            assert rank.schedules == first.schedules
            assert said(rank.host.callbacks) == said(first.host.callbacks)
            assert rank.inputs == first.inputs
        alone = Rank(RankLayout(), ListHost(), None, params, config, beams=2)
        lead([alone], load(seed))
        assert (alone.schedules, alone.inputs) == (first.schedules, first.inputs)
        assert said(alone.host.callbacks) == said(first.host.callbacks)
        for schedule in first.schedules:
            seen["pauses"] += len(schedule.paused)
            seen["drafts"] += len(schedule.drafts)
            seen["forks"] += len(schedule.beam_forks)
            seen["late"] += schedule.micro_batch_id
        seen["errors"] += sum("LookupError" in r.error for r in first.host.callbacks.responses)
        for rank in ranks:
            assert rank.executor.close(PATIENCE_S)
    least = {"pauses": 2, "drafts": 1, "forks": 20, "late": 20 if num_stages > 1 else 0}
    assert {name: seen[name] for name in least if seen[name] < least[name]} == {}


# Post-processors on each rank -----------------------------------------------------------------


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.every(2)
def test_ranks_that_have_logits_may_choose_for_themselves(num_stages):
    """Rank 1 of two by two has logits, those of the first stage have none."""
    ranks = world(2 * num_stages, num_stages, options(num_stages), SchedulerConfig(),
                  replicates=True, beams=2)  # fmt: skip
    lead(ranks, load(3))
    for rank in ranks[1:]:
        assert said(rank.host.callbacks) == said(ranks[0].host.callbacks)
    for rank in ranks:
        rank.executor.close(PATIENCE_S)


def test_what_follows_a_wrong_draft_may_differ_between_ranks_that_choose_for_themselves():
    """Only the valid tokens of a row are compared."""
    params = options(1, speculative_decoding_config=PromptLookup(3, 2, 1))
    ranks = world(2, 1, params, SchedulerConfig(), replicates=True, beams=2)
    inner, num_invalid = ranks[1].executor._executor, []
    own_result = inner.result

    def result(step):
        found = own_result(step)
        if found.num_tokens is None:
            return found
        is_invalid = np.arange(found.tokens.shape[1]) >= found.num_tokens[:, None]
        num_invalid.append(is_invalid.sum())
        return replace(found, tokens=np.where(is_invalid, found.tokens + 1, found.tokens))

    inner.result = result
    lead(ranks, load(3))
    assert sum(num_invalid) > 0
    assert said(ranks[1].host.callbacks) == said(ranks[0].host.callbacks)
    for rank in ranks:
        rank.executor.close(PATIENCE_S)


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.every(2)
def test_a_rank_whose_post_processor_differs_says_so(num_stages):
    calls = []

    def fickle(request_id, logits, history, stream, client_id):
        calls.append(threading.current_thread())
        logits[..., 5 + (calls[-1] is not threading.main_thread())] += 100.0

    ranks = world(2 * num_stages, num_stages, options(num_stages), SchedulerConfig(),
                  replicates=True)  # fmt: skip
    request = InferenceRequest.from_tokens(3, [1, 2], 4, logits_post_processor=fickle)
    expected = r"request 3: .* the tokens are \[6\], .*rank 0 they are \[5\]"
    with pytest.raises(AssertionError, match=expected):
        lead(ranks, [([request], False, False)])
    assert len({*calls}) == 2  # the loops' threads of those with logits, and no other


# The thread of forwards ------------------------------------------------------------------------


class Slow:
    """A forward that waits until it may go on, and fails if it is told to."""

    def __init__(self):
        self.may_run, self.begun, self.fails = threading.Event(), [], False

    def __call__(self, schedule):
        self.begun.append(schedule)
        assert self.may_run.wait(PATIENCE_S)
        if self.fails:
            raise RankError("rank 1 has died")
        return schedule * 10


def test_forwards_run_in_order_while_the_caller_goes_on():
    slow = Slow()
    forwards = ForwardThread(slow)
    first, second = forwards.submit(1), forwards.submit(2)
    slow.may_run.set()
    assert (second(), first()) == (20, 10) and slow.begun == [1, 2]
    slow.fails = True
    third, fourth = forwards.submit(3), forwards.submit(4)
    for computed in (third, fourth):
        with pytest.raises(RankError, match="rank 1 has died"):
            computed()
    assert forwards.close(PATIENCE_S) and forwards.close(0)


def test_the_thread_ends_with_its_owner_and_closing_waits_no_longer_than_it_may():
    slow = Slow()
    forwards = ForwardThread(slow)
    forwards.submit(1)
    while not slow.begun:
        time.sleep(0.001)
    assert forwards.close(0.01) is False  # it hangs
    slow.may_run.set()
    assert forwards.close(PATIENCE_S)
    forgotten = ForwardThread(slow)
    thread = forgotten._thread
    assert thread.daemon
    del forgotten
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_an_executor_that_is_let_go_of_takes_its_thread_and_memory_along():
    before = set(threading.enumerate())
    ranks = world(2, 2, options(2), SchedulerConfig())
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    pages = [weakref.ref(rank.executor.runner.kv_pool) for rank in ranks]
    del ranks
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
    gc.collect()
    assert not any(thread.is_alive() for thread in threads)
    assert [page() for page in pages] == [None, None]


# What goes wrong ---------------------------------------------------------------------------------


def one_step(rank, number=1):
    request = InferenceRequest.from_tokens(number, [1, 2, 3], 4)
    rank.host.callbacks.submit(request)
    return rank


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_step_that_fails_fails_in_its_result_and_never_runs_in_parts(num_stages):
    """The parts would be batches that the other ranks do not have."""
    first, _ = world(2, num_stages, options(num_stages), SchedulerConfig())
    runs = []

    def run(rows):
        runs.append(rows)
        raise torch.OutOfMemoryError("no memory")

    first.executor.runner.run = run
    one_step(first)
    with pytest.raises(torch.OutOfMemoryError):
        for _ in range(3):
            first.loop.iterate()
    assert len(runs) == 1
    assert first.executor.close(PATIENCE_S)


def test_a_result_of_failures_alone_comes_back():
    none = np.zeros((0, 1), dtype=np.int32)
    result = StepResult(none, 1.0, None, (), (Failure(5, LogitsError("it failed")),), False, None)
    check_equal(unpack(pack(7, result), 7, 0), result)


def test_a_result_of_another_step_is_refused():
    first, second = world(2, 1, options(1), SchedulerConfig())
    one_step(first)
    first.loop.iterate()
    first.loop.iterate()
    link = second.executor._link
    link.receive()  # the first is lost
    second.host.last = replace(first.host.fetch(0, 0), requests=())
    second.loop.table.host = ListHost()
    second.loop.table.host.callbacks.submit(InferenceRequest.from_tokens(1, [1, 2, 3], 4))
    with pytest.raises(RankError, match="the result of step 1 .* expected that of step 0"):
        second.loop.iterate()


# On a device: the emulator -----------------------------------------------------------------------


class Shared:
    """What `collectives.share` does, between two threads: part 0's tensor comes first."""

    def __init__(self):
        self.tensors = queue.Queue()
        self.num_given = 0

    def give(self, tensor):
        self.num_given += 1
        self.tensors.put(tensor.clone())

    def take(self, tensor):
        tensor.copy_(self.tensors.get(timeout=PATIENCE_S))


@pytest.mark.parametrize(
    ("num_stages", "ahead"), [(1, 1), (1, 0), (2, 0)], ids=["ahead", "one stage", "two stages"]
)
@pytest.mark.every(2)
def test_ranks_on_devices(num_stages, ahead):
    require_cuda_headers()
    shared = Shared()
    params = options(num_stages, device="emulator", run_ahead=ahead, cuda_graphs=False)
    queues = [queue.Queue()]
    ranks = [
        Rank(RankLayout(rank, 2 // num_stages, num_stages), host, Link(queues), params,
             SchedulerConfig(), beams=2, share=share)
        for rank, (host, share) in enumerate(
            [(ListHost(), shared.give), (Told(), shared.take)]
        )
    ]  # fmt: skip
    lead(ranks, load(5)[:14])
    first, second = ranks
    assert second.schedules == first.schedules
    assert said(second.host.callbacks) == said(first.host.callbacks)
    assert shared.tensors.empty()
    assert bool(shared.num_given) == (num_stages == 1)  # only these share between devices
    assert second.inputs == first.inputs
    alone = Rank(RankLayout(), ListHost(), None, params, SchedulerConfig(), beams=2)
    lead([alone], load(5)[:14])
    assert (alone.schedules, alone.inputs) == (first.schedules, first.inputs)
    assert said(alone.host.callbacks) == said(first.host.callbacks)


def test_a_cell_that_is_written_twice_holds_what_was_written_last():
    tables = DeviceTables(2, 8, 1, torch.device("cpu"))
    tables.write_cells(np.array([1, 0]), np.array([2, 1]), np.array([7, 8], np.int32))
    tables.write_tokens(1, 0, (3, 4, 5))
    sent = []

    def upload(arrays):
        sent.extend(torch.from_numpy(array) for array in arrays)
        return sent

    tables.flush(upload)
    assert len(sent[2].unique()) == len(sent[2]) == 4  # a copy in parallel keeps no order
    assert tables.token_tensor.tolist()[1][:4] == [3, 4, 5, 0]
    assert tables.token_tensor.tolist() == tables.tokens.tolist()

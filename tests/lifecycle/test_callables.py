"""Callbacks that would have to be awaited: refused where they are given, counted where returned."""

import asyncio
import functools
import gc
import warnings
from contextlib import suppress
from unittest.mock import MagicMock

import pytest

from gptmanager import (
    GptManager,
    InferenceRequest,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.assembly.options import checked_optional_params
from gptmanager.callbacks import broadcast, fan_out
from gptmanager.errors import CallbackError, ConfigError
from gptmanager.lifecycle.callables import check_answer, kind_of_deferred, ordinary
from gptmanager.testing import ContractChecker, ContractViolation, RecordingCallbacks, ScriptedModel


async def coroutine(*arguments):
    return arguments


async def async_generator(*arguments):
    yield arguments


def generator(*arguments):
    yield arguments


class Object:
    async def method(self, *arguments):
        return arguments

    async def __call__(self, *arguments):
        return arguments

    async def process_batch(self, *arguments):
        return arguments


NAMES = ("get_inference_requests_cb", "send_response_cb", "poll_stop_signal_cb",
         "return_batch_manager_stats_cb")  # fmt: skip
DEFERRED = {
    "function": coroutine,
    "method": Object().method,
    "object": Object(),
    "partial": functools.partial(functools.partial(Object().method, 1), 2),
    "partial_object": functools.partial(Object()),
    "async_generator": async_generator,
}


@pytest.fixture(autouse=True)
def nothing_is_left_unawaited():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # in a destructor it would be printed; pytest makes it fail
        yield
        gc.collect()


def manager(host, *, requests=None, **more):
    keywords = {**host.keywords(), **more}
    params = {"max_batch_size": 4, "max_seq_len": 64, **keywords.pop("params", {})}
    return GptManager(
        ScriptedModel(lambda history: 7, vocab_size=20),
        ModelType.INFLIGHT_FUSED_BATCHING,
        scheduler_config=SchedulerConfig(**keywords.pop("scheduler", {})),
        optional_params=OptionalParams(**params),
        **keywords,
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", DEFERRED)
@pytest.mark.parametrize("name", NAMES)
def test_a_callback_that_would_have_to_be_awaited_is_refused(name, kind):
    with pytest.raises(ConfigError, match=rf"{name} = .* is an? (coroutine|async generator) func"):
        manager(RecordingCallbacks(), **{name: DEFERRED[kind]})


def test_generators_are_for_those_whose_answer_is_iterated_over():
    for name in (NAMES[1], NAMES[3]):
        with pytest.raises(ConfigError, match=f"{name} = .* is a generator function"):
            manager(RecordingCallbacks(), **{name: generator})
    assert not kind_of_deferred(generator, may_yield=True)


def two_arguments(request_id, tensors):
    pass


def injected(function):
    @functools.wraps(function)
    def call(*arguments):
        return function("connection", *arguments)

    return call


WRONG_ARGUMENTS = {
    NAMES[0]: (lambda: [], r"\(max_num_requests\): too many positional arguments"),
    NAMES[1]: (two_arguments, r"\(request_id, tensors, is_final,"),
    NAMES[2]: (lambda ids: ids, r"\(\): missing a required argument: 'ids'"),
    NAMES[3]: (functools.partial(two_arguments, 1, 2), r"\(json\): too many positional arguments"),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_callback_that_does_not_accept_its_arguments_is_refused(name):
    function, told = WRONG_ARGUMENTS[name]
    with pytest.raises(ConfigError, match=f"{name} = .* must accept the arguments {told}"):
        manager(RecordingCallbacks(), **{name: function})


@pytest.mark.parametrize(
    "function",
    [lambda *a, **k: None, [].append, MagicMock(), print, injected(lambda c, json: None)],
    ids=["any", "bound", "mock", "builtin", "decorated"],
)
def test_a_callback_that_accepts_its_arguments_is_taken(function):
    assert ordinary(NAMES[3], function) is function


@pytest.mark.parametrize(
    ("function", "kind"), [(generator, "a generator"), (async_generator, "an async_generator")]
)
def test_an_answer_that_has_to_be_iterated_is_an_error(function, kind):
    with pytest.raises(CallbackError, match=f"Poll returned {kind}: pass an ordinary"):
        check_answer("Poll", function())


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"scheduler": {"create_scheduler": coroutine}}, "SchedulerConfig.create_scheduler"),
        ({"params": {"on_progress": Object().method}}, "OptionalParams.on_progress"),
        (
            {"params": {"logits_post_processor_batched": Object()}},
            "OptionalParams.logits_post_processor_batched",
        ),
    ],
)
def test_so_are_functions_of_options(given, name):
    with pytest.raises(ConfigError, match=f"{name} .*is a coroutine function"):
        manager(RecordingCallbacks(), **given)


def test_so_are_those_that_ready_made_callbacks_wrap():
    for wrap in (broadcast, functools.partial(broadcast, None), fan_out,
                 functools.partial(fan_out, print)):  # fmt: skip
        with pytest.raises(ConfigError, match="coroutine function"):
            wrap(coroutine)


def test_ordinary_ones_are_not():
    wrapper = functools.wraps(coroutine)(lambda: None)  # which may run it to its end
    for function in (print, int, RecordingCallbacks().submit, MagicMock(), [].append, wrapper,
                     functools.partial(print, 1)):  # fmt: skip
        assert kind_of_deferred(function) == ""
    for answer in (None, 3, MagicMock(), [], "x"):
        check_answer("it", answer)


def request(request_id, **more):
    return InferenceRequest.from_tokens(request_id, [1, 2], 3, **more)


def test_a_coroutine_that_is_returned_counts_as_an_error_of_that_callback():
    host = RecordingCallbacks()
    given = [
        [request(1), request(2, is_streaming=True)],
        coroutine(),
        asyncio.Future(loop=MagicMock()),
    ]
    polls, stats = [coroutine(), {4}], [coroutine(), None]
    answers = iter(given)
    responses = []

    def send(request_id, tensors, is_final, error):
        responses.append((request_id, is_final, error))
        return coroutine()

    with manager(
        host,
        get_inference_requests_cb=lambda room: next(answers, []),
        send_response_cb=send,
        poll_stop_signal_cb=lambda: polls.pop(0) if polls else (),
        return_batch_manager_stats_cb=lambda record: stats.pop(0) if stats else None,
    ) as served:
        assert served.wait_idle(20)
        counted = {name: one.errors for name, one in served.health().callbacks.items()}
    assert counted["GetInferenceRequests"] == 2
    assert counted["PollStopSignal"] == counted["ReturnBatchManagerStats"] == 1
    assert counted["SendResponse"] == len(responses) > 2
    finals = [one for one in responses if one[1]]
    assert [one[0] for one in sorted(finals)] == [1, 2]  # each has one, delivered or not
    ((_, _, error),) = [one for one in finals if one[2]]
    assert error.startswith(
        "CallbackError: SendResponse returned a coroutine: pass an ordinary function"
    )


@pytest.mark.parametrize("kind", ["function", "batch", "items", "returned", "prepare"])
def test_a_processor_that_would_have_to_be_awaited_ends_its_request(kind):
    class Batch:
        process_batch = staticmethod(lambda *arguments: coroutine())

    class Items:
        process_batch = staticmethod(lambda ids, *arguments: [coroutine() for _ in ids])

    class Prepares:
        prepare = coroutine

        def __call__(self, *arguments): ...

    processor = {
        "function": coroutine,
        "batch": Batch(),
        "items": Items(),
        "returned": lambda *arguments: coroutine(),
        "prepare": Prepares(),
    }[kind]
    host = RecordingCallbacks([request(1, logits_post_processor=processor), request(2)])
    with manager(host) as served:
        assert served.wait_idle(20)
    assert "coroutine" in host.final(1).error and not host.final(2).error
    assert host.final(1).error.startswith(
        "InvalidRequestError" if kind == "function" else "CallbackError"
    )


def test_a_watch_ends_if_its_callback_would_have_to_be_awaited(caplog):
    host = RecordingCallbacks([])
    with manager(host) as served:
        with pytest.raises(ConfigError, match="see = .* is a coroutine function"):
            served.watch(coroutine)
        seen = []

        def see(event):
            seen.append(event)
            return coroutine() if len(seen) == 2 else None

        served.watch(see)
        host.submit(request(1))
        served.notify()
        host.final(1)
    assert len(seen) == 2 and "gets no more events of the loop" in caplog.text


def test_progress_that_would_have_to_be_awaited_raises(tmp_path):

    params = checked_optional_params(OptionalParams(on_progress=lambda *a: coroutine()))
    with pytest.raises(CallbackError, match="on_progress returned a coroutine"):
        params.on_progress("weights", 1, 2)


def test_an_observer_that_would_have_to_be_awaited_is_reported(caplog):
    seen = []
    both = fan_out(seen.append, lambda record: coroutine())
    both("x")
    assert seen == ["x"] and "returned a coroutine" in caplog.text


def test_the_contract_checker_reports_it():
    host = RecordingCallbacks()
    checker = ContractChecker(
        lambda room: coroutine(),
        lambda *response: coroutine(),
        lambda: coroutine(),
    )
    for call in (
        lambda: list(checker.get_inference_requests(1)),
        lambda: checker.send_response(1, [], True, "late"),
        checker.poll_stop_signal,
    ):
        with suppress(CallbackError):
            call()
            raise AssertionError("the manager must learn of it")
    with pytest.raises(ContractViolation) as raised:
        checker.check()
    for name in ("Get", "SendResponse", "Poll"):
        assert f"{name} returned a coroutine" in str(raised.value)
    assert host.responses == []

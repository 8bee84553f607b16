"""A manager whose last reference goes away: it warns, answers its requests and ends its threads."""

import atexit
import copy
import gc
import os
import pickle
import threading
import time
import warnings
import weakref

import pytest
from left_threads import no_thread_is_left

from gptmanager import GptManager, InferenceRequest, ModelType, OptionalParams
from gptmanager.bindings import GptManager as BoundManager
from gptmanager.callbacks import RequestQueue
from gptmanager.errors import ConfigError, ManagerDeadError
from gptmanager.testing import RecordingCallbacks, ScriptedModel

TIMEOUT = 20


def slowly(history):
    time.sleep(0.002)
    return 7


def start(**more):
    keywords = {**RecordingCallbacks().keywords(), **more}
    params = keywords.pop("params", OptionalParams(max_batch_size=4, max_seq_len=2000))
    return GptManager(
        ScriptedModel(slowly, vocab_size=20),
        ModelType.INFLIGHT_FUSED_BATCHING,
        optional_params=params,
        **keywords,
    )


@pytest.fixture(autouse=True)
def ended_threads():
    with no_thread_is_left():
        yield


def test_it_warns_and_answers_what_runs():
    host = RecordingCallbacks([InferenceRequest.from_tokens(1, [1], 1900)])
    manager = start(**host.keywords())
    while not host.statistics:
        manager.wait_idle(0.001)
    forgotten = weakref.ref(manager)
    with pytest.warns(ResourceWarning, match=r"unclosed <gptmanager.*GptManager.*shutdown\(\)"):
        del manager
    assert forgotten() is None
    assert host.final(1, TIMEOUT).error.startswith("ManagerDeadError: the manager was shut down")


def test_an_attached_queue_does_not_keep_it():
    queue = RequestQueue()
    manager = start(
        get_inference_requests_cb=queue.get_inference_requests,
        send_response_cb=queue.send_response,
        poll_stop_signal_cb=queue.poll_stop_signal,
    )
    queue.attach(manager)
    generation = queue.submit([1], 1900)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del manager
        with pytest.raises(ManagerDeadError):
            generation.result(TIMEOUT)
        with pytest.raises(ManagerDeadError):
            while True:  # until the queue knows, too
                queue.submit([1], 1).result(TIMEOUT)
    assert [one.category for one in caught] == [ResourceWarning]


def test_one_that_has_ended_or_never_began_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        manager = start()
        manager.shutdown()
        del manager
        with start():
            pass
        with pytest.raises(ConfigError):
            start(params=OptionalParams(max_batch_size=0))
        with pytest.raises(ConfigError):
            GptManager("/nowhere", ModelType.V1, **RecordingCallbacks().keywords())
        gc.collect()


def test_one_that_has_ended_leaves_nothing_for_the_end_of_the_interpreter(monkeypatch):
    left = []

    def unregister(function):
        left[:] = [one for one in left if one != function]

    monkeypatch.setattr(atexit, "register", left.append)
    monkeypatch.setattr(atexit, "unregister", unregister)
    start().shutdown()
    with pytest.raises(ConfigError):
        GptManager("/nowhere", ModelType.V1, **RecordingCallbacks().keywords())
    assert not left
    with start():
        assert len(left) == 1
    assert not left


def test_the_end_of_the_interpreter_waits_for_the_thread_of_a_dropped_one(monkeypatch):
    left, wakes = [], threading.Event()

    def get(room):
        wakes.wait(TIMEOUT)
        return ()

    monkeypatch.setattr(atexit, "register", left.append)
    manager = start(get_inference_requests_cb=get)
    thread = manager._thread
    with pytest.warns(ResourceWarning):
        del manager
    threading.Timer(0.05, wakes.set).start()
    (at_exit,) = left
    at_exit()
    assert not thread.is_alive()
    at_exit()  # for one that has ended, it does nothing


def test_one_that_its_callbacks_refer_to_lives_until_shutdown():
    host = RecordingCallbacks()
    made = []
    keywords = host.keywords() | {"get_inference_requests_cb": lambda room: made and () or ()}
    made.append(start(**keywords))
    kept = weakref.ref(made[0])
    gc.collect()
    assert kept().health().alive
    kept().shutdown()


def test_the_last_reference_may_go_away_in_a_callback():
    made, gone = [], threading.Event()

    def get(room):
        if made:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)
                made.clear()
            gone.set()
        return ()

    made.append(start(get_inference_requests_cb=get))
    assert gone.wait(TIMEOUT)


def test_one_of_the_bindings_is_forgotten_as_well():
    host = RecordingCallbacks()
    with pytest.warns(ResourceWarning, match="unclosed"):
        manager = BoundManager(
            ScriptedModel(slowly, vocab_size=20),
            ModelType.INFLIGHT_FUSED_BATCHING,
            host.get_inference_requests,
            host.send_response,
        )
        del manager
        gc.collect()


def test_a_fork_that_forgets_it_leaves_it_alone():
    with start() as manager:
        inherited = manager
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns of threads
            child = os.fork()
        if not child:
            warnings.simplefilter("error")
            manager.__del__()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert inherited.health().alive and inherited.audit().ok


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, pickle.dumps])
def test_it_is_not_copied(clone):
    with start() as manager:
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            clone(manager)
        assert manager.health().alive

"""The library's logger: handlers that fail stop nothing, and Ctrl-C gets through."""

import logging

import pytest

from gptmanager import GptManager, InferenceRequest, ModelType
from gptmanager.lifecycle.log import SteadyLogger
from gptmanager.testing import RecordingCallbacks, ScriptedModel


class Fails(logging.Handler):
    """Raises `error` for each record."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def emit(self, record):
        raise self.error


@pytest.fixture
def add_handler():
    log, added = logging.getLogger("gptmanager"), []

    def add(handler):
        added.append(handler)
        log.addHandler(handler)

    yield add
    for handler in added:
        log.removeHandler(handler)


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_a_handler_that_raises_does_not_end_the_loop(add_handler, error):
    class Host(RecordingCallbacks):
        def send_response(self, *response):
            super().send_response(*response)
            raise ValueError("logged")

    host = Host()
    model = ScriptedModel(lambda history: 1, vocab_size=4)
    add_handler(Fails(error()))
    with GptManager(model, ModelType.INFLIGHT_FUSED_BATCHING, **host.keywords()) as manager:
        for request_id in (1, 2):
            host.submit(InferenceRequest.from_tokens(request_id, [1], 3))
            assert manager.wait_idle(20)
            assert not host.final(request_id).error


def test_an_interrupt_of_the_main_thread_gets_through():
    log = logging.Logger("own")
    log.addHandler(Fails(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        SteadyLogger(log).warning("text")


def test_a_record_names_the_line_that_logged_it(caplog):
    SteadyLogger(logging.getLogger("own")).warning("text")
    assert [record.filename for record in caplog.records] == ["test_log.py"]

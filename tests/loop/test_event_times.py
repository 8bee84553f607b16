"""The log of a run stamps each event with the time at which it happened, under a clock of its own.

The reader looks at the news now and then; here it is late by many seconds.
"""

from __future__ import annotations

import io
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from gptmanager import FinishReason
from gptmanager.callbacks import RequestQueue
from gptmanager.commands.run.progress_display import ProgressDisplay
from gptmanager.commands.run.requests_file import read_requests
from gptmanager.commands.run.results_file import Results
from gptmanager.commands.run.watch import Recorder, Watch, summary
from gptmanager.errors import InvalidRequestError, ManagerDeadError
from gptmanager.terminal.redrawn_lines import RedrawnLines

LINES = [
    b'{"input_ids": [5], "streaming": true}',
    b'{"input_ids": [6], "streaming": true}',
    b'{"neither": "a prompt nor tokens"}',
]


class Run:
    """A run whose loop is this test; the clock starts at 1000 s."""

    def __init__(self, monkeypatch, lines):
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.lines = [*lines, *read_requests(LINES, None, defaults={"request_output_len": 4})]
        self.pipe = io.StringIO()
        self.queue = RequestQueue()
        self.recorder = Recorder(self.queue, is_watched=True)
        view = ProgressDisplay(RedrawnLines(self.pipe))
        self.watch = Watch(self.recorder, Results(self.lines, None, None), view)

    def at(self, seconds):
        self.now = 1000.0 + seconds
        return self

    def join(self):
        self.recorder.get_inference_requests(1)

    def send(self, request_id, tokens, *, is_final=False, error=""):
        tensors = [("output_ids", np.array([[tokens]])), ("sequence_length", np.array([[1]]))]
        if is_final:
            tensors.append(("finish_reasons", np.array([[FinishReason.END_ID]])))
        self.queue.send_response(request_id, tensors, is_final, error)
        self.recorder.see_response(request_id, tensors, is_final, error)

    def told(self, monkeypatch, loop):
        """The log; `loop` is what happens between two looks of the reader."""
        looks = iter(loop)
        latch = SimpleNamespace(wait=lambda seconds: bool(next(looks)), set=lambda: None)
        monkeypatch.setattr(self.watch, "_all_ended", latch)
        self.watch.follow(self.queue)
        return self.pipe.getvalue().splitlines()


def test_events_carry_their_own_times(monkeypatch):
    run = Run(monkeypatch, [])

    def loop():
        run.at(0.25).join()
        run.at(1.5).send(1, [7])
        run.at(2.0).join()
        run.at(3.25).send(1, [8], is_final=True)
        run.at(9.0)  # the reader was busy, or stopped
        yield
        run.at(9.25).send(2, [], is_final=True, error="InvalidRequestError: no")
        run.at(70.0)
        yield

    assert run.told(monkeypatch, loop()) == [
        "    0.00 s  request 3 leaves after 0 tokens, ERROR: InvalidRequestError: line 3: unknown "
        "field 'neither'",
        "    0.25 s  request 1 joins:  5",
        "    2.00 s  request 2 joins:  6",
        "    3.25 s  request 1 leaves after 2 tokens, END_ID:  7 8",
        "    9.25 s  request 2 leaves after 0 tokens, ERROR: InvalidRequestError: no",
        "   70.00 s  3/3 requests, 0 tokens/s, batch 0, KV cache 0%",
    ]


def test_a_line_that_another_thread_refuses_carries_its_time(monkeypatch):
    """It is told among what happened meanwhile, in the order of the times."""
    (wrong,) = read_requests([b"{}"], None, defaults={"request_output_len": 4})
    slow = replace(wrong, number=9, request_id=77, error=None, build=lambda: None)
    run = Run(monkeypatch, [slow])
    built = iter([True])

    class Built:
        def empty(self):
            return not next(built, False)

        def get(self):
            return 1002.5, replace(slow, build=None, error=InvalidRequestError("too long"))

    monkeypatch.setattr("gptmanager.commands.run.watch.build_in_thread", lambda lines: Built())

    def loop():
        run.at(2.0).join()
        run.at(3.0).join()
        run.at(9.0)
        yield
        run.at(9.5).queue.close(ManagerDeadError("gone"))
        run.at(9.9)
        yield

    assert [line[:28] for line in run.told(monkeypatch, loop())[1:]] == [
        "    2.00 s  request 1 joins:",
        "    2.50 s  request 77 leave",
        "    3.00 s  request 2 joins:",
        "    9.50 s  request 1 leaves",
        "    9.50 s  request 2 leaves",
    ]


@pytest.mark.parametrize("seconds", [0.0, 5.0])
def test_a_request_that_comes_too_late_is_refused_at_its_submission(monkeypatch, seconds):
    run = Run(monkeypatch, [])
    run.queue.close(ManagerDeadError("gone"))
    run.at(seconds)
    told = run.told(monkeypatch, iter(()))
    assert [float(line.split(" s ")[0]) for line in told] == [seconds] * 3
    assert summary([{"error": "gone"}] * 3, run.recorder)["seconds"] == 0.0

"""Ctrl-C at any moment of `gptmanager run`: the loop can still report, and the manager ends.

No result of a request that has ended is lost.
"""

import functools
import io
import json
import time
from contextlib import suppress
from itertools import count

from fuzz import STRIDE
from interrupting import TIMEOUT_S, handled, in_a_thread
from loop_driver import next_token
from shorthand import params

from gptmanager import GptManager, ManagerState, ModelType
from gptmanager.callbacks import RequestQueue, fan_out
from gptmanager.commands.run import watch
from gptmanager.commands.run.progress_display import ProgressDisplay
from gptmanager.commands.run.requests_file import read_requests
from gptmanager.commands.run.results_file import Results
from gptmanager.terminal.redrawn_lines import RedrawnLines
from gptmanager.testing import ScriptedModel


def slowly(history):
    time.sleep(0.001)  # so that the run waits several times
    return next_token(history)


def test_an_interrupt_of_a_run_leaves_no_lock_that_the_loop_needs(monkeypatch):
    monkeypatch.setattr(watch, "_REFRESH_S", 0.0003)
    queue = RequestQueue()
    recorder = watch.Recorder(queue, is_watched=True)
    manager = GptManager(
        ScriptedModel(slowly, vocab_size=100, max_position_embeddings=128),
        ModelType.INFLIGHT_FUSED_BATCHING,
        get_inference_requests_cb=recorder.get_inference_requests,
        send_response_cb=fan_out(queue.send_response, recorder.see_response),
        optional_params=params(),
    )
    queue.attach(manager)
    for point in count(step=STRIDE):
        # Given the run of one request, When an interrupt comes at this point
        text = b'{"request_id": %d, "input_ids": [5]}' % point
        lines = [*read_requests([text], None, defaults={"request_output_len": 2})]
        recorder.news.clear()
        view = ProgressDisplay(RedrawnLines(io.StringIO()))
        file, ended = io.BytesIO(), []
        results = Results(lines, None, file)
        run = watch.Watch(recorder, results, view)

        def interrupt(run=run, ended=ended):
            ended += [it for it in run._generations.values() if it[1].done()]
            raise KeyboardInterrupt

        def follow(run=run, point=point, interrupt=interrupt):
            with suppress(KeyboardInterrupt):
                return handled(functools.partial(run.follow, queue), point, interrupt)
            return True

        is_reached = in_a_thread(follow)

        # Then the loop reports the end of the request, and finds the queue empty
        assert in_a_thread(manager.wait_idle, TIMEOUT_S), point
        assert all(generation.done() for _, generation in run._generations.values()), point
        # And the result of a request that had ended is written, once
        results.close()
        written = file.getvalue().splitlines()
        assert [json.loads(it)["line"] for it in written] == [*results.by_number], point
        assert not ended or written, point
        if not is_reached:
            break
    in_a_thread(manager.shutdown)
    in_a_thread(queue.close)
    assert manager.state is ManagerState.STOPPED
    assert point > 100

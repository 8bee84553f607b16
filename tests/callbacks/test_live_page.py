"""The live page: what it is told of a run, how it is served, and what it costs nobody."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import threading
import time
from queue import Full
from urllib.parse import urlsplit

import pytest
from running_server import wait_for

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ManagerState,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.callbacks import LivePage
from gptmanager.callbacks.live_page import feed as live_feed
from gptmanager.callbacks.live_page import page_server
from gptmanager.callbacks.live_page import tap as live_tap
from gptmanager.callbacks.live_page.rows import LiveRows, ranges
from gptmanager.callbacks.live_page.tap import LiveTap
from gptmanager.manager import stall_watch
from gptmanager.manager.watching import Arrival, Beginning, Ending, Ran
from gptmanager.recorder.taps import HostTap
from gptmanager.step import Row
from gptmanager.testing import RecordingCallbacks, ScriptedModel

FUSED = ModelType.INFLIGHT_FUSED_BATCHING


def managed(host, step_s=0.0, **options):
    def next_token(history):
        time.sleep(step_s)
        return 1

    params = OptionalParams(**{"black_box_iterations": 0, **options})
    policy = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
    model = ScriptedModel(next_token, vocab_size=4)
    return GptManager(model, FUSED, 1, policy, **host.keywords(), optional_params=params)


def request(request_id, prompt_len=4, max_new_tokens=6, **by_name):
    return InferenceRequest.from_tokens(request_id, [1] * prompt_len, max_new_tokens, **by_name)


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(live_feed, "TICK_S", 0.01)
    monkeypatch.setattr(live_feed, "_STATUS_S", 0.02)
    monkeypatch.setattr(live_feed, "_WHY_S", 0.02)


def parsed(data):
    """[(is it a snapshot, content)]"""
    frames = []
    for block in data.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        frames.append((fields.get("event") == "snapshot", json.loads(fields["data"])))
    return frames


class Browser:
    """What the page's script keeps: the snapshot, with all that has changed since."""

    def __init__(self, viewer):
        self.viewer = viewer
        self.rows, self.told, self.num_snapshots = {}, {}, 0

    def look(self):
        for is_snapshot, content in parsed(self.viewer.take()):
            if is_snapshot:
                self.num_snapshots += 1
                self.rows = {row[0]: row for row in content["rows"]}
            for row in content.get("n", ()):
                self.rows[row[0]] = row
            for number, *span in content.get("c", ()):
                spans = self.rows[number][9]
                if spans[-1][1] == span[1]:
                    spans.pop()
                spans.append(span)
            for number, *end in content.get("e", ()):
                self.rows[number][10] = end
            for tokens, numbers in content.get("g", ()):
                for number in unranged(numbers):
                    self.rows[number][4] += tokens
            self.told.update(content)

    def wait_for(self, condition, timeout=20.0):
        deadline = time.monotonic() + timeout
        while True:
            self.look()
            value = condition(self)
            if value:
                return value
            assert time.monotonic() < deadline, (self.rows, self.told)
            time.sleep(0.005)

    def row(self, request_id):
        return next((row for row in self.rows.values() if row[1] == str(request_id)), None)


def unranged(text):
    for part in text.split(","):
        low, _, high = part.partition("-")
        yield from range(int(low), int(high or low) + 1)


def test_ranges():
    assert ranges([3, 4, 5, 9, 11, 12]) == "3-5,9,11-12"
    assert list(unranged("3-5,9,11-12")) == [3, 4, 5, 9, 11, 12]
    assert ranges([]) == ""


# Rows of a run, event by event ----------------------------------------------------------------


def ran(iteration, context=(), generation=(), paused=(), batch=0):
    """`context`: (id, position, tokens); `generation`: (id, position)."""
    return Ran(
        0.0,
        iteration,
        batch,
        tuple(Row(i, 0, 0, position, tokens, True) for i, position, tokens in context),
        tuple(Row(i, 0, 0, position, 1, True) for i, position in generation),
        paused,
    )


class Fed:
    """The rows of what a tap has seen."""

    def __init__(self, *events):
        self.tap, self.rows = LiveTap(), LiveRows()
        self.feed(Beginning(0.0, 5, 8, 64, 100, 16), *events)

    def feed(self, *events):
        for event in events:
            self.tap.see(event)
        for change in self.tap.take():
            self.rows.feed(change)

    def progress(self):
        return self.rows.take_progress(self.tap.ran.values())


def arrival(request_id, **more):
    return Arrival(0.0, request_id, 4, 6, 0.5, 1, **more)


def spans(fed):
    return {row[1]: row[9] for row in fed.rows.snapshot()}


def test_a_request_waits_runs_is_paused_and_ends():
    fed = Fed(
        arrival(7), arrival(8),
        ran(5, context=[(7, 0, 3)]),
        ran(6, context=[(7, 3, 1), (8, 0, 4)]),
        ran(7, generation=[(7, 4), (8, 4)]),
        ran(8, generation=[(7, 5), (8, 5)]),
        ran(9, generation=[(7, 6)], paused=(8,)),
        Ending(7, "LENGTH", (0.1, 0.2, 0.3, 0.0, 2.0, 4.0, 3.0)),
        ran(10, context=[(8, 0, 6)]),
    )  # fmt: skip
    assert spans(fed) == {
        "7": [["c", 5, 3], ["c", 6, 1], ["g", 7, 0]],
        "8": [["w", 5, 0], ["c", 6, 4], ["g", 7, 0], ["p", 9, 0], ["c", 10, 6]],
    }
    assert [row[7] for row in fed.rows.snapshot()] == [0, 1], "pauses"
    assert fed.rows.snapshot()[0][10] == [10, "LENGTH", 3, 2, 0.1, 0.2, 0.3]
    assert (fed.tap.column, fed.rows.num_active, fed.rows.outcomes["LENGTH"]) == (11, 1, 1)
    assert +fed.rows.kinds == {"c": 1}


def test_a_refused_duplicate_does_not_end_the_request_with_its_id():
    fed = Fed(arrival(7), ran(5, context=[(7, 0, 4)]), Ending(7, "DuplicateRequestIdError"))
    assert (fed.rows.num_active, fed.rows.outcomes.total()) == (1, 1)
    fed.feed(ran(6, generation=[(7, 4)]))
    assert spans(fed) == {"7": [["c", 5, 4], ["g", 6, 0]]}


def test_one_that_holds_memory_and_does_not_run_is_held():
    fed = Fed(
        arrival(7), arrival(8),
        ran(5, context=[(7, 0, 4), (8, 0, 4)]),
        ran(6, generation=[(7, 4)]),
        ran(7, generation=[(7, 5), (8, 4)]),
    )  # fmt: skip
    assert spans(fed)["8"] == [["c", 5, 4], ["h", 6, 0], ["g", 7, 0]]


def test_the_other_micro_batch_is_not_held():
    fed = Fed(
        arrival(7), arrival(8),
        ran(5, context=[(7, 0, 4)]),
        ran(6, context=[(8, 0, 4)], batch=1),
        ran(7, generation=[(7, 4)]),
        ran(8, generation=[(8, 4)], batch=1),
        ran(9, generation=[(7, 5)]),
    )  # fmt: skip
    assert spans(fed) == {
        "7": [["c", 5, 4], ["g", 7, 0]],
        "8": [["w", 5, 0], ["c", 6, 4], ["g", 8, 0]],
    }


def test_one_that_goes_on_in_the_other_micro_batch_is_not_held():
    fed = Fed(
        arrival(7), arrival(8),
        ran(5, context=[(7, 0, 4)]),
        ran(6, generation=[(7, 4)], batch=1),
        ran(7, context=[(8, 0, 4)]),
    )  # fmt: skip
    assert spans(fed)["7"] == [["c", 5, 4], ["g", 6, 0]]


def test_requests_from_before_the_watch():
    fed = Fed(
        arrival(7, holds_memory=True, num_generated=2),
        arrival(8, pause_count=1, num_generated=1),
        arrival(9),
        ran(5, generation=[(7, 5)]),
    )
    assert spans(fed) == {"7": [["g", 5, 0]], "8": [["p", 5, 0]], "9": [["w", 5, 0]]}
    assert fed.progress() == [[1, "0"]] and fed.progress() == []
    assert fed.rows.snapshot()[0][4] == 3


def test_changes_are_small_and_bounded():
    fed = Fed(*[arrival(i) for i in range(256)])
    fed.feed(ran(5, context=[(i, 0, 4) for i in range(256)]))
    assert len(fed.rows.take_changes()["n"]) == 256  # all of them are active
    everyone = [(i, 4) for i in range(256)]
    fed.feed(ran(6, generation=everyone))
    assert len(fed.rows.take_changes()["c"]) == 256
    for iteration in range(7, 100):
        fed.feed(ran(iteration, generation=[(i, iteration - 2) for i in range(256)]))
    assert fed.rows.take_changes() == {}
    assert fed.progress() == [[95, "0-255"]]
    for i in range(1000, 2000):  # each is gone before anybody could see it
        fed.feed(arrival(i))
        fed.feed(Ending(i, "LENGTH"))
    assert len(fed.rows.take_changes()["n"]) == 64
    assert len(fed.rows.snapshot()) == 256 + 256
    for iteration in range(100, 2100, 2):
        fed.feed(ran(iteration, generation=everyone[1:]))
        fed.feed(ran(iteration + 1, generation=everyone))
    assert len(fed.rows.snapshot()[-256][9]) <= 256


# A page that follows a manager ----------------------------------------------------------------


def test_a_viewer_sees_the_schedule_of_a_manager():
    host = RecordingCallbacks()
    with managed(host, 0.0002, max_batch_size=2) as manager, LivePage() as page:
        page.attach(manager)
        with page.viewer() as viewer:
            browser = Browser(viewer)
            browser.wait_for(lambda it: "limits" in it.told)
            assert browser.told["limits"][0] == 2
            host.submit(request(2**64 - 1), request(8), request(9, 5, 7))
            ended = browser.wait_for(lambda it: it.row(9) and it.row(9)[10] and it.row(9))
            browser.wait_for(lambda it: it.told.get("ended") == {"LENGTH": 3})
            browser.wait_for(lambda it: it.told["latency"][0] == 3)  # three requests
            assert all(half > 0 for half, _ in browser.told["latency"][1:])
    assert ended[2:4] == [5, 7] and ended[10][1:3] == ["LENGTH", 7]
    kinds = [span[0] for span in browser.row(9)[9]]
    assert kinds[-2:] == ["c", "g"] and set(kinds[:-2]) <= {"w"}
    assert browser.row(2**64 - 1)[10][2] == 6
    assert set(browser.told["calls"]) >= {"GetInferenceRequests", "SendResponse"}
    browser_rows, rows = browser.rows, {row[0]: row for row in page._feed._rows.snapshot()}
    assert browser_rows == rows


def test_why_requests_wait():
    host = RecordingCallbacks()
    with managed(host, 0.002, max_batch_size=1, max_active_requests=None) as manager:
        with LivePage(num_outside=lambda: 17) as page, page.viewer() as viewer:
            page.attach(manager)
            browser = Browser(viewer)
            host.submit(*[request(i, 4, 1000) for i in range(5)])
            browser.wait_for(lambda it: it.told.get("why"))
            ((reason, text, numbers),) = browser.told["why"]
            assert (reason, len(list(unranged(numbers)))) == ("batch_full", 4)
            assert text == "waits for room in the batch: 1 running request, at most 1 at once"
            assert browser.told["outside"] == 17
        manager.shutdown(drain=False)


@pytest.mark.parametrize("broken", ["host", "page"])
def test_an_error_of_the_page_itself_is_shown_and_the_page_goes_on(broken, monkeypatch):
    host, asked, calls, always = RecordingCallbacks(), [], [], []

    def num_outside():
        asked.append(None)
        if broken == "host":
            raise SystemExit("no count")
        return 17

    def health(of, original=GptManager.health):
        calls.append(None)
        if always or (broken == "page" and len(calls) % 3 == 0):
            raise OSError(" ".join(["no count", *always]))
        return original(of)

    monkeypatch.setattr(GptManager, "health", health)
    with managed(host, 0.002) as manager:
        with LivePage(num_outside=num_outside) as page, page.viewer() as viewer:
            page.attach(manager)
            browser = Browser(viewer)
            browser.wait_for(lambda it: it.told.get("error"))
            name = "SystemExit" if broken == "host" else "OSError"
            assert browser.told["error"] == f"the live page itself: {name}: no count"
            host.submit(request(0, 4, 5))
            browser.wait_for(lambda it: it.told.get("ended") == {"LENGTH": 1})
            assert len(asked) < 1000 and browser.told["error"]
            always.append("at all")  # and whoever looks later sees it, too
            browser.wait_for(lambda it: "no count at all" in it.told["error"])
            with page.viewer() as later:
                ((is_snapshot, content), *_) = parsed(later.take())
                assert is_snapshot and "no count at all" in content["error"]


def test_a_pause_is_seen_and_tokens_are_counted():
    host = RecordingCallbacks()
    cache = KvCacheConfig(max_tokens=64, tokens_per_block=4)
    with managed(host, 0.0005, max_batch_size=4, kv_cache_config=cache) as manager:
        with LivePage() as page, page.viewer() as viewer:
            page.attach(manager)
            browser = Browser(viewer)
            browser.wait_for(lambda it: "limits" in it.told)
            host.submit(*[request(i, 8, 40) for i in range(4)])
            browser.wait_for(lambda it: it.told.get("ended") == {"LENGTH": 4})
            assert any(span[0] == "p" for row in browser.rows.values() for span in row[9])
            assert {row[10][2] for row in browser.rows.values()} == {40}
            browser.wait_for(lambda it: it.told["p"][9] == 160)


def test_a_second_look_begins_with_a_snapshot():
    host = RecordingCallbacks()
    with managed(host) as manager, LivePage() as page:
        page.attach(manager)
        with page.viewer() as viewer:
            Browser(viewer).wait_for(lambda it: "limits" in it.told)
        host.submit(request(7))
        assert manager.wait_idle(20)
        with page.viewer() as viewer:
            browser = Browser(viewer)
            browser.wait_for(lambda it: it.row(7) and it.row(7)[10])
            assert browser.num_snapshots == 1


def test_a_slow_viewer_begins_anew(monkeypatch):
    monkeypatch.setattr(live_feed, "_MAX_FRAMES", 6)
    host = RecordingCallbacks()
    with managed(host) as manager, LivePage() as page:
        page.attach(manager)
        with page.viewer() as slow, page.viewer() as quick:
            Browser(slow).wait_for(lambda it: "limits" in it.told)
            browser = Browser(quick)
            seen = page._feed._num_frames
            host.submit(*[request(i, 4, 20) for i in range(40)])
            most = seen + live_feed._MAX_FRAMES
            browser.wait_for(lambda it: len(it.rows) == 40 and page._feed._num_frames > most)
            frames = parsed(slow.take())
            assert [is_snapshot for is_snapshot, _ in frames] == [True]
            assert len(frames[0][1]["rows"]) == 40


def test_events_that_were_lost_are_noticed(monkeypatch):
    with monkeypatch.context() as context:
        context.setattr(live_tap, "_MAX_EVENTS", 8)
        fed = Fed()
    for i in range(20):
        fed.tap.see(arrival(i))
    assert fed.tap.take() is None

    host, take, lost = RecordingCallbacks(), LiveTap.take, []
    monkeypatch.setattr(LiveTap, "take", lambda tap: lost.pop() if lost else take(tap))
    with managed(host, 0.005) as manager, LivePage() as page, page.viewer() as viewer:
        page.attach(manager)
        browser = Browser(viewer)
        host.submit(request(1, 4, 20), request(2, 4, 1900))
        browser.wait_for(lambda it: it.row(1) and it.row(1)[10] and it.row(2))
        seen = browser.num_snapshots
        lost.append(None)
        browser.wait_for(lambda it: it.num_snapshots > seen and it.row(2))
        assert browser.row(1) is None and browser.row(2)[9][0][0] in "hg"
        manager.shutdown(drain=False)
        browser.wait_for(lambda it: it.row(2)[10])


def test_a_page_without_viewers_does_nothing(monkeypatch):
    monkeypatch.setattr(live_feed, "GRACE_S", 0.02)
    host = RecordingCallbacks()
    with managed(host) as manager, LivePage() as page:
        page.attach(manager)
        loop = manager._worker.loop
        threads = threading.active_count()
        assert not isinstance(loop.table.host, HostTap)
        for _ in range(2):
            with page.viewer() as viewer:
                Browser(viewer).wait_for(lambda it: isinstance(loop.table.host, HostTap))
            deadline = time.monotonic() + 20
            while isinstance(loop.table.host, HostTap) or threading.active_count() > threads:
                assert time.monotonic() < deadline
                time.sleep(0.005)


def test_a_watch_that_begins_after_its_timeout_ends_with_the_last_viewer(monkeypatch):
    monkeypatch.setattr(live_feed, "GRACE_S", 0.0)
    monkeypatch.setattr(live_tap, "_ANSWER_S", 0.01)
    begins, may_begin, see = threading.Event(), threading.Event(), LiveTap.see

    def slow(tap, event):
        if not begins.is_set():
            begins.set()
            may_begin.wait(20)
        see(tap, event)

    monkeypatch.setattr(LiveTap, "see", slow)
    with managed(RecordingCallbacks()) as manager, LivePage() as page:
        page.attach(manager)
        with page.viewer():
            assert begins.wait(20)
        wait_for(lambda: page._feed._thread is None)  # it has asked, and has given up
        may_begin.set()
        manager.audit()
        wait_for(lambda: not isinstance(manager._worker.loop.table.host, HostTap))


def test_a_manager_that_has_stopped_or_failed_says_so():
    host = RecordingCallbacks()
    with LivePage() as page, page.viewer() as viewer:
        with managed(host) as manager:
            page.attach(manager)
            browser = Browser(viewer)
            browser.wait_for(lambda it: it.told.get("state") == "running")
        browser.wait_for(lambda it: it.told["state"] == "stopped")
        with pytest.raises(ValueError, match="attached"):
            page.attach(manager)

    class Failing(RecordingCallbacks):
        def get_inference_requests(self, max_num_requests):
            raise RuntimeError("<img src=x onerror=alert(1)>")

    with LivePage() as page, page.viewer() as viewer:
        with managed(Failing(), max_get_failures=1) as manager:
            page.attach(manager)
            browser = Browser(viewer)
            browser.wait_for(lambda it: it.told.get("state") == ManagerState.FAILED.value)
            assert "onerror" in browser.told["error"]


def test_a_manager_that_hangs_says_so(monkeypatch):
    monkeypatch.setattr(stall_watch, "_STUCK_S", 0.02)
    gates = [threading.Event(), threading.Event()]
    waiting = iter(gates)

    def next_token(history):
        gate = next(waiting, None)
        if gate is not None:
            gate.wait(20)
        return 1

    host = RecordingCallbacks([request(1)])
    model = ScriptedModel(next_token, vocab_size=4)
    with GptManager(model, FUSED, **host.keywords()) as manager, LivePage() as page:
        page.attach(manager)
        with page.viewer() as viewer:
            browser = Browser(viewer)
            browser.wait_for(lambda it: it.told.get("hangs") == -1)  # no step has ended
            gates[0].set()
            browser.wait_for(lambda it: it.told["hangs"] > 0)  # the second one hangs
            gates[1].set()
            browser.wait_for(lambda it: it.told["hangs"] == 0)


def test_a_hang_is_shown_long_before_health_reports_it(monkeypatch):
    monkeypatch.setattr(live_feed, "_HANG_S", 0.05)
    gate, stepped = threading.Event(), threading.Event()

    def next_token(history):
        if len(history) == 6:
            stepped.set()
            gate.wait(20)
        return 1

    host = RecordingCallbacks()
    model = ScriptedModel(next_token, vocab_size=4)
    with GptManager(model, FUSED, **host.keywords()) as manager, LivePage() as page:
        page.attach(manager)
        with page.viewer() as viewer:
            browser = Browser(viewer)
            browser.wait_for(lambda it: it.told.get("state") == "running")
            assert browser.told["hangs"] == 0  # idle, however long
            host.submit(request(1))
            manager.notify()
            assert stepped.wait(20)
            browser.wait_for(lambda it: it.told["hangs"] > 0)
            assert manager.health().progressing
            gate.set()
            browser.wait_for(lambda it: it.told["hangs"] == 0)


def test_a_manager_that_drains_says_so():
    stepped, is_seen = threading.Event(), threading.Event()

    def next_token(history):
        stepped.set()
        while not manager._inbox.is_to_end:
            time.sleep(0.001)
        if manager.state is ManagerState.DRAINING:
            is_seen.wait(20)
        return 1

    host = RecordingCallbacks()
    model = ScriptedModel(next_token, vocab_size=4)
    with GptManager(model, FUSED, **host.keywords()) as manager, LivePage() as page:
        page.attach(manager)
        with page.viewer() as viewer:
            browser = Browser(viewer)
            browser.wait_for(lambda it: it.told.get("state") == "running")
            host.submit(request(1))
            assert stepped.wait(20)
            ending = threading.Thread(target=manager.shutdown)
            ending.start()
            browser.wait_for(lambda it: it.told["state"] == "draining")
            is_seen.set()
            ending.join()


def test_errors_of_requests_show_only_their_class():
    host = RecordingCallbacks()
    with managed(host) as manager, LivePage() as page, page.viewer() as viewer:
        page.attach(manager)
        browser = Browser(viewer)
        browser.wait_for(lambda it: "limits" in it.told)
        host.submit(request(1, 4, 0))
        browser.wait_for(lambda it: it.told.get("ended") == {"InvalidRequestError": 1})


def test_viewers_are_bounded():
    with LivePage(max_viewers=2) as page:
        first = page.viewer()
        page.viewer()
        assert page.is_full
        with pytest.raises(Full, match="max_viewers = 2"):
            page.viewer()
        first.leave()
        page.viewer()
    with pytest.raises(Full, match="closed"):
        page.viewer()
    with pytest.raises(ValueError, match="max_viewers = 0"):
        LivePage(max_viewers=0)


# Served ---------------------------------------------------------------------------------------


def test_a_page_that_gets_no_thread_has_no_viewer_and_may_try_again(monkeypatch):
    def fail(thread):
        raise RuntimeError("can't start new thread")

    with LivePage(max_viewers=1) as page:
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(live_feed, "start_thread", fail)
            page.viewer()
        page.viewer()
        assert page.is_full


def get(url, path, **headers):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


def test_it_is_served_without_an_extra():
    host = RecordingCallbacks([request(7)])
    with managed(host) as manager, LivePage(max_viewers=1) as page:
        page.attach(manager)
        url = page.serve()
        answer = get(url, "/")
        assert answer.status == 200 and answer.read() == page.html
        assert re.search(r"script-src 'sha256-[^']+';", answer.headers["Content-Security-Policy"])
        assert "unsafe" not in answer.headers["Content-Security-Policy"]
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        events = get(url, "/live/events?key=1")
        assert events.headers["Content-Type"] == "text/event-stream"
        assert events.fp.readline() == b"retry: 1000\n"
        assert get(url, "/live/events").status == 503
        assert get(url, "/etc/passwd").status == 404
        # a page that stays open does not keep the interpreter from ending
        assert {it.name: it.daemon for it in threading.enumerate()}["live-page-server"]
        for host_name in ("localhost", "127.0.0.1:1", "[::1]:80", "LOCALHOST:9"):
            assert get(url, "/", Host=host_name).status == 200
        for host_name in ("evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::1", ""):
            assert get(url, "/live/events", Host=host_name).status == 403
        with pytest.raises(ValueError, match="already"):
            page.serve()
        events.close()
    with pytest.raises(ConnectionRefusedError):
        get(url, "/")


def test_a_connection_beyond_the_limit_is_closed_at_once(monkeypatch):
    monkeypatch.setattr(page_server, "_MAX_OTHERS", 0)
    with LivePage(max_viewers=1) as page:
        address = urlsplit(page.serve())
        place = address.hostname, address.port
        with socket.create_connection(place, 20) as first:
            first.sendall(b"GET /live/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert first.recv(1) == b"H"
            with socket.create_connection(place, 20) as second:
                assert second.recv(1) == b""


def test_asyncio_gets_the_same_events():
    async def first_of(page):
        async for data in page.events():
            return parsed(data)

    with LivePage() as page:
        ((is_snapshot, content),) = asyncio.run(first_of(page))
        assert is_snapshot and content["rows"] == []


def test_the_page_loads_nothing_from_elsewhere():
    text = LivePage().html.decode()
    assert not re.findall(r"https?:|@import|url\(", text)
    assert "innerHTML" not in text and "insertAdjacentHTML" not in text and "eval(" not in text

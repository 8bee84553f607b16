"""`LiveFeed`: watches a manager while there are viewers, and makes server-sent events.

Five times a second, a separate thread makes one small event for all viewers from the changes that
the loop has reported. Half a minute after the last viewer has left, the thread ends, and the loop
reports nothing until the next viewer enters.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from math import inf, nan
from queue import Full
from time import monotonic
from typing import Any

import orjson

from gptmanager import REQUEST_METRICS, GptManager, ManagerState
from gptmanager.callbacks.live_page.rows import GENERATION, PAUSED, WAITING, LiveRows, ranges
from gptmanager.callbacks.live_page.tap import LiveTap
from gptmanager.errors import ManagerDeadError, response_text
from gptmanager.lifecycle.latch import Latch
from gptmanager.lifecycle.threads import start_thread
from gptmanager.manager.inspection import Explanation
from gptmanager.scheduler.wait_reasons import WaitReason

TICK_S = 0.2
GRACE_S = 30.0  # the loop is watched for this time after the last viewer has left
_STATUS_S = 1.0
_OWN_ERROR_S = 5.0  # an error of the page itself is shown for this time
_HANG_S = 1.0  # the page shows that the loop hangs if active requests get no step for this time
_WHY_S = 2.0  # time between two calls of `explain_waiting`
_ANSWER_S = 0.5  # timeout of `explain_waiting`, which the loop answers between two iterations
_LATENCY_S = 60.0
_MAX_LATENCIES = 1 << 13
_MAX_WAITS, _MAX_TEXT = 256, 400
_ENDED = (ManagerState.STOPPED, ManagerState.FAILED)
_MAX_FRAMES = 64  # a viewer that is further behind gets a new snapshot


_Reason = tuple[int, str, str]  # request id, the result of `_missing`, and a text


class Viewer:
    """One open page. Call `leave`, or end its `with` block, when the page is closed."""

    def __init__(self, feed: LiveFeed) -> None:
        self._feed = feed
        self._next = -1  # number of the next frame, or -1 if a snapshot is next

    def take(self) -> bytes:
        """Return the events since the last call, for a browser's EventSource; never wait."""
        data, self._next = self._feed.frames_from(self._next)
        return data

    def leave(self) -> None:
        self._feed.leave(self)

    def __enter__(self) -> Viewer:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


class LiveFeed:
    """The events of one manager for all viewers.

    `num_outside` returns how many requests wait in the application. If it is None, the number is
    unknown. `manager` is set once, before or after the first viewer enters.
    """

    def __init__(self, num_outside: Callable[[], int] | None, max_viewers: int) -> None:
        self.manager: GptManager | None = None
        self.is_closed = False
        self._num_outside = num_outside
        self._max_viewers = max_viewers
        self._lock = threading.Lock()  # guards the fields below
        self._viewers: set[Viewer] = set()
        self._left = 0.0  # when the last viewer left
        self._thread: threading.Thread | None = None
        self._ended = Latch()
        self._frames: deque[bytes] = deque(maxlen=_MAX_FRAMES)
        self._num_frames = 0  # number of all frames since the start, also of those dropped
        self._tap, self._rows = LiveTap(), LiveRows()
        self._picture = _Picture()

    @property
    def is_full(self) -> bool:
        return self.is_closed or len(self._viewers) >= self._max_viewers

    def enter(self) -> Viewer:
        """Return a new viewer; raise `queue.Full` if there are `max_viewers`, or after `close`."""
        with self._lock:
            if self.is_full:
                limit = f"as many viewers as max_viewers = {self._max_viewers} are connected"
                raise Full("the live page is closed" if self.is_closed else limit)
            if self._thread is None:
                self._thread = threading.Thread(target=self._follow, name="live-page", daemon=True)
                try:
                    start_thread(self._thread)
                except Exception:  # no further thread can be started
                    self._thread = None
                    raise
            viewer = Viewer(self)
            self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        with self._lock:
            self._viewers.discard(viewer)
            self._left = monotonic()

    def close(self) -> None:
        """Send no more events, and stop watching the loop."""
        with self._lock:
            self.is_closed, thread = True, self._thread
            self._ended.set()
        if thread is not None:
            thread.join()

    def frames_from(self, number: int) -> tuple[bytes, int]:
        """Return a viewer's frames from `number` on, and the `number` for its next call.

        A viewer that is new, or too far behind, gets a snapshot instead.
        """
        with self._lock:
            behind = self._num_frames - number
            if number >= 0 and behind <= len(self._frames):
                frames = [
                    self._frames[i] for i in range(len(self._frames) - behind, len(self._frames))
                ]
                return b"".join(frames), self._num_frames
            snapshot = {**self._picture.all, "rows": self._rows.snapshot()}
            snapshot["points"] = list(self._picture.points)
            if self._rows.beginning is not None:
                snapshot["limits"] = self._rows.beginning[2:]
            return _frame(self._num_frames, snapshot, b"event: snapshot\n"), self._num_frames

    # On the feed's thread --------------------------------------------------------------------

    def _follow(self) -> None:
        while self._is_wanted():
            try:
                self._tick()
            except Exception as error:  # the page shows it, and continues
                self._show_own_error(error)
            self._ended.wait(TICK_S)

    def _show_own_error(self, error: Exception) -> None:
        with self._lock:
            text = self._picture.keep_own_error(error, monotonic())
            self._picture.put("error", text)
            self._num_frames += 1
            self._frames.append(_frame(self._num_frames, {"error": text}))

    def _is_wanted(self) -> bool:
        with self._lock:
            in_grace_time = monotonic() - self._left < GRACE_S and not self._has_ended
            if not self.is_closed and (self._viewers or in_grace_time):
                return True
            self._thread, tap = None, self._tap
            self._tap = LiveTap()
        if self.manager is not None:  # also if not `is_open`: `open` may have had a late effect
            tap.close(self.manager)
        return False

    @property
    def _has_ended(self) -> bool:
        return self.manager is not None and self.manager.state in _ENDED

    def _tick(self) -> None:
        now, manager, picture, tap = monotonic(), self.manager, self._picture, self._tap
        begins = manager is not None and not tap.is_open and tap.open(manager)
        reasons: list[_Reason] | None = None
        if manager is not None:
            picture.update_state(manager, tap, now, begins=begins)
            if picture.is_due("status", now, _STATUS_S):
                picture.update_status(manager, self._num_outside, now)
        if manager is not None and self._viewers and picture.is_due("why", now, _WHY_S):
            reasons = _reasons(manager) if self._rows.num_waiting else []
        changes = tap.take()
        if changes is None and manager is not None:  # changes are lost: the next tick starts over
            self._tap = LiveTap()
            tap.close(manager)
        with self._lock:
            if begins:
                self._rows = LiveRows()
            for change in changes or ():
                self._rows.feed(change)
            picture.add_endings(self._rows.take_endings(), now)
            if reasons is not None:
                picture.update_reasons(self._rows, reasons)
            news = {**self._rows.take_changes(), **picture.take(self._rows, tap, now)}
            if begins:
                self._frames.clear()  # every viewer gets a snapshot
            elif news:
                self._frames.append(_frame(self._num_frames + 1, news))
            self._num_frames += begins or bool(news)


class _Picture:
    """The data of a page, apart from the rows.

    `all` has the latest value of each name. `points` has recent results of `_point`.
    """

    def __init__(self) -> None:
        self.all: dict[str, Any] = {}
        self.points: deque[list[int]] = deque(maxlen=300)
        self._news: dict[str, Any] = {}
        self._due: dict[str, float] = {}
        self._latencies: deque[tuple[float, float, float]] = deque(maxlen=_MAX_LATENCIES)
        self._started = monotonic()
        self._moved: float | None = None  # when a step last began, or the loop was last idle
        self._column = -1
        self._own_error = (-inf, "")  # when the page last failed, and the text of the error

    def is_due(self, name: str, now: float, every_s: float) -> bool:
        if now < self._due.get(name, 0.0):
            return False
        self._due[name] = now + every_s
        return True

    def put(self, name: str, value: Any) -> None:
        """Set a value, and send it if it has changed."""
        if self.all.get(name) != value:
            self.all[name] = self._news[name] = value

    def keep_own_error(self, error: BaseException, now: float) -> str:
        """Show an error of the page itself for a few seconds; return its text."""
        self._own_error = (now, f"the live page itself: {response_text(error)}"[:_MAX_TEXT])
        return self._own_error[1]

    def add_endings(self, endings: Iterable[Any], now: float) -> None:
        for ending in endings:
            if ending.metrics:
                metrics = dict(zip(REQUEST_METRICS, ending.metrics, strict=True))
                first, later = metrics["first_token_s"], metrics["generated_tokens"] - 1
                each = (metrics["last_token_s"] - first) / later if later > 0 else nan
                self._latencies.append((now, first, each))

    def update_state(self, manager: GptManager, tap: LiveTap, now: float, *, begins: bool) -> None:
        """Update the state, the error, and whether the loop hangs. Called in every tick."""
        health = manager.health()
        is_idle = not health.num_active or manager.state in _ENDED
        moves = begins or self._moved is None or (tap.is_open and tap.column != self._column)
        if is_idle or moves:
            self._column, self._moved = tap.column, now
        hangs = 0  # if the loop hangs: seconds since the last step, or -1 if no step has run
        if not health.progressing or now - (self._moved or now) > _HANG_S:
            age = health.last_step_age_s
            hangs = -1 if age is None else max(1, int(age))
        failed, own_error = self._own_error
        error = own_error if now - failed < _OWN_ERROR_S else ""
        if manager.exception is not None:
            error = response_text(manager.exception)[:_MAX_TEXT]
        self.put("state", manager.state.value)
        self.put("error", error)
        self.put("hangs", 0 if is_idle else hangs)

    def update_status(
        self, manager: GptManager, num_outside: Callable[[], int] | None, now: float
    ) -> None:
        health, outside = manager.health(), None
        try:
            outside = None if num_outside is None else num_outside()
        except BaseException as error:  # noqa: B036 - raised by the host's function
            self.keep_own_error(error, now)
        self.put("outside", outside)
        self.put(
            "calls",
            {
                name: [it.calls, it.total_us, it.max_us, it.errors, it.overstays]
                for name, it in health.callbacks.items()
            },
        )
        while self._latencies and self._latencies[0][0] < now - _LATENCY_S:
            self._latencies.popleft()
        _, *columns = zip(*self._latencies, strict=True) if self._latencies else ((), (), ())
        self.put("latency", [len(self._latencies), *map(_percentiles, columns)])

    def update_reasons(self, rows: LiveRows, reasons: Iterable[_Reason]) -> None:
        """Update the list of [reason, text, rows as ranges]: one item per reason and text."""
        groups: dict[tuple[str, str], list[int]] = {}
        for request_id, reason, text in reasons:
            number = rows.row_number(request_id)
            if number is not None:
                groups.setdefault((reason, text), []).append(number)
        self.put("why", [[*key, ranges(sorted(numbers))] for key, numbers in groups.items()])

    def take(self, rows: LiveRows, tap: LiveTap, now: float) -> dict[str, Any]:
        """Return the values that have changed, by name.

        "p", the result of `_point`, is added after each new iteration, and at least once a second.
        "g", the result of `rows.take_progress`, is added once a second if it is not empty.
        """
        if rows.outcomes:
            self.put("ended", dict(rows.outcomes))
        news, self._news = self._news, {}
        point = self._point(rows, tap, now)
        beats = self.is_due("beat", now, _STATUS_S)
        if beats or not self.points or self.points[-1][0] != point[0]:
            self.points.append(point)
            news["p"] = point
        if beats:
            grown = rows.take_progress(list(tap.ran.values()))
            if grown:
                news["g"] = grown
        return news

    def _point(self, rows: LiveRows, tap: LiveTap, now: float) -> list[int]:
        """Return the current numbers.

        - the next iteration, and milliseconds since the start
        - running requests, and running requests in the generation phase
        - waiting requests, and paused requests
        - used blocks, and cached blocks
        - context tokens, and generated tokens, both since the watch began
        """
        counts, kinds = tap.latest, rows.kinds
        cached = 0 if counts is None else counts.block_reuse.cached_blocks
        used = 0
        # if no request is active, `counts` may be older than the end of the last request
        if counts is not None and rows.num_active:
            used = counts.total_blocks - counts.free_blocks
        milliseconds = int((now - self._started) * 1000)
        tokens = tap.context_tokens, tap.generated_tokens
        running = rows.num_active - kinds[WAITING] - kinds[PAUSED]
        in_groups = running, kinds[GENERATION], kinds[WAITING], kinds[PAUSED]
        return [tap.column, milliseconds, *in_groups, used, cached, *tokens]


def _reasons(manager: GptManager) -> list[_Reason] | None:
    """Return why requests wait, for at most `_MAX_WAITS`; None if the loop does not answer."""
    try:
        explanations = manager.explain_waiting(_MAX_WAITS, _ANSWER_S)
    except (TimeoutError, ManagerDeadError):
        return None
    return [(it.request_id, _missing(it), _wait_text(it)) for it in explanations]


def _missing(explanation: Explanation) -> str:
    """Return the reason. The reason "behind" means that the request waits for another request.

    If the other request lacks tokens or blocks, return the other request's reason, not "behind".
    """
    if explanation.needed_tokens:
        return WaitReason.TOKEN_BUDGET.value
    return WaitReason.KV_BLOCKS.value if explanation.needed_blocks else explanation.reason


def _wait_text(explanation: Explanation) -> str:
    """Return the reason without the request's id and position, so that requests can share it."""
    text = explanation.text.removeprefix(f"request {explanation.request_id} ")
    return text.rpartition("; ")[0][:_MAX_TEXT]


def _percentiles(values: Iterable[float]) -> list[float | None]:
    """Return the 50th and 99th percentiles without NaN values; each is None if no value is left."""
    known = sorted(value for value in values if value == value)
    if not known:
        return [None, None]
    return [round(known[int(share * (len(known) - 1))], 5) for share in (0.5, 0.99)]


def _frame(number: int, content: dict[str, Any], head: bytes = b"") -> bytes:
    retry = b"retry: 1000\n" if head else b""
    return b"%s%sid: %d\ndata: %s\n\n" % (retry, head, number, orjson.dumps(content))

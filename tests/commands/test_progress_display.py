"""The live view on pseudo-terminals and on pipes, and the report below it."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import select
import struct
import termios
import threading
import time

import pytest
from screen import Screen

from gptmanager.commands.run.progress_display import Progress, ProgressDisplay, RunningRow
from gptmanager.terminal.printable import printable
from gptmanager.terminal.progress import ProgressBars
from gptmanager.terminal.redrawn_lines import RedrawnLines
from gptmanager.terminal.tables import lines, report_table


class Terminal:
    """A pseudo-terminal, and what stands on it."""

    def __init__(self, width, height=24):
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
        self.stream = open(slave, "w", encoding="utf-8")
        self.screen = Screen(width)
        self._bytes = b""

    @property
    def lines(self):
        while select.select([self._master], [], [], 0)[0]:
            self._bytes += os.read(self._master, 65536)
        self.screen.feed(self._bytes.decode())
        self._bytes = b""
        return self.screen.lines[:-1]  # the cursor stands below

    def close(self):
        self.stream.close()
        os.close(self._master)


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    opened = []

    def open_terminal(*size):
        opened.append(Terminal(*size))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def letters(tokens):
    return "".join(map(chr, tokens))


def row(name, prompt, said="", num_tokens=None):
    row = RunningRow(str(name), prompt, letters)
    row.add([ord(letter) for letter in said])
    row.num_tokens = row.num_tokens if num_tokens is None else num_tokens
    return row


def progress(**counts):
    return Progress(**{"total": 10, "started": time.monotonic() - 2.0, **counts})


def unstamped(lines):
    """Without the seconds before each event, which have two decimals."""
    return [re.sub(r"^ *\d+\.\d\d s  ", "", line) for line in lines]


HEADER = "request tokens state      text"


def test_requests_join_speak_and_leave_in_place(terminal):
    # Given a view of two requests
    shown = terminal(80)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    first, second = row(1, "Once upon"), row(12, "17 + 25 =")
    view.draw([first, second], progress())
    assert shown.lines[:3] == [
        HEADER,
        "      1      0 joined     Once upon",
        "     12      0 joined     17 + 25 =",
    ]

    # When they speak, and one leaves
    first.add([ord(letter) for letter in " a time"])
    second.add([ord(letter) for letter in " 42"])
    view.draw([first, second], progress(output_tokens=10, batch_size=2, kv_use=0.5))
    assert shown.lines[1:] == [
        "      1      7 running    Once upon a time",
        "     12      3 running    17 + 25 = 42",
        f"{'━' * 20}   0/10 requests   5 tokens/s   batch 2   KV cache 50%",
    ]
    view.leave(second, "END_ID", " 42", progress(), time.monotonic())
    view.draw([first], progress(done=5))

    # Then its line stays above the others
    assert shown.lines[:3] == [
        HEADER,
        "     12      3 END_ID     17 + 25 = 42",
        "      1      7 running    Once upon a time",
    ]
    assert "━   5/10 requests" in shown.lines[3]
    view.close()
    assert shown.lines == [HEADER, "     12      3 END_ID     17 + 25 = 42"]


def test_what_was_asked_is_dim(terminal):
    shown = terminal(80)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    view.draw([row(1, "Once upon", " a time")], progress())
    assert shown.lines and {"2", "0"} <= set(shown.screen.styles)


def test_no_color(terminal, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    shown = terminal(80)
    ProgressDisplay(RedrawnLines(shown.stream)).draw([row(1, "Once upon", " a time")], progress())
    assert len(shown.lines) == 3 and not shown.screen.styles


def test_long_texts_show_their_end(terminal):
    shown = terminal(60)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    long = row(1, "p" * 100, "0123456789" * 10)
    short = row(2, "p" * 100, "0123456789")
    view.draw([long, short], progress())
    end = ("0123456789" * 10)[-33:]
    assert shown.lines[1] == "      1    100 running    …" + end
    assert shown.lines[2] == "      2     10 running    …" + "p" * 23 + "0123456789"
    view.close()


@pytest.mark.parametrize("width", [1, 2, 7, 8, 9, 10, 20, 38, 59, 60, 61, 80, 200])
@pytest.mark.parametrize("text", ["abc " * 60, "日本語" * 60, "🙂 é" * 60, "e\u0301" * 100])
@pytest.mark.every(5)
def test_closing_leaves_nothing_at_any_width(terminal, width, text):
    shown = terminal(width)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    rows = [row(i, text, text[:i], i) for i in range(5)]
    for _ in range(4):
        view.draw(rows, progress())
    drawn = shown.lines

    # no line has wrapped: a line of the screen for the header, each row and the counts
    assert len(drawn) == 1 + 5 + 1
    view.close()
    assert len(shown.lines) == 1


def test_a_narrow_terminal_leaves_out_the_counts(terminal):
    shown = terminal(30)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    view.draw([row(123, "Once upon", " a time")], progress(done=3))
    assert shown.lines[-2:] == ["    123 Once upon a time", "3/10 requests   0 tokens/s"]


def test_a_small_terminal_shows_some_of_the_requests(terminal):
    shown = terminal(60, 9)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    rows = [row(i, "Once") for i in range(30)]
    for _ in range(2):
        view.draw(rows, progress())
    assert len(shown.lines) == 1 + 5 + 1 + 1
    assert shown.lines[-2].strip() == "and 25 more"


def test_many_requests_on_a_tall_terminal(terminal):
    shown = terminal(60, 100)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    view.draw([row(i, "Once") for i in range(30)], progress())
    assert shown.lines[-2].strip() == "and 14 more"


def test_texts_that_no_row_shows_are_not_decoded(terminal):
    decoded = []
    view = ProgressDisplay(RedrawnLines(terminal(60, 9).stream))
    rows = [RunningRow(str(i), "", lambda tokens: decoded.append(1) or "") for i in range(30)]
    for each in rows:
        each.add([1])
    view.draw(rows, progress())
    assert len(decoded) == 5


def test_a_failure_is_shown_next_to_the_prompt(terminal):
    shown = terminal(80)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    view.leave(
        row(3, "Once"),
        "ERROR",
        "InvalidRequestError: no",
        progress(),
        time.monotonic(),
        failed=True,
    )
    view.draw([], progress(done=1))
    assert shown.lines[1] == "      3      0 ERROR      Once  InvalidRequestError: no"


def test_log_records_go_above_the_running_requests(terminal):
    shown = terminal(80)
    region = RedrawnLines(shown.stream)
    view = ProgressDisplay(region)
    logger = logging.Logger("anything")
    logger.addHandler(logging.StreamHandler(region))
    logger.warning("before")
    view.draw([row(1, "Once upon")], progress())

    thread = threading.Thread(target=logger.warning, args=("from another thread\nin two lines",))
    thread.start()
    thread.join()

    assert shown.lines[:5] == [
        "before",
        HEADER,
        "from another thread",
        "in two lines",
        "      1      0 joined     Once upon",
    ]


def test_writers_in_many_threads_do_not_tear_the_drawing(terminal):
    shown = terminal(80, 30)
    region = RedrawnLines(shown.stream)
    view = ProgressDisplay(region)

    def write(name):
        for index in range(20):
            region.write(f"{name} {index}\n")

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        view.draw([row(1, "Once upon")], progress())
        assert shown.lines[-2] == "      1      0 joined     Once upon"
    view.close()
    written = [line for line in shown.lines if line != HEADER]
    assert sorted(written) == sorted(f"{name} {index}" for name in "abc" for index in range(20))


def test_a_dumb_terminal_gets_lines(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    shown = terminal(80)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    view.join(row(1, "Once"), progress(), time.monotonic())
    view.draw([row(1, "Once")], progress())
    assert unstamped(shown.lines) == ["request 1 joins: Once"]


def test_what_is_above_is_folded_below_itself(terminal):
    shown = terminal(60)
    view = ProgressDisplay(RedrawnLines(shown.stream))
    view.leave(row(3, "p" * 30, num_tokens=7), "LENGTH", "t" * 10, progress(), time.monotonic())
    view.draw([row(4, "Once")], progress(done=1))
    assert shown.lines[1:4] == [
        "      3      7 LENGTH     " + "p" * 30 + "tttt",
        " " * 26 + "t" * 6,
        "      4      0 joined     Once",
    ]


def test_the_cursor_is_visible_after_a_command_is_killed(terminal):
    shown = terminal(80)
    ProgressDisplay(RedrawnLines(shown.stream)).draw([row(1, "Once")], progress())
    assert shown.lines and shown.screen.shows_cursor


NASTY = "[red]x[/red] :smile: \x1b[31m\x07\u202e\udc80 https://a.b 'c' 1"
TAMED = "[red]x[/red] :smile: �[31m�� https://a.b 'c' 1"


def test_texts_are_data(terminal):
    # Given a text with markup, codes of a terminal, and what is no character
    shown = terminal(120)
    region = RedrawnLines(shown.stream)
    view = ProgressDisplay(region)
    view.leave(row(3, NASTY), "ERROR", NASTY, progress(), time.monotonic(), failed=True)
    view.draw([row(4, NASTY)], progress(done=1))
    region.write(f"WARNING {NASTY}\n")
    ProgressBars(region, 0).update(NASTY, 1, 2, "a note")

    # Then it stands there as it is, but for what steers: the screen knows no other codes
    assert shown.lines[1:3] == [
        f"      3      0 ERROR      {TAMED}  {TAMED}",
        f"WARNING {TAMED}",
    ]
    assert shown.lines[3].startswith(TAMED) and shown.lines[3].endswith(" 50% -:--:-- a note")


# Progress ----------------------------------------------------------------------------------------


def test_bars_come_when_something_takes_long_and_go_when_it_is_done(terminal, monkeypatch):
    # Given work that is told of at some times
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    shown = terminal(80)
    bars = ProgressBars(RedrawnLines(shown.stream))

    def told(seconds, *what):
        now[0] = 100.0 + seconds
        bars.update(*what)
        return shown.lines

    assert told(0, "weights", 0, 200) == []
    assert told(0.9, "weights", 20, 200) == []
    assert told(1.1, "weights", 50, 200)[0].startswith("weights ") and " 25% " in shown.lines[0]
    # it is not drawn more often than one sees
    assert " 25% " in told(1.11, "weights", 80, 200)[0]
    # what begins later has its own patience
    assert len(told(1.5, "graphs", 0, 9)) == 1
    assert [line.split()[0] for line in told(2.6, "graphs", 3, 9)] == ["weights", "graphs"]
    assert [line.split()[0] for line in told(2.7, "weights", 200, 200)] == ["graphs"]
    assert told(2.8, "graphs", 9, 9) == []


@pytest.mark.parametrize(
    ("wanted", "note", "told"),
    [
        (None, "fast", ""),
        (False, "fast", ""),
        (True, "fast", "prompts: 2 of 2, fast\n"),
        (True, "", "prompts: 2 of 2\n"),
    ],
)
def test_bars_on_a_pipe(wanted, note, told):
    pipe = io.StringIO()
    bars = ProgressBars(RedrawnLines(pipe), 0, wanted=wanted)
    for done in range(3):
        bars.update("prompts", done, 2, note)
    bars.close()
    assert pipe.getvalue() == told


def test_a_stream_that_is_closed_shows_nothing():
    region = RedrawnLines(None)
    region.write("anything")
    ProgressBars(region, 0).update("work", 1, 2)
    region.clear()


def test_colors_that_are_forced_on_a_pipe_draw_nothing(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe = io.StringIO()
    view = ProgressDisplay(RedrawnLines(pipe))
    view.draw([row(1, "Once")], progress())
    view.close()
    assert pipe.getvalue() == ""


# On a pipe ---------------------------------------------------------------------------------------


def test_a_log_has_a_line_for_each_event():
    pipe = io.StringIO()
    view = ProgressDisplay(RedrawnLines(pipe))
    view.note("loading model")
    view.join(row(1, "Once\nupon"), progress(), time.monotonic())
    view.draw([row(1, "Once upon")], progress())
    view.leave(
        row(1, "Once upon", num_tokens=3), "END_ID", " a\ntime", progress(done=1), time.monotonic()
    )
    view.leave(
        row(2, "Once"),
        "ERROR",
        "InvalidRequestError: no",
        progress(done=2),
        time.monotonic(),
        failed=True,
    )
    view.close()

    assert unstamped(pipe.getvalue().splitlines()) == [
        "loading model",
        "request 1 joins: Once↵upon",
        "request 1 leaves after 3 tokens, END_ID:  a↵time",
        "request 2 leaves after 0 tokens, ERROR: InvalidRequestError: no",
    ]


def test_a_log_of_a_long_run_has_the_counts_now_and_then():
    pipe = io.StringIO()
    view = ProgressDisplay(RedrawnLines(pipe))
    for seconds in (1.0, 9.0, 10.5, 11.0, 19.0, 21.0):
        counts = {"done": 3, "output_tokens": 100, "batch_size": 4, "kv_use": 0.25}
        view.draw([], Progress(total=10, started=time.monotonic() - seconds, **counts))
    assert unstamped(pipe.getvalue().splitlines()) == [
        "3/10 requests, 10 tokens/s, batch 4, KV cache 25%",
        "3/10 requests, 5 tokens/s, batch 4, KV cache 25%",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_quiet_view_shows_failures_only(terminal, is_terminal):
    shown = terminal(80)
    pipe = io.StringIO()
    region = RedrawnLines(shown.stream if is_terminal else pipe)
    view = ProgressDisplay(region, quiet=True)
    view.note("loading model")
    view.join(row(1, "Once"), progress(), time.monotonic())
    view.draw([row(1, "Once")], progress())
    view.leave(row(1, "Once"), "END_ID", " upon", progress(), time.monotonic())
    view.leave(
        row(2, "Once"),
        "ERROR",
        "InvalidRequestError: no",
        progress(),
        time.monotonic(),
        failed=True,
    )
    region.write("WARNING something\n")
    view.close()
    told = shown.lines if is_terminal else pipe.getvalue().splitlines()
    assert told == ["request 2: InvalidRequestError: no", "WARNING something"]


# Characters --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain 日本語 é", "plain 日本語 é"),
        ("a\nb\r\nc\td", "a↵b↵c d"),
        ("\x1b[31mred\x07", "�[31mred�"),
        ("\x9b2J\x00", "�2J�"),
        ("right\u202eleft\u200b\ufeff", "rightleft"),
        ("a\u00a0b\u2003c", "a b c"),
        ("\u2028", "�"),
    ],
)
def test_nothing_steers_the_terminal(text, shown):
    assert printable(text) == shown
    assert printable(text).isprintable()


# The report --------------------------------------------------------------------------------------


def test_a_report_has_aligned_numbers_with_their_units():
    report = {
        "requests": 1600,
        "seconds": 7.8113,
        "output_tokens_per_second": 44.8,
        "time_to_first_token_ms": {"p50": 2.219, "p90": 1234.5, "p99": 3.0},
        "queue_ms": {},
        "max_kv_cache_use": 0.1251,
        "machine": "a quiet one",
        "versions": {"torch": "2.13", "numpy": "2"},
        "engines": {"ours": {"every_run": [1.0, 2000.5]}},
        "notes": ["a peer is missing", "so is another"],
    }
    assert lines([report_table(report)]) == [
        "requests                            1,600",
        "seconds                             7.811 s",
        "output tokens per second             44.8",
        "time to first token         p50      2.22 ms  p90  1,234.50 ms  p99      3.00 ms",
        "queue                       not measured",
        "max KV cache use                     12.5 %",
        "machine                     a quiet one",
        "versions                    torch 2.13, numpy 2",
        "engines",
        "  ours",
        "    every run               1.0  2,000.5",
        "notes                       a peer is missing",
        "                            so is another",
    ]

"""`make marathon-hostile` finds each fault that is planted into a server."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from child import Child
from hostile_bars import Bars, Record, judge
from hostile_calls import Target
from hostile_case import Case, post
from hostile_draws import Draws
from marathon_hostile import Attack
from server_watch import Memory, Poll, Watched

PLANTED = Path(__file__).with_name("planted_server.py")
# a real server is judged by 0.5 s; this one is alone, and the machine of tests may be busy
BARS = Bars(health_s=0.25, on_time_s=10.0, growth_mb=15.0, window_s=0.1, warm_share=0.0)
FAULTS = {
    "hangs": "no answer in 0.2 s",
    "grows": "memory of server has grown by",
    "dies": "the server has ended",
    "fails": "500: ",
    "closes": "closed before the answer",
    "late": "/health took",
    "forgets": "'b', not 'a'",
    "traceback": "ValueError: 1",
    "unwell": "/health was answered with 500",
}


def attack(fault: str, log: Path, seconds: float) -> dict[str, Any]:
    def cases() -> Any:
        for number in itertools.count():
            yield Case(1, number, "body", "http", "/", (post("/", b"{}"), 0.004))

    with (
        log.open("wb") as stderr,
        Child(
            [sys.executable, "-S", str(PLANTED), fault], stdout=subprocess.PIPE, stderr=stderr
        ) as process,
    ):
        try:
            assert process.stdout is not None
            target = Target("127.0.0.1", int(process.stdout.readline()), "")
            patience_s = 0.2 if fault == "hangs" else 10.0
            times: dict[str, Any] = {"patience_s": patience_s, "canary_s": 0.05, "poll_s": 0.01}
            found = Attack(
                target, process.pid, cases(), log.read_text, clients=3, bars=BARS, **times
            )
            return found.run(seconds)
        finally:
            process.kill()


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.every(5)
def test_a_planted_fault_is_found(fault: str, tmp_path: Path) -> None:
    for seconds in (0.4, 2.0, 10.0):  # a busy machine may need longer
        report = attack(fault, tmp_path / "log", seconds)
        is_found = any(FAULTS[fault] in failure for failure in report["failures"])
        if is_found:
            break
    assert is_found, report["failures"]


def test_a_sound_server_is_not_blamed(tmp_path: Path) -> None:
    report = attack("none", tmp_path / "log", 0.4)
    assert [it for it in report["failures"] if "/health took" not in it] == []
    assert report["cases"] and report["answers"]["/"] == {"200": report["cases"]}
    assert report["health"]["polls"] and report["memory"]["server"]["peak_mb"] > 5


def judged(polls: list[Poll], memory: list[Memory]) -> list[str]:
    record = Record()
    record.canaries["equal"] = 1
    failures: list[str] = judge(record, Watched(polls, memory), "", Bars())["failures"]
    return failures


def test_a_late_answer_counts_if_its_watcher_and_the_machine_were_on_time() -> None:
    assert judged([Poll(1.0, 0.4, 0.0, 0.0, 200)], []) == []
    assert judged([Poll(1.0, 0.6, 0.2, 0.0, 200)], []) == []
    assert judged([Poll(1.0, 0.6, 0.01, 0.3, 200)], []) == []
    assert "0.60 s" in judged([Poll(1.0, 0.6, 0.01, 0.09, 200)], [])[0]


def test_memory_is_judged_by_what_stays() -> None:
    def sizes(size: Any) -> list[Memory]:  # sizes during 20 minutes
        return [Memory(at, size(at / 2), 0.0) for at in range(1202)]

    assert judged([], sizes(lambda s: 500 + (300 if int(s) % 9 == 0 else 0))) == []
    assert judged([], sizes(lambda s: 500 + min(s, 100))) == []  # while it warms up
    assert judged([], sizes(lambda s: 500 + min(s, 440) / 10)) == []  # a cache that becomes full
    assert "a minute" in judged([], sizes(lambda s: 500 + s / 20))[0]
    assert "grown by" in judged([], sizes(lambda s: 500 + (70 if s > 200 else 0)))[0]


def test_cases_are_drawn_again_and_kept_in_files() -> None:
    def first() -> list[Case]:
        draws = Draws(5, {"/v1/completions": {"best_of": {}}})
        return [draws.case(number) for number in range(60)]

    cases = first()
    assert cases == first()
    assert [Case.from_json(case.as_json()) for case in cases] == cases
    assert len({case.kind for case in cases}) > 7

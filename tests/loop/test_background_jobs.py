"""Long work beside the steps of a loop, or between them: who does it, and how much at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from gptmanager.host import background_jobs
from gptmanager.host.background_jobs import BackgroundJobs, Job
from gptmanager.request.pieces import whole

MILLISECOND = 1_000_000


class Clock:
    """What the module takes for the time: pieces move it on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = self.worked_ns = 0
        monkeypatch.setattr(background_jobs, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(background_jobs, "monotonic", lambda: self.now_ns / 1e9)
        monkeypatch.setattr(background_jobs, "thread_time_ns", lambda: self.worked_ns)

    def work(self, milliseconds: float, waits: float = 0) -> None:
        self.worked_ns += int(milliseconds * MILLISECOND)
        self.now_ns += int((milliseconds + waits) * MILLISECOND)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def with_jobs(monkeypatch: pytest.MonkeyPatch, *jobs: Job[None], cores: int = 1) -> BackgroundJobs:
    """Return the jobs of a loop that helps, with threads for one core, after its first step."""
    monkeypatch.setattr(background_jobs, "num_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    found = BackgroundJobs()
    found.loop_helps = True
    found.end_step()
    found.pending.extend(jobs)
    return found


def pieces_of(
    clock: Clock, done: list[int], milliseconds: float, number: int = 0
) -> Iterator[None]:
    while True:
        clock.work(milliseconds)
        done.append(number)
        yield


def test_all_at_once() -> None:
    done = []

    def pieces():
        for number in range(3):
            done.append(number)
            yield
        return "result"

    assert whole(pieces()) == "result" and done == [0, 1, 2]


@pytest.mark.parametrize("milliseconds", [0.3, 1.0, 7.0])
def test_the_loop_works_for_a_share_of_its_time(monkeypatch, clock, milliseconds) -> None:
    """Long pieces are made up for; a turn is never longer than a piece more than its share."""
    done: list[int] = []
    jobs = with_jobs(monkeypatch, Job(pieces_of(clock, done, milliseconds), by_loop=True))
    longest = 0.0
    for _ in range(200):
        clock.work(50)
        before = clock.now_ns
        jobs.end_step()
        longest = max(longest, (clock.now_ns - before) / MILLISECOND)
    assert 0.026 < len(done) * milliseconds / (200 * 50) < 0.031 + milliseconds / (200 * 50)
    assert longest <= 0.03 * 50 + milliseconds


def test_a_slow_step_is_followed_by_no_turn(monkeypatch, clock) -> None:
    """The time of a job does not extend an iteration beyond 1.2 times the median."""
    done: list[int] = []
    jobs = with_jobs(monkeypatch, Job(pieces_of(clock, done, 0.2), by_loop=True))
    times, turns = [], []
    for number in range(400):
        step = {3: 52, 5: 53, 7: 90}.get(number % 9, 50)
        before = clock.now_ns
        clock.work(step)
        num_done = len(done)
        jobs.end_step()
        times.append((clock.now_ns - before) / MILLISECOND)
        turns.append((step, len(done) > num_done))
    assert {step for step, is_turn in turns[20:] if is_turn} == {50, 52}
    assert max(it for it in times if it < 90) <= 1.1 * 50
    assert max(times) == 90


def test_steps_that_are_slow_from_now_on_are_the_usual_ones(monkeypatch, clock) -> None:
    """Many requests came, say: the adapter is loaded all the same."""
    done: list[int] = []
    jobs = with_jobs(monkeypatch, Job(pieces_of(clock, done, 0.2), by_loop=True))
    for step in [50] * 60 + [200] * 60:
        clock.work(step)
        num_done = len(done)
        jobs.end_step()
    assert len(done) > num_done


def test_after_a_pause_a_turn_is_short(monkeypatch, clock) -> None:
    done: list[int] = []
    jobs = with_jobs(monkeypatch, Job(pieces_of(clock, done, 1), by_loop=True))
    clock.work(60_000)
    jobs.end_step()
    assert len(done) == 50


def test_a_job_that_waits_for_something_is_left_to_its_thread(monkeypatch, clock) -> None:
    turns: list[int] = []

    def from_a_disk():
        while True:
            turns.append(0)
            clock.work(0.1, waits=15)
            yield

    others: list[int] = []
    slow = Job(from_a_disk(), by_loop=True)
    jobs = with_jobs(monkeypatch, slow, Job(pieces_of(clock, others, 1), by_loop=True))
    for _ in range(20):
        clock.work(50)
        jobs.end_step()
    assert len(turns) == 1 and not slow.by_loop
    assert len(others) > 10


@pytest.mark.parametrize(("cores", "helps"), [(2, True), (1, False)])
def test_a_loop_with_a_spare_core_or_parallel_steps_does_nothing(
    monkeypatch, clock, cores, helps
) -> None:
    done: list[int] = []
    jobs = with_jobs(monkeypatch, Job(pieces_of(clock, done, 1), by_loop=True), cores=cores)
    jobs.loop_helps = helps
    for _ in range(5):
        clock.work(50)
        jobs.end_step()
    assert not done


def step_until(jobs: BackgroundJobs, ended: threading.Event) -> None:
    while not ended.wait(0.001):
        jobs.end_step()


@pytest.mark.parametrize("by_loop", [True, False])
def test_the_loop_or_a_thread_runs_the_pieces_while_steps_run(monkeypatch, by_loop) -> None:
    jobs, ended = with_jobs(monkeypatch), threading.Event()
    threads: set[str] = set()
    monkeypatch.setattr(background_jobs, "_MOST_BUSY_S", 60)
    monkeypatch.setattr(background_jobs, "_LEAST_BUSY_S", 60)
    monkeypatch.setattr(background_jobs, "_LONGEST_WAIT_NS", 10**12)  # pieces may lose their core
    jobs._is_crowded = True
    jobs.end_step()

    def pieces():
        for _ in range(5):
            threads.add(threading.current_thread().name)
            yield
        ended.set()
        return 7

    with ThreadPoolExecutor(1, "worker") as workers:
        result = workers.submit(jobs.finish, pieces(), by_loop=by_loop)
        step_until(jobs, ended)
        assert result.result(30) == 7
    assert threads == ({threading.current_thread().name} if by_loop else {"worker_0"})
    assert not jobs.pending


def test_what_a_piece_raises_in_the_loop_is_raised_in_the_job(monkeypatch) -> None:
    jobs, ended = with_jobs(monkeypatch), threading.Event()
    jobs._is_crowded = True
    monkeypatch.setattr(background_jobs, "_LEAST_BUSY_S", 1.0)
    jobs.end_step()

    def pieces():
        yield
        ended.set()
        raise KeyboardInterrupt("of a tensor")

    with ThreadPoolExecutor(1) as workers:
        result = workers.submit(jobs.finish, pieces())
        step_until(jobs, ended)
        with pytest.raises(KeyboardInterrupt, match="of a tensor"):
            result.result(30)


def test_a_thread_goes_on_when_no_more_steps_end(monkeypatch) -> None:
    jobs = with_jobs(monkeypatch)
    jobs._is_crowded = True
    jobs.end_step()

    def pieces():
        yield
        return threading.current_thread().name

    with ThreadPoolExecutor(1, "worker") as workers:
        assert workers.submit(jobs.finish, pieces()).result(30) == "worker_0"


@pytest.mark.parametrize("is_crowded", [True, None])
def test_a_job_begins_at_once_where_the_loop_has_no_step(monkeypatch, is_crowded) -> None:
    """However long the loop would have counted as busy, and its thread would have slept."""
    for name in ("_LEAST_BUSY_S", "_MOST_BUSY_S", "_LOOK_UP_S", "_SOON_S"):
        monkeypatch.setattr(background_jobs, name, 600)
    jobs = with_jobs(monkeypatch)
    jobs._is_crowded = is_crowded
    jobs.end_step()

    def pieces():
        yield
        return threading.current_thread().name

    with ThreadPoolExecutor(1, "worker") as workers:
        result = workers.submit(jobs.finish, pieces())
        while not jobs.pending:
            time.sleep(0.001)
        assert jobs.is_busy and not result.done()
        jobs.rest_loop()
        assert result.result(30) == "worker_0"
        assert workers.submit(jobs.finish, pieces()).result(30) == "worker_0", "still no step"


def test_an_idle_gap_is_not_a_busy_step(monkeypatch, clock) -> None:
    jobs = with_jobs(monkeypatch)
    clock.work(10)
    jobs.end_step()
    jobs.rest_loop()
    assert not jobs.is_busy
    clock.work(60_000)
    jobs.end_step()
    assert jobs.is_busy
    clock.work(60)
    assert not jobs.is_busy, "the 60 s were taken for the time of a step"


def test_jobs_end_with_the_manager(monkeypatch) -> None:
    jobs = with_jobs(monkeypatch)
    monkeypatch.setattr(background_jobs, "_LEAST_BUSY_S", 1.0)

    def endless():
        while True:
            yield

    for is_crowded in (True, False):
        jobs.is_released, jobs._is_crowded = False, is_crowded
        jobs.end_step()
        with ThreadPoolExecutor(1) as workers:
            result = workers.submit(jobs.finish, endless())
            while not jobs.pending:
                time.sleep(0.001)
            jobs.is_released = True
            with pytest.raises(RuntimeError, match="the manager has ended"):
                result.result(30)


@pytest.mark.parametrize("is_busy", [True, False])
def test_a_thread_rests_only_while_steps_run(monkeypatch, clock, is_busy) -> None:
    jobs, slept = BackgroundJobs(), []
    monkeypatch.setattr(time, "sleep", slept.append)
    if is_busy:
        jobs.end_step()
    clock.work(0.1)
    assert jobs.rest(0) == 0 and not slept, "a piece is too short"
    clock.work(0.3)
    assert jobs.rest(0) == clock.worked_ns
    assert slept == ([pytest.approx(0.002)] if is_busy else [])
    clock.work(40)
    jobs.end_step()
    jobs.rest(0)
    assert slept[-1] == 0.01

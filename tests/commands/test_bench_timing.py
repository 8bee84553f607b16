"""How often what is measured, and when time is up; by a clock that a test moves."""

from __future__ import annotations

import pytest

from gptmanager.bench.end_to_end.device_trace import idle_share
from gptmanager.bench.timing import Budget, ClockTimer, Spread, Stopwatch, measure_all


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def watches(*names, clock=None, each=1.0, order=None):
    def stopwatch(name):
        def seconds():
            if clock is not None:
                clock.now += each
            if order is not None:
                order.append(name)
            return each

        return Stopwatch(seconds, "clock")

    return {name: stopwatch(name) for name in names}


def test_spread():
    spread = Spread.of([5.0, 1.0, 3.0, 2.0, 4.0])
    assert spread == Spread(3.0, 1.0, (2.0, 4.0), 5)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, (2.0, 2.0), 1)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_a_budget_runs_out():
    clock = Clock()
    budget = Budget(10.0, clock)
    clock.now += 4
    assert (budget.used, budget.left, budget.is_spent) == (4.0, 6.0, False)
    share = budget.share(3)
    clock.now += 2
    assert share.is_spent and not budget.is_spent
    clock.now += 4
    assert budget.is_spent


def test_no_budget_is_never_spent():
    clock = Clock()
    budget = Budget(None, clock)
    clock.now += 1e9
    assert not budget.is_spent and not budget.share(5).is_spent


def test_contenders_alternate_and_change_the_first():
    order = []
    seconds = measure_all(watches("a", "b", order=order), 4, Budget())
    assert order == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert seconds == {"a": [1.0] * 4, "b": [1.0] * 4}


def test_repeats_are_cut_where_time_is_up_but_three_are_made():
    clock = Clock()
    seconds = measure_all(watches("a", "b", clock=clock), 20, Budget(9.0, clock))
    assert [len(own) for own in seconds.values()] == [5, 5]
    seconds = measure_all(watches("a", clock=clock), 20, Budget(0.5, clock))
    assert len(seconds["a"]) == 3
    assert measure_all({}, 20, Budget()) == {}


def test_the_clock_timer_runs_every_set():
    seen = []
    watch = ClockTimer().prepare(seen.append, 3)
    assert seen == [0, 1, 2]
    assert watch.seconds() >= 0 and watch.timed_by == "clock"
    assert seen == [0, 1, 2] * 2


def test_idle_time_between_kernels():
    busy = [(10.0, 11.0), (10.5, 10.7), (11.000005, 12.0), (13.0, 20.0)]  # in any order
    idle, waited = idle_share(busy[::-1])
    assert idle == pytest.approx(1.000005 / 10)
    assert waited == pytest.approx(0.1)
    assert idle_share([(1.0, 2.0)]) == (0.0, 0.0)
    with pytest.raises(ValueError, match="nothing ran"):
        idle_share([])

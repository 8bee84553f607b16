"""Does a user's scheduler keep the contract? Tried on random scenarios, told in words.

Decides nothing of the contract (`rules` does), but which of the broken scenarios is told: the one
of the smallest seed, without the requests that it does not take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest

from gptmanager.testing.rules import RULES, Complaint, Decision
from gptmanager.testing.scenario_run import CreateScheduler, Outcome, run_scenario
from gptmanager.testing.scenarios import Scenario, random_scenario


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a scheduler breaks, and the smallest scenario that showed it.

    `rule` is a name of `RULES`. `scenario` is that of `seed` without requests that it does not
    take. `num_scenarios`: in how many the rule was broken.
    """

    rule: str
    seed: int
    iteration: int
    request_id: int | None
    text: str
    scenario: Scenario
    num_scenarios: int

    def __str__(self) -> str:
        request = "" if self.request_id is None else f", request {self.request_id}"
        scenario = str(self.scenario).replace("\n", "\n  ")
        return (
            f"{self.rule}: {RULES[self.rule]}\n"
            f"  scenarios that break it: {self.num_scenarios}; seed {self.seed}, iteration "
            f"{self.iteration}{request}:\n  {self.text}\n  {scenario}"
        )


@dataclass(frozen=True, slots=True)
class ConformanceReport:
    """What came of `check_scheduler`. Counts are over all scenarios."""

    scheduler: str
    violations: tuple[Violation, ...]
    num_scenarios: int = 0
    num_requests: int = 0
    iterations: int = 0
    pauses: int = 0
    chunks: int = 0
    reused_tokens: int = 0

    @property
    def ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        tried = (
            f"{self.num_scenarios} scenarios, {self.num_requests} requests, {self.iterations} "
            f"iterations, {self.pauses} pauses, {self.chunks} unfinished context chunks, "
            f"{self.reused_tokens} tokens reused"
        )
        if self.ok:
            return f"{self.scheduler} keeps all {len(RULES)} rules: {tried}"
        first = f"{self.scheduler} breaks {len(self.violations)} of {len(RULES)} rules: {tried}"
        return "\n\n".join([first, *map(str, self.violations)])


def check_scheduler(
    create_scheduler: CreateScheduler,
    *,
    num_scenarios: int = 200,
    seed: int = 0,
    evicts: bool | None = None,
    where: Callable[[Scenario], bool] = lambda scenario: True,
) -> ConformanceReport:
    """Try a scheduler, as for `SchedulerConfig(create_scheduler=...)`, without model and device.

    The scenarios are those of the seeds from `seed` on for which `where` holds; with small seeds
    they are small. Each runs twice. `evicts` False: the scheduler pauses nobody, which is checked,
    and requests may then be too long to run as one context again.
    """
    tried = _Tried(create_scheduler, evicts)
    for number in range(seed, seed + num_scenarios):
        scenario = random_scenario(number, evicts=evicts is not False)
        if where(scenario):
            tried.run(scenario)
    return tried.report()


def assert_conforms(
    create_scheduler: CreateScheduler,
    *,
    num_scenarios: int = 200,
    seed: int = 0,
    evicts: bool | None = None,
    where: Callable[[Scenario], bool] = lambda scenario: True,
) -> None:
    """As `check_scheduler`; raises AssertionError with the report's text if a rule is broken."""
    report = check_scheduler(
        create_scheduler, num_scenarios=num_scenarios, seed=seed, evicts=evicts, where=where
    )
    if not report.ok:
        raise AssertionError(str(report))


class _Tried:
    """What has come of the scenarios so far."""

    def __init__(self, create_scheduler: CreateScheduler, evicts: bool | None) -> None:
        self._create = create_scheduler
        self._may_pause = evicts is not False
        self._name = getattr(create_scheduler, "__qualname__", repr(create_scheduler))
        self._outcomes: list[Outcome] = []
        self._num_requests = 0
        self._first: dict[str, tuple[Scenario, int, Complaint]] = {}
        self._counts = Counter[str]()

    def run(self, scenario: Scenario) -> None:
        outcome = self._outcome(scenario)
        self._outcomes.append(outcome)
        self._num_requests += len(scenario.requests)
        for iteration, complaint in outcome.complaints:
            rule = complaint[0]
            self._counts[rule] += 1
            self._first.setdefault(rule, (scenario, iteration, complaint))

    def report(self) -> ConformanceReport:
        return ConformanceReport(
            self._name,
            tuple(self._violation(rule) for rule in RULES if rule in self._first),
            len(self._outcomes),
            self._num_requests,
            sum(outcome.iterations for outcome in self._outcomes),
            sum(outcome.pauses for outcome in self._outcomes),
            sum(outcome.chunks for outcome in self._outcomes),
            sum(outcome.reused_tokens for outcome in self._outcomes),
        )

    def _outcome(self, scenario: Scenario) -> Outcome:
        outcome = self._run(scenario)
        if not outcome.complaints:
            again = self._run(scenario)
            outcome.complaints += again.complaints or _difference(outcome, again)
        return outcome

    def _run(self, scenario: Scenario) -> Outcome:
        return run_scenario(self._create, scenario, may_pause=self._may_pause)

    def _violation(self, rule: str) -> Violation:
        scenario, iteration, complaint = self._first[rule]
        for request in scenario.requests[::-1]:
            others = tuple(r for r in scenario.requests if r is not request)
            smaller = replace(scenario, requests=others)
            for when, found in self._outcome(smaller).complaints if others else ():
                if found[0] == rule:
                    scenario, iteration, complaint = smaller, when, found
        _, request_id, text = complaint
        return Violation(
            rule, scenario.seed, iteration, request_id, text, scenario, self._counts[rule]
        )


def _difference(one: Outcome, other: Outcome) -> list[tuple[int, Complaint]]:
    """The first decision in which two runs of one scenario differ."""
    for first, second in zip_longest(one.decisions, other.decisions):
        if first != second:
            text = f"of two runs one decided {_told(first)}, the other {_told(second)}"
            return [((first or second)[0], ("same-decisions", None, text))]
    return []


def _told(decided: tuple[int, Decision] | None) -> str:
    if decided is None:
        return "nothing more"
    iteration, (contexts, generation, paused) = decided
    return (
        f"contexts {[*contexts]}, generation {[*generation]}, paused {[*paused]} at iteration "
        f"{iteration}"
    )

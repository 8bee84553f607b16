"""Checks on random scenarios that a user's scheduler keeps its contract, and reports violations.

`rules` defines the contract. For each broken rule, this module reports the scenario with the
smallest seed, reduced to the requests that are needed to break the rule.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest

from gptmanager.arguments import at_least
from gptmanager.errors import ConfigError
from gptmanager.testing.rules import RULES, Complaint, Decision
from gptmanager.testing.scenario_run import CreateScheduler, Outcome, run_scenario
from gptmanager.testing.scenarios import Scenario, random_scenario


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that a scheduler breaks, and the smallest scenario that shows it.

    `rule` is a name in `RULES`. `scenario` is the scenario of `seed`, reduced to the requests that
    are needed to break the rule. `num_scenarios` is the number of scenarios that broke it.
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
    """The result of `check_scheduler`. Counts are over all scenarios."""

    scheduler: str
    violations: tuple[Violation, ...]
    num_scenarios: int
    num_requests: int
    iterations: int
    pauses: int
    chunks: int
    reused_tokens: int

    @property
    def ok(self) -> bool:
        """Whether no rule was violated."""
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
    """Check a scheduler without a model or a device, and return a report.

    `create_scheduler` is as in `SchedulerConfig`. There is a scenario for each of `num_scenarios`
    seeds, starting with `seed`; small seeds have small scenarios. Scenarios for which `where` is
    false are skipped. A scenario that breaks no rule runs twice, and both runs must make the same
    decisions. Raise ConfigError if no scenario is left, and for invalid arguments.

    `evicts=False` means that the scheduler never pauses a request, which is checked. Scenarios may
    then have requests that are too long to run again as one context after a pause.
    """
    at_least(1, "num_scenarios", num_scenarios)
    at_least(0, "seed", seed)
    may_pause = evicts is not False
    run = functools.partial(_run_twice, create_scheduler, may_pause=may_pause)
    scenarios = (random_scenario(n, evicts=may_pause) for n in range(seed, seed + num_scenarios))
    tried = [(scenario, run(scenario)) for scenario in scenarios if where(scenario)]
    if not tried:
        raise ConfigError(
            f"where is false for all {num_scenarios} scenarios from seed {seed} on: nothing was "
            "checked; pass another `where`, or a larger num_scenarios"
        )
    outcomes = [outcome for _, outcome in tried]
    first: dict[str, tuple[Scenario, int, Complaint]] = {}
    counts = Counter[str]()
    for scenario, outcome in tried:
        for iteration, complaint in outcome.complaints:
            counts[complaint[0]] += 1
            first.setdefault(complaint[0], (scenario, iteration, complaint))
    return ConformanceReport(
        getattr(create_scheduler, "__qualname__", repr(create_scheduler)),
        tuple(_smallest(run, *first[rule], counts[rule]) for rule in RULES if rule in first),
        len(tried),
        sum(len(scenario.requests) for scenario, _ in tried),
        sum(outcome.iterations for outcome in outcomes),
        sum(outcome.pauses for outcome in outcomes),
        sum(outcome.chunks for outcome in outcomes),
        sum(outcome.reused_tokens for outcome in outcomes),
    )


def assert_conforms(
    create_scheduler: CreateScheduler,
    *,
    num_scenarios: int = 200,
    seed: int = 0,
    evicts: bool | None = None,
    where: Callable[[Scenario], bool] = lambda scenario: True,
) -> None:
    """Run `check_scheduler`; raise AssertionError with the report if a rule is broken."""
    report = check_scheduler(
        create_scheduler, num_scenarios=num_scenarios, seed=seed, evicts=evicts, where=where
    )
    if not report.ok:
        raise AssertionError(str(report))


def _run_twice(
    create_scheduler: CreateScheduler, scenario: Scenario, *, may_pause: bool
) -> Outcome:
    outcome = run_scenario(create_scheduler, scenario, may_pause=may_pause)
    if not outcome.complaints:
        again = run_scenario(create_scheduler, scenario, may_pause=may_pause)
        outcome.complaints += again.complaints or _difference(outcome, again)
    return outcome


def _smallest(
    run: Callable[[Scenario], Outcome],
    scenario: Scenario,
    iteration: int,
    complaint: Complaint,
    count: int,
) -> Violation:
    """Return the violation, with its scenario reduced to the requests that break the rule."""
    rule = complaint[0]
    for request in scenario.requests[::-1]:
        others = tuple(r for r in scenario.requests if r is not request)
        smaller = replace(scenario, requests=others)
        for when, found in run(smaller).complaints if others else ():
            if found[0] == rule:
                scenario, iteration, complaint = smaller, when, found
    _, request_id, text = complaint
    return Violation(rule, scenario.seed, iteration, request_id, text, scenario, count)


def _difference(one: Outcome, other: Outcome) -> list[tuple[int, Complaint]]:
    """Return a complaint about the first decision in which two runs differ, or no complaint."""
    for first, second in zip_longest(one.decisions, other.decisions):
        if first != second:
            text = (
                f"one run decided {_describe(first)}, another run of the same scenario "
                f"{_describe(second)}"
            )
            return [((first or second)[0], ("same-decisions", None, text))]
    return []


def _describe(decided: tuple[int, Decision] | None) -> str:
    if decided is None:
        return "nothing more"
    iteration, (contexts, generation, paused) = decided
    return (
        f"contexts {[*contexts]}, generation {[*generation]}, paused {[*paused]} at iteration "
        f"{iteration}"
    )

"""The choice of attention providers over two ranks, and what a rank that differs causes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from rank_links import at_once, linked, outcome

from gptmanager import ModelType, OptionalParams, ParallelConfig, SchedulerConfig
from gptmanager.assembly import ranks as assembly_ranks
from gptmanager.assembly.cpu_backend import CpuBackend
from gptmanager.assembly.ranks import Ranks
from gptmanager.assembly.sizing import MemoryBudget
from gptmanager.errors import RankError

NAMES = ["flash_attn", "flashinfer"]


def both(*bodies):
    """Return what each body returns or raises, called with the `Ranks` of its own rank."""
    with linked(2) as links:
        ranks = [Ranks(own, None, 2, own.rank) for own in links]
        pairs = zip(bodies, ranks, strict=True)
        return at_once(lambda pair: outcome(lambda: pair[0](pair[1])), pairs)


def agree(names):
    return lambda ranks: ranks.agree(names)


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (NAMES, NAMES),
        (["own", "flashinfer"], ["own", "flashinfer"]),
        (["flashinfer", "flash_attn"], ["own", "own"]),
    ],
)
def test_a_provider_is_used_in_a_phase_if_both_ranks_choose_it(second, expected):
    assert both(agree(NAMES), agree(second)) == [expected, expected]


@pytest.mark.slow
def test_processes_agree_as_threads_do():
    told = subprocess.run(
        [sys.executable, "tests/support/rank_calls.py", "agree"],
        env={**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert json.loads(told.stdout or "null") == [["own", "flashinfer"]] * 2, told.stderr


def test_a_rank_that_fails_before_it_agrees_ends_the_other():
    def fail(ranks):
        error = MemoryError("no memory for the weights")
        ranks.links.fail(error, str(error))
        raise error

    for bodies in ((agree(NAMES), fail), (fail, agree(NAMES))):
        found = both(*bodies)
        failed = bodies.index(fail)
        assert isinstance(found[failed], MemoryError)
        assert isinstance(found[1 - failed], RankError)
        assert f"rank {failed} failed: no memory for the weights" in str(found[1 - failed])


def test_a_rank_that_does_not_agree_is_named_by_both():
    """Such a rank is at its next exchange, whose numbers are no names."""
    budget = MemoryBudget(1e9, shared=False)

    def go_on(ranks):
        return ranks.least_budget(budget)

    for bodies, texts in (
        ((agree(NAMES), go_on), ("sizes", "attention providers")),
        ((go_on, agree(NAMES)), ("attention providers", "sizes")),
    ):
        found = both(*bodies)
        for error in found:
            assert isinstance(error, RankError)
            assert "rank 1 exchanges {}, while rank 0 exchanges {}".format(*texts) in str(error)


@pytest.mark.parametrize("option", ["auto", "flashinfer", "own"])
def test_a_rank_without_a_library_takes_part_in_the_choice(option):
    """Libraries may be installed on one rank only, and then the other must not wait for it."""
    asked = []

    def noted(names):
        asked.append(list(names))
        return names

    backend = CpuBackend(OptionalParams(device="cpu"))
    params = OptionalParams(device="cpu", attention_provider=option)
    backend.choose_attention(SimpleNamespace(), params, noted)
    assert asked == ([["own", "own"]] if option == "auto" else [])


@pytest.mark.parametrize("timeout_s", [1.0, 90.0])
def test_ranks_may_start_a_minute_apart(monkeypatch, timeout_s):
    """Or as long as a step may take, if that is longer: some load a checkpoint slowly."""

    class Reached(Exception):
        pass

    def links(*arguments, boot_s, **options):
        raise Reached(boot_s, options["timeout_s"])

    stores = []
    world = SimpleNamespace(layout=SimpleNamespace(size=2, rank=1), store=stores.append, host="")
    params = OptionalParams(parallel_config=ParallelConfig(2, timeout_s=timeout_s))
    monkeypatch.setattr(assembly_ranks, "Links", links)
    with pytest.raises(Reached) as reached:
        assembly_ranks.connect(world, params, {}, print, None, SchedulerConfig(), ModelType.V1, 1)
    assert reached.value.args == (max(60.0, timeout_s), timeout_s)
    assert stores == [max(60.0, timeout_s)]


def test_a_single_rank_sends_no_report_of_its_failed_start(caplog):
    world = SimpleNamespace(layout=SimpleNamespace(size=1, rank=0))
    assembly_ranks.report_failed_start(lambda: world, RankError("no checkpoint"))
    assert not caplog.records

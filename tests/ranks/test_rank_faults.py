"""One rank of several processes dies, hangs, or leaves: the others answer their host, and end.

GPTMANAGER_FUZZ=20 draws 60 faults, and prints how long the others took.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys

import pytest
from fuzz import ALL_CASES, FUZZ

PATIENCE_S = 60.0


def run(*arguments, timeout, script="rank_faults"):
    told = subprocess.run(
        [sys.executable, f"tests/support/{script}.py", *arguments],
        env={**os.environ, "PYTHONPATH": ".", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert told.returncode == 0, told.stderr
    return [json.loads(line) for line in told.stdout.splitlines()]


def check(record):
    """Check that ranks without a fault have ended normally, with one final response per request."""
    blamed, size = str(record["rank"]), record["parts"] * record["stages"]
    others = {str(rank) for rank in range(size)} - {blamed}
    codes, told = record["codes"], record["told"]
    assert {rank: codes.get(rank) for rank in others} == dict.fromkeys(others, 0), record
    for rank, said in told.items():
        if not said:  # killed, or left without a word
            assert rank == blamed, record
            continue
        assert (said["asked"], said["most"] <= 1) == (said["finals"], True), record
    for rank in others:
        said = told[rank]
        if record["kind"] == "exit" and blamed == "0":  # rank 0's host aborts as it leaves
            assert (said["state"], said["error"]) == ("stopped", "NoneType: None"), record
        elif record["is_ready"]:
            assert said["state"] == "failed", record
            assert said["error"].startswith(f"RankError: rank {blamed} "), record
        else:
            assert said["error"].startswith("RankError: "), record
    if record["kind"] == "stop":  # it goes on, and ends by itself
        assert codes[blamed] == 0, record
        assert told[blamed]["error"].startswith("RankError: "), record


FAULTS = ["kill:0:1:2", "hang:0:2:1", "stop:1:2:1", "exit:1:1:2"][: 4 if ALL_CASES else 1]


@pytest.mark.timeout(PATIENCE_S * 2)
def test_when_one_rank_fails_the_others_end():
    records = run("1", *FAULTS, timeout=PATIENCE_S * 2)
    assert len(records) == len(FAULTS)
    for record in records:
        check(record)


@pytest.mark.timeout(PATIENCE_S * 2)
@pytest.mark.parametrize(
    ("name", "failing", "how"),
    [
        ("sleep", 1, "running"),
        ("update_weights", 1, "paused"),
        ("abort_all", 0, "running"),
        ("sleep", 0, "paused"),
    ],
)
@pytest.mark.every(4)
def test_a_step_that_fails_during_a_call_ends_all_ranks_at_once(name, failing, how):
    """Before `timeout_s`, which is longer than the test may take."""
    [found] = run(name, str(failing), how, timeout=PATIENCE_S, script="rank_calls")
    for rank, (raised, ended_with, state) in enumerate(found):
        planted = "ValueError: planted"
        expected = planted if rank == failing else f"RankError: rank {failing} failed: {planted}"
        assert (ended_with, state) == (expected, "failed")
        # another rank may hear of the failure before its host makes the call
        late = f"ManagerDeadError: {name}: the loop has ended"
        assert raised == expected or (rank != failing and raised == late)


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_S * FUZZ)
def test_whatever_fails_at_whatever_moment(capsys):
    records = run(str(FUZZ), str(3 * FUZZ), timeout=PATIENCE_S * FUZZ)
    assert len(records) == 3 * FUZZ
    for record in records:
        check(record)
    with capsys.disabled():
        for kind in sorted({record["kind"] for record in records}):
            took = sorted(
                seconds
                for record in records
                for rank, seconds in record["out_s"].items()
                if record["kind"] == kind and rank != str(record["rank"])
            )
            median = statistics.median(took)
            print(f"\n{kind}: {len(took)} others out in {median:.2f} s, at most {took[-1]:.2f} s")

"""`make marathon-kill` finds each fault that is planted into a journal, and blames no sound one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kill_faults import FAULTS
from kill_record import InFlight, Output, judge, outputs_of

# a process of its own: one with threads must not fork
_RUN = """
import json, random, sys
from kill_requests import KINDS, Requests
from marathon_kill import Kills

kills, found = Kills(Requests(len(KINDS))), {}
for fault, *modes in json.loads(sys.argv[1]):
    for restores in modes:
        own = kills.run(
            random.Random(7), restores=restores, fault=fault, most_kills=4, points=("send",)
        )
        found.setdefault(fault, []).append((own.kills.total(), own.failures))
print(json.dumps(found))
"""
# whether the host has `restore_cb` in the run that finds the fault
_MODES = {
    "none": (True, False),
    "write_late": (False,),
    "lose_last": (False,),
    "resume_late": (True,),
    "resume_with_a_gap": (True,),
    "repeat_finals": (True,),
}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_each_planted_fault_is_found_and_a_sound_journal_is_not_blamed() -> None:
    assert _MODES.keys() == FAULTS.keys()
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", _RUN, json.dumps([[name, *it] for name, it in _MODES.items()])],
        env={**os.environ, "PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    for fault, runs in json.loads(done.stdout).items():
        assert all(kills for kills, _ in runs), fault
        assert any(failures for _, failures in runs) == (fault != "none"), (fault, runs)


def line(offset: int, *ids: int, final: bool = False, at: float = 0.0) -> dict:
    columns = [[token] for token in ids]
    return {
        **{"id": 1, "offset": offset, "ids": columns, "log_probs": []},
        **{"final": final, "error": "", "finish": [3] if final else [], "time": at},
    }


GOT = {"got": [1], "time": 0.0}
WHOLE = [GOT, line(0, 5, 6), line(2, 7), line(3, 8, final=True)]


@pytest.mark.parametrize(
    ("lines", "lossy", "counts"),
    [
        (WHOLE, None, (0, 0, 0)),
        ([GOT, line(0, 5, 9), *WHOLE[2:]], None, (1, 0, 0)),
        ([*WHOLE[:3], *WHOLE[2:]], None, (0, 1, 0)),
        ([*WHOLE, line(4, final=True)], None, (0, 1, 0)),
        ([*WHOLE[:2], WHOLE[3]], None, (0, 0, 1)),
        (WHOLE[:3], None, (0, 0, 2)),
        ([*WHOLE[:2], WHOLE[3]], InFlight({1: {2}}, set()), (0, 0, 0)),
        ([*WHOLE[:2], WHOLE[3]], InFlight({1: {1}}, set()), (0, 0, 1)),
        (WHOLE[:3], InFlight({}, {1}), (0, 0, 0)),
    ],
)
def test_what_is_wrong_doubled_and_lost_is_counted(lines, lossy, counts):
    expected: dict[int, Output] = outputs_of(WHOLE)
    verdict = judge(lines, expected, {}, lossy)
    assert (verdict.wrong, verdict.doubled, verdict.lost) == counts, verdict.notes

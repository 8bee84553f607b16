"""A phase of a first run on a GPU: `make card PHASE=a`, or

    python tests/card a --out FOLDER --wheels FOLDER

Needs no environment of the project's and no network: only this Python, with torch, CuPy, numba and
what else the library imports. Writes FOLDER/a.txt, a summary, and FOLDER/a.tar.gz, its logs.
Exit status: 0 all steps are right, 1 some are not, 2 there is no GPU or the call was wrong, 3 some
are left for the next run, which goes on from there, and no other one is wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import card_steps
import wheels
from card_steps import PHASES, Setup, Step
from exclusive import NotWritable, Running, Taken, check_writable, only_call
from running import PHASE_S, PROBE_S, Phase, Record, read_record, status_of
from summary import restore, summary, write

ROOT = Path(__file__).resolve().parents[2]
RUNNING = "running.json"
SOURCES = ("gptmanager", "callbacks", "cuda", "tests/cuda", "tests/card")


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    started = time.monotonic()
    options = parser().parse_args(arguments)
    work = options.work.resolve()
    try:
        with only_call(work):
            for pid in Running(work / RUNNING).end_left():
                print(f"ended process {pid}, a step of a run that was killed")
            check_writable(options.out)
            check_writable(work / options.phase)
            return run_phase(options, root, work, started)
    except (Taken, NotWritable) as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


def run_phase(options: argparse.Namespace, root: Path, work: Path, started: float) -> int:
    folder = work / options.phase
    environment = environment_of(work, root)
    notes = unpack_wheels(options, work / "site")
    notes += restore(options.out, options.phase, folder, but=card_steps.OF_MACHINE)
    setup = Setup(root, folder, sys.executable, options.device, options.requests)
    steps = chosen(card_steps.steps_of(options.phase, setup), options.only)
    forget(steps, folder, options.again)
    probe, status = probe_machine(root, environment)
    (folder / "probe.json").write_text(json.dumps(probe, indent=1), "utf-8")
    switches = os.environ.get("GPTMANAGER_CUDA", "")
    notes += [f"GPTMANAGER_CUDA={switches}"] if switches else []
    code = f"{fingerprint(root)} {switches} {probe.get('gpu', '')}"
    unwritten: list[str] = []

    def told(records: Sequence[Record]) -> list[str]:
        """A summary that cannot be written ends no step: what it says is in `folder`, too."""
        lines = summary(options.phase, probe, notes, steps, records, folder, code)
        try:
            write(options.out, options.phase, lines, folder)
            unwritten.clear()
        except OSError as error:
            unwritten[:] = [f"error: {options.out} cannot be written: {error.strerror or error}"]
        return lines

    phase = Phase(
        steps,
        folder,
        seconds=60 * options.minutes - (time.monotonic() - started),
        environment=environment,
        root=root,
        code=code,
        num_lanes=max(2, min(8, len(os.sched_getaffinity(0)) // 2)),
        on_record=told,
        running=work / RUNNING,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: phase.end())
    why = "" if status == 0 or options.anyway or options.device != "cuda" else reason(probe, status)
    records = phase.run(no_gpu=why)
    print("", *told(records), sep="\n")
    if unwritten:
        print(f"{unwritten[0]}; the logs are in {folder}", file=sys.stderr)
        return 1
    print(f"\n{options.out / options.phase}.txt and .tar.gz")
    return 2 if why else status_of(records)


def environment_of(work: Path, root: Path) -> dict[str, str]:
    """Return the environment of every command. Later phases reuse what is compiled in `work`."""
    path = [str(root), str(work / "site")]
    path += filter(None, [os.environ.get("PYTHONPATH", "")])
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "2",
        "XDG_CACHE_HOME": str(work / "cache"),
        "GPTMANAGER_REQUIRE_CUDA": "1",
        "FLASHINFER_WORKSPACE_BASE": str(work / "flashinfer"),
        "TERM": "dumb",
        "NO_COLOR": "1",
    }


def unpack_wheels(options: argparse.Namespace, site: Path) -> list[str]:
    if not options.wheels:
        return []
    found = list(Path(options.wheels).glob("*.whl"))
    return wheels.unpack(found, site) or ([] if found else [f"no wheels in {options.wheels}"])


def chosen(steps: Sequence[Step], only: Sequence[str]) -> list[Step]:
    """Those whose name begins with one of the words; SystemExit for a word that begins none."""
    for word in only:
        if not any(step.name.startswith(word) for step in steps):
            names = ", ".join(step.name for step in steps)
            print(f"error: ONLY={word}: no step is called so; there are {names}", file=sys.stderr)
            raise SystemExit(2)
    return [step for step in steps if not only or step.name.startswith(tuple(only))]


def forget(steps: Sequence[Step], folder: Path, again: Sequence[str]) -> None:
    """Drop what is known of steps that run again: `all`, `failed`, or beginnings of names."""
    for step in steps:
        record = read_record(folder, step.name)
        if record is None:
            continue
        has_failed = "failed" in again and not record.is_right
        if "all" in again or has_failed or (again and step.name.startswith(tuple(again))):
            for file in folder.glob(f"{step.name}.*"):
                file.unlink()


def probe_machine(root: Path, environment: dict[str, str]) -> tuple[dict[str, Any], int]:
    command = [sys.executable, "tests/card/probe.py"]
    print(" ".join(command), flush=True)
    try:
        done = subprocess.run(
            command,
            cwd=root,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
        )
        return json.loads(done.stdout.splitlines()[-1]), done.returncode
    except subprocess.TimeoutExpired:
        return {"no_gpu": f"nothing was found out in {PROBE_S} s"}, 2
    except (IndexError, ValueError):
        return {"no_gpu": (done.stderr.strip().splitlines() or ["the probe failed"])[-1]}, 2


def reason(probe: dict[str, Any], status: int) -> str:
    missing = ", ".join(probe.get("missing", ()))
    return f"a package is missing ({missing})" if status == 1 else "no CUDA device"


def fingerprint(root: Path) -> str:
    """Return a digest of the source, which identifies steps that ran another source."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"):
                digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make card", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument

    def words(text: str) -> list[str]:
        return [word for word in text.replace(",", " ").split() if word]

    def minutes(text: str) -> float:
        if not 0 < float(text):  # also for NaN
            raise argparse.ArgumentTypeError(f"{text} must be more than 0")
        return float(text)

    build = ROOT / "build/card"
    add("phase", choices=PHASES, help="a: is it right? b: how fast is it? c: why?")
    add("--out", type=Path, default=build, help="where summary and archive are written")
    add("--work", type=Path, default=build, help="what later runs go on from, and compiled kernels")
    add("--wheels", default="", help="a folder of wheels of what this Python lacks")
    add(
        "--minutes",
        type=minutes,
        default=PHASE_S / 60,
        help="the phase ends within them (default 9)",
    )
    add("--only", type=words, default=[], help="steps whose names begin like that")
    add("--again", type=words, default=[], help="done steps to run again: all, failed, or names")
    add("--device", default="cuda", help="where managers run; emulator: to rehearse without a GPU")
    add("--requests", default="examples/requests.jsonl", help="what the managers answer")
    add("--anyway", action="store_true", help="run every command without a GPU, too: each fails")
    return parser


if __name__ == "__main__":
    if shutil.which("timeout") is None:
        sys.exit("error: the program `timeout` of coreutils is not there")
    sys.exit(main(sys.argv[1:]))

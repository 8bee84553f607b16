"""The summary of a phase, of at most 60 lines, and the archive of what it left."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from card_steps import Step
from outcomes import Outcomes
from running import Record, describe

MOST_LINES, WIDTH = 60, 150
_MOST_LOG, _MOST_FILE = 200_000, 1_500_000  # bytes in the archive
_OF_STEP = 12  # lines
_FOR_WRONG = 44
_NCU = ("Duration", "DRAM Throughput", "L2 Cache Throughput", "Registers Per Thread",
        "Achieved Occupancy", "Issue Slots Busy", "Local Memory Spilling Requests")  # fmt: skip


def summary(
    phase: str,
    probe: dict[str, Any],
    notes: Sequence[str],
    steps: Sequence[Step],
    records: Sequence[Record],
    folder: Path,
    code: str,
) -> list[str]:
    """What to read first: what is left, the machine, what is wrong or did not run, then figures."""
    by_name = {record.name: record for record in records}
    lines = [f"phase {phase}: {_counts(records)}", *_left(steps, by_name)]
    lines += [*_machine_lines(probe), *notes]
    if any(record.status is not None and record.code != code for record in records):
        lines.append(
            "some steps ran with other code, another GPTMANAGER_CUDA or another GPU: AGAIN=all "
            "runs them again"
        )
    ran = [step for step in steps if by_name.get(step.name)]
    wrong = [step for step in ran if by_name[step.name].status not in (0, None)]
    of_each = min(_OF_STEP, max(0, _FOR_WRONG - len(wrong)) // max(1, len(wrong)))
    for step in wrong:
        lines.append(f"- {step.name}: {describe(by_name[step.name])}")
        lines += [f"    {line}" for line in _wrong_lines(step, folder, of_each)]
    lines += _not_run(records)
    files = [step for step in ran if step.kind == "tests" and step not in wrong]
    files = [step for step in files if by_name[step.name].is_right]
    if files:
        lines.append(f"+ {len(files)} test files passed: {_num_tests(files, folder)} tests")
    rest = [step for step in ran if by_name[step.name].is_right and step.kind != "tests"]
    blocks = [(step, _details(step, folder)) for step in rest]
    room = max(0, MOST_LINES - len(lines) - len(blocks))
    share = room // max(1, sum(bool(own) for _, own in blocks))
    for step, own in blocks:
        lines.append(f"+ {step.name}: {describe(by_name[step.name])}")
        cut = own[: max(share, 1)]
        if len(own) > len(cut):
            cut[-1] += f"  (and {len(own) - len(cut)} more in the archive)"
        lines += [f"    {line}" for line in cut]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES - 1 :] = [f"... {len(lines) - MOST_LINES + 1} more lines in the archive"]
    return [line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines]


def write(out: Path, phase: str, lines: Sequence[str], folder: Path) -> None:
    """Write both anew, each in one move: whoever kills the run finds whole files."""
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines) + "\n"
    _replace(out / f"{phase}.txt", lambda file: file.write_text(text, "utf-8"))
    _replace(out / f"{phase}.tar.gz", lambda file: _pack(file, phase, text, folder))


def restore(out: Path, phase: str, folder: Path, but: Sequence[str]) -> list[str]:
    """Unpack the steps in the archive of an earlier run that have no record in `folder`.

    So a run on one machine goes on on another, and what only the archive in `out` has is not lost
    when it is written anew. `but`: steps whose results the other machine has kept, which run again.
    Return a note if there are more records now.
    """
    file, known = out / f"{phase}.tar.gz", {path.name for path in folder.glob("*.record")}
    left_out = {"summary.record", *(f"{name}.record" for name in but), *known}
    broken = OSError, EOFError, tarfile.TarError, zlib.error  # a file that was copied in part
    with contextlib.suppress(*broken), tarfile.open(file) as archive:
        for member in archive:
            name, data = Path(member.name).name, archive.extractfile(member)
            if data is not None and f"{name.partition('.')[0]}.record" not in left_out:
                (folder / name).write_bytes(data.read())
    is_more = len([*folder.glob("*.record")]) > len(known)
    return [f"it goes on from the records in {file}"] if is_more else []


def _replace(file: Path, write_to: Callable[[Path], object]) -> None:
    for old in file.parent.glob(f".{file.name}.*"):  # files of a killed run
        old.unlink(missing_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write_to(part)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)


def _pack(file: Path, phase: str, text: str, folder: Path) -> None:
    with tarfile.open(file, "w:gz") as archive:
        _add(archive, f"{phase}/summary.txt", text.encode())
        for path in sorted(folder.iterdir()):
            if not path.is_file():
                continue
            with contextlib.suppress(OSError):
                if path.suffix == ".log":
                    _add(archive, f"{phase}/{path.name}", _shortened(path.read_bytes()))
                elif path.stat().st_size <= _MOST_FILE:
                    _add(archive, f"{phase}/{path.name}", path.read_bytes())


def _add(archive: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    archive.addfile(info, io.BytesIO(data))


def _shortened(log: bytes) -> bytes:
    if len(log) <= _MOST_LOG:
        return log
    half = _MOST_LOG // 2
    return log[:half] + b"\n... cut ...\n" + log[-half:]


def _counts(records: Sequence[Record]) -> str:
    ended = [record for record in records if record.is_right or not record.is_left]
    right = sum(record.is_right for record in ended)
    none = sum(record.status is None for record in ended)
    return f"{right} steps ok, {len(ended) - right - none} not, {none} not run"


def _left(steps: Sequence[Step], by_name: Mapping[str, Record]) -> Iterator[str]:
    names = [step.name for step in steps if step.name not in by_name or by_name[step.name].is_left]
    if names:
        count = "1 step is" if len(names) == 1 else f"{len(names)} steps are"
        yield f"{count} left for the next run of the same command: {', '.join(names)}"


def _machine_lines(probe: dict[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {number}" for name, number in probe.get("versions", {}).items())
    yield probe.get("gpu") or f"no GPU: {probe.get('no_gpu', 'the probe did not run')}"
    yield f"python {probe.get('python')}, {versions}"
    if probe.get("cuda"):
        yield f"CUDA {probe['cuda']}, {probe.get('free_gib')} GiB free; {probe.get('smi', '')}"
    if probe.get("missing"):
        yield f"missing: {', '.join(probe['missing'])}"
    for name, error in probe.get("errors", {}).items():
        yield f"{name} cannot be imported: {error}"


def _not_run(records: Sequence[Record]) -> Iterator[str]:
    by_note: dict[str, list[str]] = {}
    for record in records:
        if record.status is None and not record.is_left:
            by_note.setdefault(record.note, []).append(record.name)
    for note, names in by_note.items():
        yield f"not run, {note}: {', '.join(names)}"


def _wrong_lines(step: Step, folder: Path, most: int) -> list[str]:
    """What a wrong step reports, or else how its log ends: an error is the last line."""
    found = [] if step.kind == "texts" else _details(step, folder)
    return found[:most] or _last_lines(step, folder, min(most, 3))


def _details(step: Step, folder: Path) -> list[str]:
    reader = {
        "tests": _test_lines,
        "kernels": _kernel_lines,
        "model": _model_lines,
        "ncu": _ncu_lines,
        "texts": _last_lines,
    }.get(step.kind)
    if reader is not None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return list(reader(step, folder))
    return []


def _last_lines(step: Step, folder: Path, count: int = 3) -> list[str]:
    try:
        text = (folder / f"{step.name}.log").read_text("utf-8", "replace")
    except OSError:
        return []
    lines = [line.strip() for line in text.splitlines()[1:] if line.strip()]
    return lines[max(0, len(lines) - count) :]


def _num_tests(steps: Sequence[Step], folder: Path) -> int:
    read = (Outcomes.read(folder / f"{step.name}.outcomes") for step in steps)
    return sum(outcome == "passed" for own in read for _, outcome in own.outcomes)


def _test_lines(step: Step, folder: Path) -> Iterator[str]:
    found = Outcomes.read(folder / f"{step.name}.outcomes")
    if not found.started:
        return
    yield found.text
    yield from (f"ended its process: {_short(node)}" for node in found.lost)
    failed = found.failed
    yield from (f"failed: {_short(node)}" for node in failed[:3])
    if len(failed) > 3:
        yield f"and {len(failed) - 3} more"
    if not failed and not found.lost:  # what it ran under has found something
        yield from _last_lines(step, folder)


def _short(node: str) -> str:
    return node.partition("::")[2]


def _kernel_lines(step: Step, folder: Path) -> Iterator[str]:
    """The wrong cases first, then the slowest for what they have to do."""
    report = json.loads((folder / f"{step.name}.json").read_text("utf-8"))
    ceilings = report["ceilings"]
    yield from _running(report)
    rows = sorted(report["kernels"], key=_order)
    for row in rows:
        ours, engines = row["engines"]["gptmanager"], row["engines"].items()
        peers = ", ".join(f"{name} {peer['times_ours']:.2f} x ours" for name, peer in engines
                          if "times_ours" in peer)  # fmt: skip
        if ours["status"] != "ok":
            yield f"{ours['status'].upper()} {row['case']}: {ours.get('note', '')}"
        else:
            figures = f"{ours['median_us']:.1f} us, {ours['times_floor']:.2f} x floor"
            yield f"{row['case']}: {figures}" + (f"; {peers}" if peers else "")
    yield (
        f"copy {ceilings['copy_tb_per_s']:.2f} TB/s, matmul "
        f"{ceilings['matmul_tflop_per_s']:.0f} TFLOP/s in this run"
    )


def _running(report: dict[str, Any]) -> Iterator[str]:
    """What the report of a benchmark that was killed says of its last moment."""
    if "running" in report:
        yield f"ended in {report['running']}"


def _order(row: dict[str, Any]) -> tuple[int, float]:
    ours = row["engines"]["gptmanager"]
    rank = {"wrong": 0, "failed": 0, "ok": 1}.get(ours["status"], 2)
    return rank, -ours.get("times_floor", 0.0)


def _model_lines(step: Step, folder: Path) -> Iterator[str]:
    report = json.loads((folder / f"{step.name}.json").read_text("utf-8"))
    yield from _running(report)
    check, steps, loads = (report.get(part, []) for part in ("check", "steps", "load"))
    if check:
        error = check.get("note") or f"error {check.get('error')} of {check.get('tolerance')}"
        yield f"logits: {check['status']}, {error}"
    for part in (steps, loads):
        if isinstance(part, dict):
            yield f"{part['status']}: {part['note']}"
    for row in steps if isinstance(steps, list) else []:
        if "trace" in row:
            yield f"trace: {row['trace']}"
        elif row["status"] == "ok":
            floor = f"{row['times_floor']:.2f} x floor" if "times_floor" in row else ""
            yield f"step of {row['batch']} x {row['context']}: {row['median_ms']:.2f} ms, {floor}"
        else:
            yield f"step of {row['batch']} x {row['context']}: {row['status']}: {row['note']}"
    for row in loads if isinstance(loads, list) else []:
        streaming = ", streaming" if row["streaming"] else ""
        if row["status"] != "ok":
            yield f"load{streaming}: {row['status']}: {row['note']}"
            continue
        speed = f"{row['output_tokens_per_second']:,.0f} output tokens/s{streaming}"
        floor = f", {row['times_floor']:.2f} x floor" if "times_floor" in row else ""
        yield f"load: {speed}{floor}"
    ablations = report.get("ablations", [])
    for row in ablations if isinstance(ablations, list) else []:
        if "steps" in row:
            speed = f"{row['output_tokens_per_second']:,.0f} output tokens/s"
            ratio = f", {row['ratio']:.2f} x plain" if "ratio" in row else ""
            yield f"{row['name']}: {speed}{ratio}{_ablated_steps(row)}"
    ceilings = report.get("ceilings")
    if ceilings:
        yield (
            f"copy {ceilings['copy_tb_per_s']:.2f} TB/s, matmul "
            f"{ceilings['matmul_tflop_per_s']:.0f} TFLOP/s in this run"
        )
    yield from report.get("notes", ())


def _ablated_steps(row: dict[str, Any]) -> str:
    steps = [it for it in row["steps"] if it["status"] == "ok"]
    return "".join(f", {it['batch']} x {it['context']}: {it['median_ms']:.2f} ms" for it in steps)


def _ncu_lines(step: Step, folder: Path) -> Iterator[str]:
    text = (folder / f"{step.name}.log").read_text("utf-8", "replace")
    start = text.index('"ID"')
    rows = list(csv.DictReader(io.StringIO(text[start:])))
    last = rows[-1]["ID"]
    own = {row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}".strip()
           for row in rows if row["ID"] == last}  # fmt: skip
    yield ", ".join(f"{name} {own[name]}" for name in _NCU if name in own)

"""Plants mistakes in the kernels, one at a time, and tells which of them the tests find.

    python tests/mutants --seed 0 --per-file 10 --file cuda/norms.cu

All work is done in copies of the project. The score of a file is the share of dead mutants among
those that compile and that `equivalent.txt` does not name. Survivors are written to --report.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import covering
from mutant_runs import (
    DEAD,
    EQUIVALENT,
    KILLED,
    NO_COMPILE,
    SURVIVED,
    TIMEOUT,
    Trial,
    check_tests,
    trees,
    try_all,
)
from mutation_operators import Mutant, mutants_of, sample
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = (KILLED, TIMEOUT, SURVIVED, EQUIVALENT, NO_COMPILE)
INTERRUPTED = 130
WIDE = 200  # more than the table has: no name is cut where it goes to a file


def main(
    arguments: Sequence[str], root: Path = ROOT, covering_tests=covering.covering_tests
) -> int:
    options = parser().parse_args(arguments)
    console = Console(stderr=True)
    files = options.file or covering.files(root)
    chosen = [
        mutant
        for file in files
        for mutant in sample(
            mutants_of(file, (root / file).read_text("utf-8")), options.per_file, options.seed
        )
    ]
    if options.list:
        print(*(diff(it) for it in chosen), sep="\n")
        return 0
    known = read_equivalent(Path(__file__).with_name("equivalent.txt").read_text("utf-8"))
    results = [Trial(it, EQUIVALENT) for it in chosen if identity(it) in known]
    pending = [it for it in chosen if identity(it) not in known]
    status = 0
    try:
        with trees(root, options.jobs, options.limit) as made:
            if not options.unchecked:
                with console.status("tests without a mistake"):
                    check_tests(made[0], files, lambda file: covering_tests(root, file))
                for tree in made[1:]:
                    tree.take_cache(made[0])
            with bar(console) as progress:
                task = progress.add_task("", total=len(pending))
                for trial in try_all(made, pending, lambda file: covering_tests(root, file)):
                    results.append(trial)
                    progress.update(task, advance=1, description=score(results))
    except KeyboardInterrupt:
        console.print(f"interrupted: {len(chosen) - len(results)} of {len(chosen)} were not tried")
        status = INTERRUPTED
    except ValueError as error:
        console.print(str(error), markup=False)
        return 1
    show(results, options.report)
    return status


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("mutants", description=__doc__.partition("\n")[0])
    made.add_argument("--seed", type=int, default=0, help="what is drawn (0)")
    made.add_argument("--per-file", type=int, default=10, help="mutants of each file (10)")
    made.add_argument("--file", action="append", help="only of this file; may be given again")
    made.add_argument("--jobs", type=int, default=2, help="tests at a time (2)")
    made.add_argument("--limit", type=float, default=300, help="seconds for one mutant (300)")
    made.add_argument("--report", type=Path, default=ROOT / "build" / "mutants.diff")
    made.add_argument("--list", action="store_true", help="print the mutants, and try none")
    made.add_argument("--unchecked", action="store_true", help="no tests without a mistake before")
    return made


def bar(console: Console) -> Progress:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    return Progress(*columns, console=console)


Identity = tuple[str, str, str]


def identity(mutant: Mutant) -> Identity:
    """What stays where other lines change."""
    return mutant.file, mutant.before.strip(), mutant.after.strip()


def read_equivalent(text: str) -> dict[Identity, str]:
    """Mutant -> why it changes nothing that matters."""
    found = {}
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    for block in "\n".join(lines).split("\n\n"):
        if block.strip():
            file, before, after, *reason = block.strip("\n").split("\n")
            own = (file, before.removeprefix("- ").strip(), after.removeprefix("+ ").strip())
            found[own] = " ".join(reason).strip()
    return found


def score(trials: Sequence[Trial]) -> str:
    count = Counter(trial.verdict for trial in trials)
    dead = sum(count[verdict] for verdict in DEAD)
    return f"{100 * dead / (dead + count[SURVIVED]):.1f} %" if dead + count[SURVIVED] else "-"


def table(trials: Sequence[Trial]) -> Table:
    made = Table("file", *VERDICTS, "score")
    for file in sorted({trial.mutant.file for trial in trials}):
        own = [trial for trial in trials if trial.mutant.file == file]
        count = Counter(trial.verdict for trial in own)
        made.add_row(file, *(str(count[verdict]) for verdict in VERDICTS), score(own))
    count = Counter(trial.verdict for trial in trials)
    made.add_section()
    made.add_row("all", *(str(count[verdict]) for verdict in VERDICTS), score(trials))
    return made


def diff(mutant: Mutant) -> str:
    lines = difflib.unified_diff([mutant.before], [mutant.after], n=0, lineterm="")
    changed = "\n".join(list(lines)[3:])
    return f"{mutant.file}:{mutant.line} ({mutant.kind})\n{changed}\n"


def show(trials: Sequence[Trial], report: Path) -> None:
    """The table, and the survivors as a file."""
    write_report(report, trials)
    Console(width=WIDE).print(table(trials))
    print(f"survivors: {report}", file=sys.stderr)


def write_report(path: Path, trials: Sequence[Trial]) -> None:
    survivors = [trial.mutant for trial in trials if trial.verdict == SURVIVED]
    survivors.sort(key=lambda it: (it.file, it.line))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(diff(mutant) for mutant in survivors), "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

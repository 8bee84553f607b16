"""A plugin of pytest that notes the outcome of each test in a file, and leaves out what is there.

The environment variable CARD_OUTCOMES names the file. It has a line "started NODE" of each that
began, "passed NODE" or another outcome behind it, and "end" when no test is left.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

END = "end"


@dataclass(frozen=True)
class Outcomes:
    """`outcomes`: of each test that has ended, by its node id."""

    started: tuple[str, ...] = ()
    outcomes: tuple[tuple[str, str], ...] = ()
    has_ended: bool = False

    @classmethod
    def read(cls, file: Path) -> Outcomes:
        try:
            lines = file.read_text("utf-8").splitlines()
        except OSError:
            return cls()
        pairs = [line.partition(" ")[::2] for line in lines]
        started = tuple(dict.fromkeys(node for word, node in pairs if word == "started"))
        ended = {node: word for word, node in pairs if node and word != "started"}
        return cls(started, tuple(ended.items()), bool(lines) and lines[-1] == END)

    @property
    def failed(self) -> list[str]:
        return [node for node, outcome in self.outcomes if outcome == "failed"]

    @property
    def lost(self) -> list[str]:
        """Tests that ended their process."""
        known = dict(self.outcomes)
        return [node for node in self.started if node not in known]

    @property
    def text(self) -> str:
        counts = Counter(outcome for _, outcome in self.outcomes)
        parts = [f"{counts[name]} {name}" for name in ("passed", "failed", "skipped")
                 if counts[name]]  # fmt: skip
        if self.lost:
            parts.append(f"{len(self.lost)} ended their process")
        return (", ".join(parts) or "no tests") + ("" if self.has_ended else ", then cut off")


def _note(line: str) -> None:
    with open(os.environ["CARD_OUTCOMES"], "a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def pytest_collection_modifyitems(config, items):
    known = set(Outcomes.read(Path(os.environ["CARD_OUTCOMES"])).started)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]


def pytest_runtest_logstart(nodeid):
    _note(f"started {nodeid}")


def pytest_runtest_logreport(report):
    if report.failed or report.when == "call" or (report.skipped and report.when == "setup"):
        _note(f"{report.outcome} {report.nodeid}")


def pytest_sessionfinish(session):
    """Not where an error broke the session off."""
    known = set(Outcomes.read(Path(os.environ["CARD_OUTCOMES"])).started)
    if session.exitstatus in (0, 1, 5) and all(item.nodeid in known for item in session.items):
        _note(END)

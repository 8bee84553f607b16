"""Compares the answers of two runs of `gptmanager run`, request by request.

    python tests/card/compare_texts.py cpu.jsonl cuda.jsonl --least 1.0

Exit status: 0 at least the share `--least` of the answers is the same, 1 less, 2 a file is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("expected", type=Path)
    parser.add_argument("found", type=Path)
    parser.add_argument("--least", type=float, default=1.0, help="share of equal answers")
    options = parser.parse_args(arguments)
    try:
        expected, found = (_answers(file) for file in (options.expected, options.found))
    except OSError as error:
        print(f"nothing to compare: {error}")
        return 2
    if not expected or not found:
        print("nothing to compare: one of both runs has answered nothing")
        return 2
    same = [number for number, answer in expected.items() if found.get(number) == answer]
    for number in [number for number in expected if number not in same][:3]:
        print(f"request {number}: {_start(expected[number])} and {_start(found.get(number))}")
    print(f"{len(same)} of {len(expected)} answers are the same")
    return int(len(same) < options.least * len(expected))


def _answers(file: Path) -> dict[Any, Any]:
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]
    return {row["request_id"]: row.get("output_ids", row.get("error")) for row in rows}


def _start(answer: Any) -> str:
    text = str(answer)
    return text if len(text) < 80 else f"{text[:77]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

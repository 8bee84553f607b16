"""`write_table`: writes the times and the tokens of each request of a replayed run as CSV."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from gptmanager.errors import write_error
from gptmanager.loop.responses import REQUEST_METRICS
from gptmanager.replay.replaying import EndedRequest

COLUMNS = ("request_id", "outcome", "arrival_s", *REQUEST_METRICS, "per_token_s", "tokens_per_s")


def write_table(path: Path, ended: Iterable[EndedRequest]) -> None:
    """Write a line for each request, in the order of their ends. Raise an error if it fails."""
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(COLUMNS)
            writer.writerows(map(_cells, ended))
    except OSError as error:
        raise write_error(f"--table {path}", error) from error


def _cells(ended: EndedRequest) -> Iterator[int | str]:
    """Yield the cells of a line; a number that is unknown, or not finite, is an empty cell."""
    yield ended.request_id
    yield ended.outcome
    yield _shown(ended.arrival)
    metrics = dict(zip(REQUEST_METRICS, ended.metrics, strict=False))
    for name in REQUEST_METRICS:
        yield _shown(metrics.get(name, math.nan))
    tokens, last = metrics.get("generated_tokens", 0), metrics.get("last_token_s", math.nan)
    between = last - metrics.get("first_token_s", math.nan)
    yield _shown(between / (tokens - 1) if tokens > 1 else math.nan)
    yield _shown(tokens / last if last > 0 else math.nan)


def _shown(number: float) -> str:
    return f"{number:.9g}" if math.isfinite(number) else ""

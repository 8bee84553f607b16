"""Runs `gptmanager journal`: shows and checks the journal of a manager."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from gptmanager.errors import ConfigError, quoted_path
from gptmanager.journal.accepted import AcceptedRequests
from gptmanager.journal.entries import Entry
from gptmanager.journal.segments import JournalFolder, Segment
from gptmanager.terminal.tables import print_report


def main(options: argparse.Namespace) -> int:
    """Run the command, and return its exit status.

    Raise ConfigError if the folder has no journal, and JournalError if the journal is damaged.
    """
    folder = JournalFolder(options.folder)
    found = folder.read() if options.folder.is_dir() else None
    if found is None:
        raise ConfigError(f"{quoted_path(folder.path)} has no journal")
    report = report_of(folder, found)
    print_report(report, _lines(report), as_json=options.json)
    return 0


def report_of(folder: JournalFolder, segment: Segment) -> dict[str, Any]:
    """Return the content of `segment` as JSON values. Raise JournalError if it is damaged.

    docs/reliability.md describes the states of requests.
    """
    accepted = AcceptedRequests(folder, 0, syncs=False)
    requests = [_request(accepted, folder, *it) for it in segment.entries.items()]
    return {
        "segment": str(segment.path),
        "checkpoint": segment.checkpoint,
        "records": segment.num_records,
        "bytes": segment.end,
        "torn_bytes": segment.torn,
        "requests": requests,
    }


def _request(
    accepted: AcceptedRequests, folder: JournalFolder, request_id: int, entry: Entry
) -> dict[str, Any]:
    read = accepted.read(entry.accepted)
    for digest in read.objects.values():
        folder.get(digest)
    tensors = read.request.tensors
    prompt: Any = tensors.get("input_ids", ())
    return {
        "request_id": request_id,
        "accepted": time.strftime("%Y-%m-%d %H:%M:%S%z", time.localtime(read.time)),
        "prompt_tokens": len(np.asarray(prompt).reshape(-1)),
        "streaming": bool(read.request.is_streaming),
        "sent_tokens": len(entry.tokens),
        "resumes": entry.num_starts,
        "state": "final" if entry.last else "sent" if entry.tokens else "journaled",
        "objects": dict(read.objects),
    }


def _lines(report: dict[str, Any]) -> list[str]:
    lines = [
        f"{report['segment']}: {report['records']} records, {report['bytes']} bytes, checkpoint "
        f"{report['checkpoint']}"
    ]
    if report["torn_bytes"]:
        lines.append(
            f"the last record, at offset {report['bytes']}, is torn: {report['torn_bytes']} bytes "
            "will be cut off"
        )
    lines.append(f"{len(report['requests'])} unfinished requests")
    lines += [
        f"  {it['request_id']}: accepted {it['accepted']}, prompt {it['prompt_tokens']}, sent "
        f"{it['sent_tokens']}{', streaming' if it['streaming'] else ''}"
        f"{', final but not acknowledged' if it['state'] == 'final' else ''}"
        for it in report["requests"]
    ]
    return lines

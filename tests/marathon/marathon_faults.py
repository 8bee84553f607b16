"""Fails every call once: does each request get its one final response, and its right tokens?

make marathon-faults MOST=60

One manager with a journal runs the same requests again and again: adapters, grammars, drafts,
beams, streams, seeds. Each time one call fails, at its first, its second, ... call: a callback, a
logits post-processor, the executor, a job on an adapter, or the disk of the journal. Whatever does
not end with an error must be as without a failure, and nothing unfinished may be left, in the
manager or in the journal. Prints JSON, and exits with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import errno
import functools
import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kill_record import Output, line_of, outputs_of
from marathon_soak import MODEL, canaries

import gptmanager.journal.journal as journal_module
from gptmanager import (
    GptManager,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
)
from gptmanager.config import PromptLookup
from gptmanager.executor.torch_executor import TorchExecutor
from gptmanager.host.adapter_loader import AdapterLoader
from gptmanager.journal import opening, segments
from gptmanager.journal.segments import JournalFolder
from gptmanager.lifecycle.state import ManagerState

NUM_REQUESTS = 9
_PATIENCE_S = 300.0


class Traps:
    """Counts the calls of each site, and has one of them fail. Any thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._armed: tuple[str, int] | None = None
        self._lock = threading.Lock()

    def arm(self, site: str, number: int) -> None:
        with self._lock:
            self.counts.clear()
            self._armed = site, number

    @property
    def is_sprung(self) -> bool:
        return self._armed is None

    def step_on(self, site: str) -> None:
        """Count a call of `site`; raise if it is the one that is to fail."""
        with self._lock:
            self.counts[site] += 1
            if self._armed != (site, self.counts[site]):
                return
            self._armed = None
        if site.startswith("journal"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise RuntimeError("injected")

    def before(self, site: str, owner: Any, name: str) -> Callable[[], None]:
        """Have calls of `owner.name` step on the trap first. Returns what ends that."""
        real = getattr(owner, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            self.step_on(site)
            return real(*arguments, **keywords)

        setattr(owner, name, call)
        return lambda: setattr(owner, name, real)


class Host:
    """Returns `canaries`, and counts what the contract promises: one final response each."""

    def __init__(self, traps: Traps) -> None:
        self.canaries = canaries(random.Random(1), NUM_REQUESTS - 1)
        self.canaries.append(self._processed())
        self._traps = traps
        self._waiting: list[Any] = []
        self._lines: list[dict[str, Any]] = []
        self._open: set[int] = set()
        self._next = 0
        self._all_ended = threading.Event()

    def _processed(self) -> Any:
        """A request with a Python post-processor, which changes nothing."""
        found = canaries(random.Random(2), 1)[0]
        found.kind = "processor"
        found.keywords["logits_post_processor"] = lambda *_: self._traps.step_on("processor")
        return found

    def round(self) -> dict[str, Output]:
        """Have all canaries answered, and return what was answered, by their numbers."""
        self._lines.clear()
        self._all_ended.clear()
        first = self._next
        self._next += len(self.canaries)
        self._open = set(range(first, self._next))
        self._waiting = [it.make(first + number) for number, it in enumerate(self.canaries)]
        if not self._all_ended.wait(_PATIENCE_S):
            raise AssertionError(f"without a final response: {sorted(self._open)}")
        found = outputs_of(self._lines)
        return {number: found[first + number] for number in range(len(self.canaries))}

    def get(self, room: int) -> list[Any]:
        if self._waiting:
            self._traps.step_on("get")
        taken, self._waiting = self._waiting[:room], self._waiting[room:]
        return taken

    def send(self, request_id: int, tensors: Any, is_final: bool, error: str) -> None:
        self._lines.append(line_of(request_id, tensors, is_final, error))
        if is_final:
            self._open.discard(request_id)
        try:
            self._traps.step_on("send")
        finally:
            if not self._open:
                self._all_ended.set()

    def poll(self) -> set[int]:
        self._traps.step_on("poll")
        return set()

    def count(self, record: str) -> None:
        self._traps.step_on("stats")

    def restore_processor(self, request_id: int, client_id: int | None) -> None:
        return None


# what a failure of a site may end requests with; the others have no effect on any request
_ERRORS = {
    "send": "CallbackError",
    "processor": "CallbackError",
    "forward": "StepError",
    "sample": "StepError",
    "result": "StepError",
    "adapter": "AdapterError",
    "journal write": "CapacityError",
    "journal sync": "CapacityError",
    "journal rename": "CapacityError",  # a full disk is tried again with a new segment
}
_SITES = ("get", "send", "poll", "stats", "processor", "forward", "sample", "result", "adapter")
SITES = (*_SITES, "journal write", "journal sync", "journal rename")


class Faults:
    """A manager whose calls fail. `on_full`: of its journal."""

    def __init__(self, folder: Path, on_full: Any = "refuse") -> None:
        self.traps = Traps()
        self.host = Host(self.traps)
        self._folder = folder
        before = self.traps.before
        journal_module._RETRY_S = 0.0  # so that the next round finds a disk with space
        self._undo = [
            *(before(name, TorchExecutor, name) for name in ("forward", "sample", "result")),
            before("adapter", AdapterLoader, "_read_adapter"),
            before("journal write", segments, "write_all"),
            before("journal write", journal_module, "write_all"),
            before("journal sync", os, "fdatasync"),
            before("journal rename", os, "rename"),
        ]
        real = opening.Journal  # its segments are full several times in a round
        opening.Journal = functools.partial(real, segment_bytes=300)
        self._undo.append(lambda: setattr(opening, "Journal", real))
        self._manager = GptManager(
            MODEL,
            ModelType.INFLIGHT_FUSED_BATCHING,
            2,
            None,
            *(self.host.get, self.host.send, self.host.poll, self.host.count),
            OptionalParams(
                journal_path=folder,
                journal_sync="always",
                journal_on_full=on_full,
                restore_processor_cb=self.host.restore_processor,
                kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=8),
                peft_cache_manager_config=PeftCacheManagerConfig(
                    num_host_module_layer=10_000, num_device_module_layer=4000
                ),
                max_batch_size=8,
                max_seq_len=160,
                idle_poll_s=0.002,
                deterministic=True,
                exclude_input_in_output=True,
                speculative_decoding_config=PromptLookup(),
            ),
        )
        self._expected = self.host.round()
        self.traps.arm("none", 0)
        self.host.round()
        self.calls = dict(self.traps.counts)

    def close(self) -> None:
        self._manager.shutdown(timeout=_PATIENCE_S)
        for undo in self._undo:
            undo()

    def fail(self, site: str, number: int) -> tuple[Counter[str], list[str]]:
        """Have the `number`-th call of `site` fail. Returns how requests ended, and failures."""
        self.traps.arm(site, number)
        found, ends, failures = self.host.round(), Counter[str](), []
        for canary, output in found.items():
            right, last = self._expected[canary], output.last
            assert last is not None
            kind = last["error"].partition(":")[0]
            ends[kind or "equal"] += 1
            is_prefix = all(right.columns.get(at) == it for at, it in output.columns.items())
            if output.doubled or not is_prefix:
                failures.append(f"request {canary}: {output.doubled} doubled, {output.columns}")
            if not kind and output.columns != right.columns:
                failures.append(f"request {canary} lacks tokens, without an error")
            if kind and kind != _ERRORS.get(site):
                failures.append(f"request {canary} ends with {last['error'][:200]}")
        return ends, failures + self._left_over()

    def _left_over(self) -> list[str]:
        manager, failures = self._manager, []
        if not manager.wait_idle(_PATIENCE_S) or manager.state is not ManagerState.RUNNING:
            failures.append(f"the manager is {manager.state}: {manager.exception!r}")
            return failures
        report = manager.audit()
        failures += map(str, report.problems[:3])
        found = JournalFolder(self._folder).read()
        if found is None or found.entries:
            failures.append(f"the journal has {found and [*found.entries]}")
        return failures


def run(most: int, on_full: Any = "refuse", sites: tuple[str, ...] = SITES) -> dict[str, Any]:
    """Fail up to `most` calls of each site, evenly over a round."""
    failures, told, ends = [], {}, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        faults = Faults(Path(folder) / "journal", on_full)
        try:
            for site in sites:
                calls = faults.calls.get(site, 0)
                numbers = sorted(
                    {1 + index * calls // most for index in range(most)} if calls else ()
                )
                sprung = 0
                for number in numbers:
                    found, wrong = faults.fail(site, number)
                    ends += found
                    sprung += faults.traps.is_sprung
                    failures += [f"{site}, call {number}: {it}" for it in wrong]
                told[site] = sprung
                if calls and not sprung:
                    failures.append(f"no call of {site} has failed")
        finally:
            faults.close()
    return {
        "on_full": on_full,
        "failed_calls": told,
        "ends": dict(ends),
        "failures": failures[:20],
        "num_failures": len(failures),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--most", type=int, default=60, help="calls of a site that fail")
    options = parser.parse_args()
    logging.disable()  # thousands of errors, all of them asked for
    began, missed = time.monotonic(), False
    for on_full in ("refuse", "continue"):
        told = run(options.most, on_full)
        missed = missed or bool(told["failures"])
        print(json.dumps({"seconds": round(time.monotonic() - began, 1), **told}))
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

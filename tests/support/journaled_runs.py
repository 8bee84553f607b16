"""Runs of a loop with a journal, without a thread, which may die at any byte of the journal."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from loop_driver import ListHost, LoopDriver

from gptmanager import InferenceRequest, OptionalParams
from gptmanager.config import Delivered
from gptmanager.journal.accepted import AcceptedRequests
from gptmanager.journal.journal import Journal
from gptmanager.journal.journaled_host import JournaledHost
from gptmanager.journal.resuming import Resumption, resume
from gptmanager.request.inference_request import NamedTensor
from gptmanager.step import Intake


class Output:
    """What a host has of a request after one or several lives of a manager."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.num_finals = 0
        self.errors: list[str] = []
        self.reason = 0

    def add(self, tensors: list[NamedTensor], is_final: bool, error: str) -> None:
        by_name = dict(tensors)
        if error.startswith("DuplicateRequestIdError"):
            return
        assert not self.num_finals, "a response follows the final one"
        self.num_finals += is_final
        if error:
            self.errors.append(error)
        if "output_offset" in by_name:
            assert int(by_name["output_offset"][0]) == len(self.tokens), "a gap, or a repetition"
        if "output_ids" in by_name:
            self.tokens += by_name["output_ids"][0, 0].tolist()
        if "finish_reasons" in by_name:
            self.reason = int(by_name["finish_reasons"][0, 0])


def outputs_of(*lives: Any) -> dict[int, Output]:
    """What a host has of each request; a response is its time, id, tensors, and so on."""
    found: dict[int, Output] = {}
    for life in lives:
        for _, request_id, tensors, is_final, error in life:
            found.setdefault(request_id, Output()).add(tensors, is_final, error)
    return found


class Host(ListHost):
    """A host that remembers what it got, and how long the journal was then."""

    def __init__(self) -> None:
        super().__init__()
        self.got: list[tuple[int, int, list[NamedTensor], bool, str]] = []
        self.first: Intake | None = None
        self.size = lambda: 0

    def fetch(self, room: int | None, num_active: int) -> Intake:
        first, self.first = self.first, None
        if first is not None:
            return first
        intake = super().fetch(room, num_active)
        ended = {request_id for _, request_id, _, is_final, _ in self.got if is_final}
        left = [request for request in intake.requests if request.request_id not in ended]
        return replace(intake, requests=tuple(left))

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        self.got.append((self.size(), request_id, tensors, is_final, error))
        if self.fail_to_send(request_id, is_final) and not is_final:
            super().respond(request_id, tensors, is_final, error)


class JournaledRun:
    """One life of a loop on the journal in `folder`; `record` is the host's record, if it keeps
    one: what it has of each request.
    """

    def __init__(
        self,
        folder: Path,
        requests: list[InferenceRequest],
        *,
        record: dict[int, Delivered] | None = None,
        restore_processor: Any = None,
        seed: int = 0,
        segment_bytes: int = 64 << 20,
        on_full: Any = "continue",
        sync: Any = "never",
        max_resumes: int = 5,
        max_batch_size: int = 256,
        check: Any = lambda: None,
        **options: Any,
    ) -> None:
        restores = None if record is None else record.get
        self.driver = LoopDriver(**{"chunked": True, **options})
        self.journal = Journal(
            folder,
            "a checkpoint",
            sync=sync,
            on_full=on_full,
            keeps_responses=restores is not None,
            segment_bytes=segment_bytes,
        )
        accepted = AcceptedRequests(self.journal.folder, seed, syncs=self.journal.syncs)
        params = OptionalParams(
            journal_path=folder,
            journal_max_resumes=max_resumes,
            restore_cb=restores,
            restore_processor_cb=restore_processor,
        )
        try:
            self.resumption: Resumption = resume(self.journal, accepted, params)
        except Exception:
            self.journal.close()
            raise
        self.journal.commit(None, [(request_id, b"") for request_id in self.resumption.ended])
        first = self.resumption.requests[:max_batch_size]
        self.journal.note_resumed([request.request_id for request in first])
        loop, self.host = self.driver.loop, Host()
        self.driver.host = self.host
        self.host.size = self.size
        self.journaled = JournaledHost(self.host, self.journal, accepted, check)
        self.journaled.table, loop.table.host = loop.table, self.journaled
        self.journaled.held.extend(self.resumption.responses)
        self.journaled.flush()
        if self.resumption.requests:
            self.host.first = Intake(
                0.0,
                tuple(self.resumption.requests),
                resumed=tuple(self.resumption.progress),
            )
        self.host.callbacks.submit(*requests)

    def size(self) -> int:
        """The length of the segment."""
        return self.journal._size

    def run(self, max_iterations: int = 1000) -> None:
        loop = self.driver.loop
        for _ in range(max_iterations):
            worked = loop.iterate()
            self.journaled.flush()
            if not worked and not loop.active:
                break
        else:
            raise AssertionError(f"not done: {loop.active}")
        self.journal.close()

    def segment(self) -> Path:
        [path] = self.journal.folder.path.glob("segment-*")
        return path


def die_at(folder: Path, size: int) -> Path:
    """Return a copy of a journal that ends after `size` bytes of its segment."""
    copy = folder.with_name(f"{folder.name}-{size}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    [segment] = copy.glob("segment-*")
    with segment.open("r+b") as file:
        file.truncate(size)
    return copy

"""`Journal`: writes the records of one manager, and knows which of its requests are unfinished.

This module decides when data is forced to the disk, when a new segment starts, and what happens
when the disk is full. It knows only the ids, tokens and bytes of requests.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import IO, Literal

from gptmanager.errors import ConfigError, JournalError, quoted_path
from gptmanager.journal.entries import (
    Entries,
    Entry,
    Sent,
    ids_payload,
    named_payload,
    unfinished_payload,
)
from gptmanager.journal.records import Kind, record
from gptmanager.journal.segments import JournalFolder, write_all
from gptmanager.lifecycle.clock import monotonic
from gptmanager.lifecycle.log import logger

SEGMENT_BYTES = 64 << 20
_RETRY_S = 1.0  # interval between attempts to write to a full disk

Sync = Literal["always", "never"] | float
OnFull = Literal["refuse", "continue"]


class Journal:
    """The journal in `folder`, for a checkpoint with the digest `checkpoint`.

    `sync`: with "always", each iteration's records are forced to the disk before its responses are
    sent. A number is the interval in milliseconds at which a thread forces records to the disk.
    With "never", the system decides. `on_full`: while the disk is full, "refuse" accepts no
    requests, and "continue" serves requests without a journal. With `keeps_responses`, final
    responses are stored until they are delivered. `entries` has the requests without a delivered
    final response. Calls of the methods must not overlap.

    The constructor raises ConfigError if the journal belongs to another checkpoint or is in use by
    another manager, and JournalError if it is damaged or cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        checkpoint: str,
        *,
        sync: Sync = 20,
        on_full: OnFull = "refuse",
        keeps_responses: bool = False,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.folder = JournalFolder(folder)
        self.entries = Entries()
        self.is_full = False
        self.keeps_responses = keeps_responses
        self._sync, self._on_full, self._checkpoint = sync, on_full, checkpoint
        self._segment_bytes = self._limit = segment_bytes
        self._retry_at = 0.0
        self._size = 0
        self._file: IO[bytes] | None = None
        self._syncing: SyncThread | None = None
        self.folder.create()
        self._lock = self.folder.lock()
        try:
            self._open()
        except BaseException as error:
            self._close_file()
            self.folder.unlock(self._lock)
            if not isinstance(error, OSError):
                raise
            where = quoted_path(self.folder.path)
            raise JournalError(f"cannot write the journal {where}: {error.strerror}") from error

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        found = self.folder.read()
        if found is not None:
            if found.checkpoint != self._checkpoint:
                raise ConfigError(
                    f"the journal {quoted_path(self.folder.path)} belongs to another checkpoint: "
                    f"its digest is {found.checkpoint}, but this one has {self._checkpoint}; use "
                    "another folder"
                )
            if found.torn:
                logger.warning(
                    "%s: the last record, at offset %d, was not written completely: %d bytes are "
                    "cut off",
                    *(quoted_path(found.path), found.end, found.torn),
                )
            self.entries = found.entries
        self._begin_segment()
        if self._on_full == "refuse":
            self.folder.take_reserve()
        if isinstance(self._sync, (int, float)):
            self._syncing = SyncThread(self._sync / 1000)

    @property
    def refuses(self) -> bool:
        """Whether requests are refused while the disk is full."""
        return self._on_full == "refuse"

    @property
    def syncs(self) -> bool:
        """Whether data is ever forced to the disk."""
        return self._sync != "never"

    # Records ---------------------------------------------------------------------------------

    def accept(self, requests: Sequence[tuple[int, bytes]]) -> bool:
        """Write accepted requests, as ids and bytes.

        Return False if the requests must be refused, because the journal cannot be written.
        """
        data = b"".join(record(Kind.ACCEPTED, named_payload(*request)) for request in requests)
        found = {request_id: Entry(accepted) for request_id, accepted in requests}
        if self._on_full == "refuse":
            if (self.is_full and not self._retry()) or not self._append(data):
                return False
            self.entries.update(found)
        else:
            self.entries.update(found)  # first, because `_write` may write all entries again
            self._write(data)
        return True

    def note_resumed(self, request_ids: Sequence[int]) -> None:
        """Write that these requests may run now. Raise JournalError as `commit` does."""
        for request_id in request_ids:
            self.entries[request_id].num_starts += 1
        if request_ids:
            self._write(record(Kind.RESUMED, ids_payload(request_ids)))

    def commit(
        self,
        sent: Sent | None,
        ends: Sequence[tuple[int, bytes]] = (),
        delivered: Sequence[int] = (),
    ) -> None:
        """Write the data that is about to be sent.

        `sent` has tokens, which the entries contain already. `ends` has the ids of requests that
        end, each with the final response to store, or b"" to store none. `delivered` has the ids of
        requests with a stored final response that has now been delivered. With `on_full` "refuse",
        raise JournalError if the data cannot be written even after the reserve is freed.
        """
        parts = []
        if delivered:
            parts.append(record(Kind.DELIVERED, ids_payload(dict.fromkeys(delivered))))
        if sent is not None and sent.ids:
            parts.append(record(Kind.SENT, sent.payload()))
        stored = [(i, last) for i, last in ends if last]
        parts += [record(Kind.LAST_RESPONSE, named_payload(*end)) for end in stored]
        # an id may end twice, if GetInferenceRequests returned it twice; the journal has it once
        ids = list(dict.fromkeys(request_id for request_id, last in ends if not last))
        if ids:
            parts.append(record(Kind.FINAL, ids_payload(ids)))
        for request_id, last in stored:
            self.entries[request_id].last = last
        for request_id in (*delivered, *ids):
            self.entries.pop(request_id, None)
        if parts:
            self._write(b"".join(parts))
            if self._size > self._limit:
                self._rotate()

    # The disk --------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        """Append `data`. If that fails, use the reserve's space, or continue without a journal."""
        if self.is_full and self._on_full == "continue":
            self._retry()  # if it succeeds, the new segment has the content of `data`
            return
        if self._append(data):
            return
        if self._on_full == "refuse" and not (self._rewrite() or self._append(data)):
            raise JournalError(
                "the journal cannot be written, not even in place of its reserve: free space on "
                "its disk, then start the manager again"
            )

    def _rewrite(self) -> bool:
        """If a sync has failed, write all unfinished requests again, because data may be lost.

        Return whether a new segment was written.
        """
        if self._syncing is None or self._syncing.error is None:
            return False
        try:
            self._begin_segment()
        except (OSError, JournalError):
            return False
        self._syncing.error = None
        return True

    def _append(self, data: bytes) -> bool:
        """Append `data` to the segment. If that fails, free the reserve and return False."""
        assert self._file is not None
        file = self._file.fileno()
        try:
            if self._syncing is not None and self._syncing.error is not None:
                raise self._syncing.error
            write_all(file, data)
            if self._sync == "always":
                os.fdatasync(file)
        except OSError as error:
            self.fail(error)
            with suppress(OSError):  # no other record may follow a part of a record
                os.ftruncate(file, self._size)
            return False
        self._size += len(data)
        if self._syncing is not None:
            self._syncing.note(file)
        return True

    def fail(self, error: OSError) -> None:
        """Note a failed write, which counts as a full disk, and free the reserve."""
        if not self.is_full:
            then = (
                "new requests are refused"
                if self._on_full == "refuse"
                else "requests run without a journal: after a death, what they send now may repeat"
            )
            logger.error("the journal cannot be written: %s; until it can, %s", error, then)
        self.is_full = True
        self._retry_at = monotonic() + _RETRY_S
        if self._on_full == "refuse":
            self.folder.free_reserve()

    def _retry(self) -> bool:
        """Try to write to a full disk, at most once a second. Return whether that succeeds."""
        if monotonic() < self._retry_at:
            return False
        self._retry_at = monotonic() + _RETRY_S
        try:
            if self._on_full == "refuse":
                self.folder.take_reserve()
            self._begin_segment()
        except (OSError, JournalError):
            return False
        if self._syncing is not None:
            self._syncing.error = None
        logger.warning("the journal can be written again")
        self.is_full = False
        return True

    def _rotate(self) -> None:
        try:
            self._begin_segment()
        except (OSError, JournalError) as error:
            self._limit = self._size + self._segment_bytes
            logger.warning("the journal cannot begin a new segment: %s", error)

    def _begin_segment(self) -> None:
        unfinished = [unfinished_payload(*item) for item in self.entries.items()]
        file = self.folder.begin(self._checkpoint, unfinished, syncs=self.syncs)
        old, self._file = self._file, file
        if old is not None:
            if self._syncing is not None:
                self._syncing.forget()
            old.close()
        self._size = os.fstat(file.fileno()).st_size
        self._limit = 2 * self._size + self._segment_bytes

    def close(self) -> None:
        """Force the remaining data to the disk if `syncs`, and unlock the folder."""
        if self._syncing is not None:
            self._syncing.stop()
        file, self._file = self._file, None
        if file is not None:
            if self.syncs:
                with suppress(OSError):
                    os.fdatasync(file.fileno())
            file.close()
            self.folder.free_reserve()
        self.folder.unlock(self._lock)


class SyncThread:
    """Forces a file's data to the disk every `interval_s` seconds while the file grows.

    `error` is the latest failure. The thread wakes as seldom as it can, because it takes the GIL
    from the loop each time.
    """

    def __init__(self, interval_s: float) -> None:
        self.error: OSError | None = None
        self._interval_s = interval_s
        self._lock = threading.Lock()  # held while the file must stay open
        self._file = -1  # the file descriptor of a file with new data, or -1
        self._rests, self._ends = threading.Event(), threading.Event()
        self._wakes = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gptmanager-journal", daemon=True)
        self._thread.start()

    def note(self, file: int) -> None:
        """Note that `file` has new data."""
        self._file = file
        if self._rests.is_set():
            self._rests.clear()
            self._wakes.set()

    def forget(self) -> None:
        """Stop syncing the file before it is closed, because a newer segment replaces it."""
        with self._lock:
            self._file = -1

    def stop(self) -> None:
        self._ends.set()
        self._wakes.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ends.wait(self._interval_s):
            if self._file < 0:  # nothing was written in the last interval
                self._rests.set()
                if self._file < 0:
                    self._wakes.wait()
                self._wakes.clear()
                continue
            with self._lock:
                file, self._file = self._file, -1
                if file >= 0:
                    try:
                        os.fdatasync(file)
                    except OSError as error:
                        self.error = error

"""The files of a journal's folder: segments, objects, the lock and the reserve.

A segment starts with all unfinished requests, so only the newest segment counts. A new segment has
a temporary name until these requests are written, so that the death of the process always leaves
the old or the new segment.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import orjson

from gptmanager.errors import ConfigError, JournalError, quoted, quoted_path
from gptmanager.journal.entries import Entries
from gptmanager.journal.records import VERSION, Kind, RecordReader, record

_SEGMENT = re.compile(r"segment-(\d{8,18})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_RESERVE_BYTES = 4 << 20
_MODE = 0o600


class Segment(NamedTuple):
    """The content of a segment.

    `end` is the offset in bytes at which the last complete record ends. `torn` is the number of
    bytes after it, which are part of an incomplete record.
    """

    path: Path
    checkpoint: str
    entries: Entries
    num_records: int
    end: int
    torn: int


class JournalFolder:
    """The folder of a journal. Methods raise JournalError if they cannot create or read it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._objects = self.path / "objects"
        self._reserve = self.path / "reserve"

    def create(self) -> None:
        """Create the folder and its subfolder of objects, unless they exist."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._objects.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise _failed(f"cannot create the journal {quoted_path(self.path)}", error) from error

    def lock(self) -> IO[Any]:
        """Lock the folder, and return the lock file.

        The lock is held until `unlock`, or until this process and its forks have ended.

        Raise ConfigError with the other process's id if another manager has the lock, and
        JournalError if the file system has no locks or is full.
        """
        lock = os.fdopen(_opened(self.path / "lock", os.O_RDWR | os.O_CREAT), "r+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = quoted(lock.read(32).strip())
            lock.close()
            if not isinstance(error, BlockingIOError):
                raise _failed(f"cannot lock the journal {quoted_path(self.path)}", error) from error
            raise ConfigError(
                f"the journal {quoted_path(self.path)} is in use by another manager, of process "
                f"{owner}"
            ) from None
        try:
            os.truncate(lock.fileno(), 0)
            write_all(lock.fileno(), str(os.getpid()).encode())
        except OSError as error:
            self.unlock(lock)
            raise _failed(f"cannot write the journal {quoted_path(self.path)}", error) from error
        return lock

    def unlock(self, lock: IO[Any]) -> None:
        """Unlock the folder, also if a forked process still has the lock file open."""
        fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()

    # Segments --------------------------------------------------------------------------------

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self.path)
        except OSError as error:
            raise _failed(f"cannot read the journal {quoted_path(self.path)}", error) from error
        return sorted(int(found[1]) for name in names if (found := _SEGMENT.fullmatch(name)))

    def read(self) -> Segment | None:
        """Return the content of the newest segment, or None without a segment.

        Raise JournalError if the segment has another version or a damaged record. The error has the
        record's offset.
        """
        numbers = self._numbers()
        if not numbers:
            return None
        path = self._segment(numbers[-1])
        with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
            return _read_segment(path, file)

    def _segment(self, number: int) -> Path:
        return self.path / f"segment-{number:08d}"

    def begin(self, checkpoint: str, unfinished: Iterable[bytes], *, syncs: bool) -> IO[bytes]:
        """Write a new segment with UNFINISHED records, and remove the older segments.

        Return the file of the new segment, to which more records can be appended. `unfinished` has
        the payloads of the UNFINISHED records. Raise OSError if the segment cannot be written, and
        JournalError for a payload that is too large.
        """
        numbers = self._numbers()
        path = self._segment(numbers[-1] + 1 if numbers else 1)
        temporary = path.with_suffix(".new")
        with suppress(FileNotFoundError):
            temporary.unlink()
        file = os.fdopen(
            _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND), "wb", buffering=0
        )
        try:
            head = orjson.dumps({"version": VERSION, "checkpoint": checkpoint})
            records = [record(Kind.BEGIN, head)]
            records += [record(Kind.UNFINISHED, payload) for payload in unfinished]
            write_all(file.fileno(), b"".join(records))
            if syncs:
                os.fsync(file.fileno())
            os.rename(temporary, path)
            if syncs:
                _sync_names(self.path)
        except BaseException:
            file.close()
            for name in (temporary, path):  # later records are appended to the older segment
                with suppress(OSError):
                    name.unlink()
            raise
        for number in numbers:
            with suppress(OSError):  # the next `begin` tries again; only the newest segment is read
                self._segment(number).unlink()
        return file

    # Objects: data that several requests share -----------------------------------------------

    def put(self, data: bytes, *, syncs: bool) -> str:
        """Write an object, unless the folder already has it, and return its digest.

        Raise OSError if the object cannot be written, for example because the disk is full.
        """
        digest = hashlib.blake2b(data, digest_size=32).hexdigest()
        path = self._objects / digest
        if not path.exists():
            temporary = path.with_suffix(".new")
            with suppress(FileNotFoundError):
                temporary.unlink()
            file = _open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_all(file, data)
                if syncs:
                    os.fsync(file)
            except OSError:
                temporary.unlink()
                raise
            finally:
                os.close(file)
            os.rename(temporary, path)
            if syncs:
                _sync_names(self._objects)
        return digest

    def get(self, digest: str) -> bytes:
        """Return an object. Raise JournalError if it is missing or damaged."""
        name = quoted_path(self._objects / digest) if _DIGEST.fullmatch(digest) else quoted(digest)
        try:
            if not _DIGEST.fullmatch(digest):
                raise FileNotFoundError
            data = (self._objects / digest).read_bytes()
        except OSError as error:
            raise _failed(f"the object {name} of the journal cannot be read", error) from error
        if hashlib.blake2b(data, digest_size=32).hexdigest() != digest:
            raise JournalError(f"the object {name} of the journal is damaged")
        return data

    def keep_only(self, digests: Iterable[str]) -> None:
        """Remove all objects except those with these digests, as far as the file system allows."""
        kept = set(digests)
        with suppress(OSError):
            for name in os.listdir(self._objects):
                if name not in kept:
                    (self._objects / name).unlink(missing_ok=True)

    # The reserve: disk space for the records of running requests if the disk becomes full -----

    def take_reserve(self) -> None:
        """Allocate the reserve. Raise OSError if the disk is full."""
        file = _open(self._reserve, os.O_RDWR | os.O_CREAT)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, _RESERVE_BYTES)
            else:
                write_all(file, bytes(_RESERVE_BYTES))
        except OSError:
            self.free_reserve()
            raise
        finally:
            os.close(file)

    def free_reserve(self) -> None:
        """Free the disk space of the reserve, if the file system allows it. Idempotent."""
        with suppress(OSError):
            self._reserve.unlink()


def _sync_names(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_all(file: int, data: bytes) -> None:
    """Write all of `data`. A single call of `os.write` may write only a part."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _read_segment(path: Path, file: IO[bytes]) -> Segment:
    size = os.fstat(file.fileno()).st_size
    entries, checkpoint, count = Entries(), "", 0
    reader = RecordReader(file, size, quoted_path(path))
    for found in reader:
        try:
            if (found.kind is Kind.BEGIN) != (count == 0):
                raise JournalError(
                    "the record BEGIN must be the first of a segment, and occur once"
                )
            if count == 0:
                checkpoint = _checkpoint_of(found.payload)
            entries.apply(found.kind, found.payload)
        except JournalError as error:
            raise JournalError(
                f"{quoted_path(path)}: the record at offset {found.offset} is damaged: {error}"
            ) from None
        count += 1
    if not count:
        raise JournalError(f"{quoted_path(path)}: the record at offset 0 is damaged: it is torn")
    return Segment(path, checkpoint, entries, count, reader.end, reader.torn)


def _checkpoint_of(payload: bytes) -> str:
    try:
        head = orjson.loads(payload)
        version, checkpoint = head["version"], head["checkpoint"]
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"it must be an object with version and checkpoint: {error}") from None
    if version != VERSION:
        raise JournalError(f"its version is {quoted(version)}, this library reads {VERSION}")
    return str(checkpoint)


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, _MODE)


def _opened(path: Path, flags: int) -> int:
    """Open a file. Raise JournalError if that fails."""
    try:
        return _open(path, flags)
    except OSError as error:
        raise _failed(f"cannot open {quoted_path(path)}", error) from error


def _failed(what: str, error: OSError) -> JournalError:
    return JournalError(f"{what}: {error.strerror or 'the object is missing'}")

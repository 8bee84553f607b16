"""Encodes and reads the records of a segment; a record is a header with checksums, and a payload.

A segment is a file of records, one after another. The reader stops at an incomplete record at the
end; other damage is an error. This module does not interpret payloads.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from enum import IntEnum
from typing import IO, NamedTuple

from gptmanager.errors import JournalError

VERSION = 2
MAX_RECORD_BYTES = 1 << 30
# The length of the payload, the kind, the CRC-32 of the payload, and the CRC-32 of these three.
_HEAD, _CHECK = struct.Struct("<IB3xI"), struct.Struct("<I")
HEAD_BYTES = _HEAD.size + _CHECK.size


class Kind(IntEnum):
    """The kinds of records; docs/reliability.md describes their payloads."""

    BEGIN = 1  # the first record of a segment
    ACCEPTED = 2  # a request
    SENT = 3  # tokens of requests
    FINAL = 4  # ids of requests that end
    LAST_RESPONSE = 5  # the final response of a request that ends
    DELIVERED = 6  # ids of requests with a delivered final response
    UNFINISHED = 7  # a request with its progress, at the start of a segment
    RESUMED = 8  # ids of requests that a new manager begins to run


class Record(NamedTuple):
    """A record that starts at `offset` of its segment."""

    offset: int
    kind: Kind
    payload: bytes


def record(kind: Kind, payload: bytes) -> bytes:
    """Return a record as bytes. Raise JournalError for a payload over `MAX_RECORD_BYTES`."""
    if len(payload) > MAX_RECORD_BYTES:
        raise JournalError(
            f"a record of {len(payload)} bytes is too large for the journal: the limit is "
            f"{MAX_RECORD_BYTES}"
        )
    head = _HEAD.pack(len(payload), kind, zlib.crc32(payload))
    return b"".join((head, _CHECK.pack(zlib.crc32(head)), payload))


class RecordReader:
    """Reads the records of the segment `file`, of `size` bytes; `name` names it in errors.

    After the iteration, `end` is the offset after the last complete record. `torn` is the number of
    bytes from `end` on, which belong to a record that was not written completely.
    """

    def __init__(self, file: IO[bytes], size: int, name: str) -> None:
        self.end = 0
        self.torn = 0
        self._file, self._size, self._name = file, size, name

    def __iter__(self) -> Iterator[Record]:
        """Yield the records. Raise JournalError, with the offset, at a damaged record."""
        while self.end < self._size:
            found = self._read(self.end)
            if found is None:
                self.torn = self._size - self.end
                return
            yield found
            self.end = self._file.tell()

    def _read(self, offset: int) -> Record | None:
        """Return the record at the file's position `offset`; None if the record is incomplete."""
        head = self._file.read(HEAD_BYTES)
        if len(head) < HEAD_BYTES:
            return None
        (check,) = _CHECK.unpack_from(head, _HEAD.size)
        if check != zlib.crc32(head[: _HEAD.size]):
            if not any(head) and self._is_zero():  # a crash can zero the end of a file
                return None
            raise self._damage(offset, "the header does not match its checksum")
        length, kind, checksum = _HEAD.unpack_from(head)
        if length > MAX_RECORD_BYTES:
            raise self._damage(offset, f"its length is {length}: the limit is {MAX_RECORD_BYTES}")
        if kind not in Kind.__members__.values():
            raise self._damage(offset, f"its kind {kind} is unknown")
        end = offset + HEAD_BYTES + length
        if end > self._size:
            return None
        payload = self._file.read(length)
        if zlib.crc32(payload) != checksum:
            if end == self._size or self._is_zero():
                return None
            raise self._damage(offset, "the payload does not match its checksum")
        return Record(offset, Kind(kind), payload)

    def _is_zero(self) -> bool:
        """Return whether all bytes up to the end of the file are zero."""
        while piece := self._file.read(1 << 20):
            if any(piece):
                return False
        return True

    def _damage(self, offset: int, why: str) -> JournalError:
        return JournalError(f"{self._name}: the record at offset {offset} is damaged: {why}")

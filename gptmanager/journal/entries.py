"""`Entries`: the unfinished requests of a journal, computed from its records.

A running manager and a reader of a journal apply records in the same way. This module does not
access files, and does not interpret the bytes of an accepted request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from gptmanager.errors import JournalError
from gptmanager.journal.records import Kind

_ID = struct.Struct("<Q")
_COUNT = struct.Struct("<I")
_COLUMNS_BYTES = 16  # id, start and count of a response in a SENT record
_WITH_LOG_PROBS = 1 << 31  # added to the count of tokens if they have log probabilities
_UNFINISHED = struct.Struct("<QIIIII")  # id, `num_starts`, and the size of each part in bytes


class Sent:
    """The tokens of responses that are about to be sent, as columns.

    Three columns have a value for each response: `ids` (of requests), `starts` (the index of the
    response's first token in the request's output) and `counts` (of tokens). `tokens` and
    `log_probs` concatenate the values of all responses.
    """

    __slots__ = ("counts", "ids", "log_probs", "starts", "tokens")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.starts: list[int] = []
        self.counts: list[int] = []
        self.tokens: list[int] = []
        self.log_probs: list[float] = []

    def add(self, request_id: int, entry: Entry, tokens: list[int], log_probs: list[float]) -> None:
        """Add a response to the columns, and to the request's `entry`.

        `log_probs` has a value for each token, or is empty.
        """
        if not tokens:
            return
        self.ids.append(request_id)
        self.starts.append(len(entry.tokens))
        self.counts.append(len(tokens) | (_WITH_LOG_PROBS if log_probs else 0))
        self.tokens += tokens
        self.log_probs += log_probs
        entry.tokens += tokens
        entry.log_probs += log_probs
        entry.num_starts = 0

    def payload(self) -> bytes:
        """Return the payload of a SENT record."""
        count = len(self.ids)
        form = f"<I{count}Q{2 * count}I{len(self.tokens)}i{len(self.log_probs)}f"
        return struct.pack(
            form, count, *self.ids, *self.starts, *self.counts, *self.tokens, *self.log_probs
        )


@dataclass(slots=True, eq=False)
class Entry:
    """A request without a delivered final response.

    `accepted`: the request's inputs as bytes. `tokens`, `log_probs`: the output sent so far.
    `last`: the final response as bytes, or b"" if it has not been written to the journal.
    `num_starts`: how many managers have resumed the request since its last token was sent.
    """

    accepted: bytes
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    last: bytes = b""
    num_starts: int = 0


def ids_payload(ids: Iterable[int]) -> bytes:
    """Return the payload of a record that has only ids: RESUMED, FINAL or DELIVERED."""
    return b"".join(map(_ID.pack, ids))


def named_payload(request_id: int, data: bytes) -> bytes:
    """Return the payload of an ACCEPTED or LAST_RESPONSE record: an id, then the data."""
    return _ID.pack(request_id) + data


def unfinished_payload(request_id: int, entry: Entry) -> bytes:
    """Return the payload of an UNFINISHED record."""
    parts = (
        entry.accepted,
        np.array(entry.tokens, dtype="<i4").tobytes(),
        np.array(entry.log_probs, dtype="<f4").tobytes(),
        entry.last,
    )
    return b"".join((_UNFINISHED.pack(request_id, entry.num_starts, *map(len, parts)), *parts))


class Entries(dict[int, Entry]):
    """The unfinished requests by id, in the order of their acceptance."""

    def apply(self, kind: Kind, payload: bytes) -> None:
        """Apply a record. Raise JournalError if it is malformed or contradicts earlier records."""
        try:
            if kind is Kind.ACCEPTED:
                self._accept(_ID.unpack_from(payload)[0], payload[_ID.size :])
            elif kind is Kind.UNFINISHED:
                self._restore(payload)
            elif kind is Kind.SENT:
                self._send(payload)
            elif kind is Kind.LAST_RESPONSE:
                self[_ID.unpack_from(payload)[0]].last = payload[_ID.size :]
            elif kind is Kind.RESUMED:
                for (request_id,) in _ID.iter_unpack(payload):
                    self[request_id].num_starts += 1
            elif kind in (Kind.FINAL, Kind.DELIVERED):
                for (request_id,) in _ID.iter_unpack(payload):
                    del self[request_id]
        except KeyError as error:
            raise JournalError(f"request {error} is not in the journal") from None
        except (struct.error, ValueError) as error:
            raise JournalError(f"its payload has an invalid length: {error}") from None

    def _accept(self, request_id: int, accepted: bytes) -> None:
        if request_id in self:
            raise JournalError(f"request {request_id} is accepted twice")
        self[request_id] = Entry(accepted)

    def _restore(self, payload: bytes) -> None:
        request_id, num_starts, *sizes = _UNFINISHED.unpack_from(payload)
        parts, end = [], _UNFINISHED.size
        for size in sizes:
            parts.append(payload[end : end + size])
            end += size
        if end != len(payload):
            raise JournalError("its parts do not have the length of its payload")
        accepted, tokens, log_probs, last = parts
        self._accept(request_id, accepted)
        entry = self[request_id]
        entry.tokens, entry.log_probs = _ints(tokens), _floats(log_probs)
        entry.last, entry.num_starts = last, num_starts

    def _send(self, payload: bytes) -> None:
        (count,) = _COUNT.unpack_from(payload)
        end = _COUNT.size + _COLUMNS_BYTES * count
        columns = memoryview(payload)[_COUNT.size : end]
        ids = np.frombuffer(columns[: 8 * count], dtype="<u8").tolist()
        starts, counts = np.frombuffer(columns[8 * count :], dtype="<u4").reshape(2, count).tolist()
        num_tokens = sum(it & ~_WITH_LOG_PROBS for it in counts)
        num_log_probs = sum(it & ~_WITH_LOG_PROBS for it in counts if it & _WITH_LOG_PROBS)
        if len(payload) != end + 4 * (num_tokens + num_log_probs):
            raise JournalError("its columns do not have the length of its payload")
        tokens = _ints(payload[end : end + 4 * num_tokens])
        log_probs = _floats(payload[end + 4 * num_tokens :])
        first = first_log_prob = 0
        for request_id, start, given in zip(ids, starts, counts, strict=True):
            entry, number = self[request_id], given & ~_WITH_LOG_PROBS
            if start != len(entry.tokens):
                raise JournalError(
                    f"request {request_id} has sent {len(entry.tokens)} tokens, the record "
                    f"continues at {start}"
                )
            entry.num_starts = 0
            entry.tokens += tokens[first : first + number]
            first += number
            if given & _WITH_LOG_PROBS:
                entry.log_probs += log_probs[first_log_prob : first_log_prob + number]
                first_log_prob += number


def _ints(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return found


def _floats(data: bytes) -> list[float]:
    found: list[float] = np.frombuffer(data, dtype="<f4").tolist()
    return found

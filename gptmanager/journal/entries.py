"""`Entries`: the unfinished requests of a journal, computed from its records.

A running manager and a reader apply records in the same way. This module knows neither files nor
the bytes of an accepted request.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gptmanager.errors import JournalError
from gptmanager.journal.records import Kind

_ID = struct.Struct("<Q")
_SENT = struct.Struct("<QII")  # id, index of the first token, number of tokens
_ONE = struct.Struct("<QIIi")  # the same, followed by one token, which is the usual number
_WITH_LOG_PROBS = 1 << 31  # added to the number of tokens: their log probabilities follow
_UNFINISHED = struct.Struct("<QIIII")  # id, and the lengths of the parts


class Sent(NamedTuple):
    """Tokens of a request that are about to be sent.

    The first one has the index `start` in the output. `log_probs` has a value per token, or none.
    """

    request_id: int
    start: int
    tokens: list[int]
    log_probs: list[float]


@dataclass(slots=True, eq=False)
class Entry:
    """A request without a delivered final response.

    `accepted`: its inputs as bytes. `tokens`, `log_probs`: the sent output. `last`: the final
    response as bytes, from the time when it was about to be sent; stored only if the host may not
    have recorded it.
    """

    accepted: bytes
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    last: bytes = b""


def sent_payload(items: Iterable[Sent]) -> bytes:
    """Return the payload of a SENT record."""
    parts = []
    for request_id, start, tokens, log_probs in items:
        if len(tokens) == 1 and not log_probs:
            parts.append(_ONE.pack(request_id, start, 1, tokens[0]))
            continue
        count = len(tokens) | (_WITH_LOG_PROBS if log_probs else 0)
        parts.append(_SENT.pack(request_id, start, count))
        parts.append(np.array(tokens, dtype="<i4").tobytes())
        parts.append(np.array(log_probs, dtype="<f4").tobytes())
    return b"".join(parts)


def ids_payload(ids: Iterable[int]) -> bytes:
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
    return b"".join((_UNFINISHED.pack(request_id, *map(len, parts)), *parts))


class Entries(dict[int, Entry]):
    """The unfinished requests by id, in the order of their acceptance."""

    def apply(self, kind: Kind, payload: bytes) -> None:
        """Apply a record. Raises JournalError if it contradicts earlier records."""
        try:
            if kind is Kind.ACCEPTED:
                self._accept(_ID.unpack_from(payload)[0], payload[_ID.size :])
            elif kind is Kind.UNFINISHED:
                self._restore(payload)
            elif kind is Kind.SENT:
                self._send(payload)
            elif kind is Kind.LAST_RESPONSE:
                self[_ID.unpack_from(payload)[0]].last = payload[_ID.size :]
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
        request_id, *sizes = _UNFINISHED.unpack_from(payload)
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
        entry.last = last

    def _send(self, payload: bytes) -> None:
        end = 0
        while end < len(payload):
            request_id, start, count = _SENT.unpack_from(payload, end)
            has_log_probs, count = count & _WITH_LOG_PROBS, count & ~_WITH_LOG_PROBS
            end += _SENT.size
            tokens, end = payload[end : end + 4 * count], end + 4 * count
            entry = self[request_id]
            if start != len(entry.tokens):
                raise JournalError(
                    f"request {request_id} has sent {len(entry.tokens)} tokens, the record "
                    f"continues at {start}"
                )
            entry.tokens += _ints(tokens)
            if has_log_probs:
                log_probs, end = payload[end : end + 4 * count], end + 4 * count
                entry.log_probs += _floats(log_probs)
        if end != len(payload):
            raise JournalError("its last item is not complete")


def _ints(data: bytes) -> list[int]:
    found: list[int] = np.frombuffer(data, dtype="<i4").tolist()
    return found


def _floats(data: bytes) -> list[float]:
    found: list[float] = np.frombuffer(data, dtype="<f4").tolist()
    return found

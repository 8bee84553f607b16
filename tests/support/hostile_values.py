"""Values that a hostile client puts into any field, and the memory that a process takes for them.

`HOSTILE` maps a name to the value as JSON text, since no Python encoder writes all of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from fuzz import FUZZ

MANY = 10**6
DEEP = 10_000
HOSTILE: dict[str, bytes] = {
    "2^31-1": b"%d" % (2**31 - 1),
    "2^63-1": b"%d" % (2**63 - 1),
    "-1": b"-1",
    "a million items": b"[" + b"0," * (MANY - 1) + b"0]",
    "a million letters": b'"' + b"a" * MANY + b'"',
    "lists in lists": b"[" * DEEP + b"]" * DEEP,
    "objects in objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
}
# of these each field gets one in `make test`, and all of them in `make marathon`
_COSTLY = ("a million items", "a million letters", "lists in lists", "objects in objects")
_HERE = '"\ue000"'  # stands in a body's JSON for the hostile value


def names_for(index: int) -> list[str]:
    """The names of the values that the field with this number gets."""
    mine = _COSTLY[index % len(_COSTLY)]
    return [name for name in HOSTILE if FUZZ > 1 or name == mine or name not in _COSTLY]


Place = tuple[str | int, ...]  # keys and indices that lead to a place in a body


def places(body: Any, at: Place = ()) -> Iterator[Place]:
    """Every place in a body that holds a value, objects and lists included; the body's own not."""
    pairs: Sequence[tuple[str | int, Any]] = ()
    if isinstance(body, dict):
        pairs = list(body.items())
    elif isinstance(body, list):
        pairs = list(enumerate(body))
    for key, value in pairs:
        yield (*at, key)
        yield from places(value, (*at, key))


def with_value(body: Any, place: Place, raw: bytes) -> bytes:
    """`body` as JSON, with the JSON text `raw` at `place`."""
    return orjson.dumps(_replaced(body, place)).replace(_HERE.encode(), raw)


def _replaced(body: Any, place: Place) -> Any:
    if not place:
        return _HERE[1:-1]
    first, *rest = place
    copied = dict(body) if isinstance(body, dict) else list(body)
    if isinstance(copied, dict) and first not in copied:
        copied[first] = None
    copied[first] = _replaced(copied[first], tuple(rest))
    return copied


# Memory of a process --------------------------------------------------------------------------


def forget_peak(pid: int) -> None:
    """The peak counts anew from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes in memory now, and the most since `forget_peak`."""
    text = Path(f"/proc/{pid}/status").read_text()
    now, peak = (re.search(rf"{name}:\s+(\d+) kB", text) for name in ("VmRSS", "VmHWM"))
    assert now is not None and peak is not None
    return int(now[1]) << 10, int(peak[1]) << 10


def allowed_growth(body: bytes) -> int:
    """The bytes by which a server may grow while it answers one body."""
    return (96 << 20) + 10 * len(body)

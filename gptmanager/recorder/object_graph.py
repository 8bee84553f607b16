"""The state of objects as JSON values, and objects from it: identity, sharing and cycles kept.

Copies attributes and never calls a constructor. Only classes of this library are made from what
was read, so that a recording from a stranger can do no harm. Knows nothing of what it copies.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any

from gptmanager.recorder.values import RecordingError

_SCALARS = frozenset({type(None), bool, int, str})
_SEQUENCES: dict[type, str] = {
    list: "list", tuple: "tuple", deque: "deque", set: "set", frozenset: "frozenset",
}  # fmt: skip
_FILLABLE = frozenset({"names", "list", "dict", "ordered"})  # made empty first: cycles lead here
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered"}
_MAKE: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
    "count": itertools.count,
}  # fmt: skip


class Growing:
    """The first `length` items of a list that only ever grows: copied when it is written."""

    __slots__ = ("items", "length")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self.length = len(items)


class GraphWriter:
    """Collects objects, each once. `growing`: attributes that hold lists which only ever grow.

    `hidden`: attributes that are None in what comes of it.
    """

    def __init__(
        self, growing: frozenset[str] = frozenset(), hidden: frozenset[str] = frozenset()
    ) -> None:
        self._growing = growing
        self._hidden = hidden
        self._places: dict[int, int] = {}
        self._kept: list[Any] = []  # alive, so that no id is given twice
        self._entries: list[dict[str, Any]] = []
        self._readers: dict[type, tuple[tuple[str, ...], Callable[[Any], Any]]] = {}

    def add(self, root: Any) -> Any:
        """Everything that `root` reaches; returns what stands for it. Not recursive."""
        reference = self._refer(root)
        while len(self._entries) < len(self._kept):
            self._entries.append(self._entry(self._kept[len(self._entries)]))
        return reference

    def entries(self) -> list[dict[str, Any]]:
        """The objects as JSON values, in the order of their numbers."""
        for entry in self._entries:
            items = entry.get("list")
            if isinstance(items, Growing):
                entry["list"] = items.items[: items.length]
        return self._entries

    def _refer(self, value: Any) -> Any:
        if type(value) in _SCALARS:
            return value
        if type(value) is float:
            return value if math.isfinite(value) else {"float": str(value)}
        place = self._places.get(id(value))
        if place is None:
            place = self._places[id(value)] = len(self._kept)
            self._kept.append(value)
        return {"@": place}

    def _refer_all(self, values: Any) -> list[Any]:
        values = list(values)
        return values if _SCALARS.issuperset(map(type, values)) else list(map(self._refer, values))

    def _entry(self, value: Any) -> dict[str, Any]:
        kind = type(value)
        if kind is Growing:
            return {"list": value}
        if kind in _SEQUENCES:
            return {_SEQUENCES[kind]: self._refer_all(value)}
        if kind in _MAPPINGS:
            keys, values = self._refer_all(value), self._refer_all(value.values())
            return {_MAPPINGS[kind]: keys, "values": values}
        if kind is itertools.count:
            return {"count": int(repr(value)[6:-1])}  # it tells its next number no other way
        builtin = isinstance(value, (list, dict, set, frozenset, deque, type))
        if builtin or not kind.__module__.startswith("gptmanager."):
            raise RecordingError(f"the state of a {kind.__module__}.{kind.__qualname__}")
        name = f"{kind.__module__}.{kind.__qualname__}"
        if isinstance(value, Enum):
            return {"class": name, "member": value.name}
        if isinstance(value, tuple):
            return {"class": name, "tuple": self._refer_all(value)}
        names, values = self._attributes(value)
        return {"class": name, "names": names, "values": self._refer_all(values)}

    def _attributes(self, value: Any) -> tuple[tuple[str, ...], list[Any]]:
        kind = type(value)
        if kind not in self._readers:
            slots = _slots(kind)
            read = attrgetter(*slots, "__class__") if slots else lambda _: (None,)
            self._readers[kind] = slots, read
        names, read = self._readers[kind]
        values = list(read(value)[:-1])
        if hasattr(value, "__dict__"):
            attributes = vars(value)
            names, values = (*names, *attributes), [*values, *attributes.values()]
        for name in self._hidden.intersection(names):
            values[names.index(name)] = None
        for name in self._growing.intersection(names):
            place = names.index(name)
            if type(values[place]) is list:
                values[place] = Growing(values[place])
        return names, values


def read_graph(entries: list[dict[str, Any]]) -> Callable[[Any], Any]:
    """Make the objects; returns what gives the object for a reference."""
    made: dict[int, Any] = {}

    def find(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if "float" in value:
            return float(value["float"])
        place = value["@"]
        if place not in made:
            made[place] = _make(entries[place], find)
        return made[place]

    fillable = [
        place for place, entry in enumerate(entries) if not _FILLABLE.isdisjoint(entry.keys())
    ]
    for place in fillable:
        made[place] = _empty(entries[place])
    for place in fillable:
        _fill(made[place], entries[place], find)
    return find


def _empty(entry: Mapping[str, Any]) -> Any:
    if "class" in entry:
        cls = _class(entry["class"])
        return object.__new__(cls)
    return [] if "list" in entry else {} if "dict" in entry else OrderedDict()


def _fill(value: Any, entry: Mapping[str, Any], find: Callable[[Any], Any]) -> None:
    if "names" in entry:
        for name, content in zip(entry["names"], entry["values"], strict=True):
            object.__setattr__(value, name, find(content))
    elif "list" in entry:
        value.extend(map(find, entry["list"]))
    else:
        keys = entry["dict"] if "dict" in entry else entry["ordered"]
        value.update(zip(map(find, keys), map(find, entry["values"]), strict=True))


def _make(entry: Mapping[str, Any], find: Callable[[Any], Any]) -> Any:
    """What cannot be filled later."""
    if "class" in entry:
        cls = _class(entry["class"])
        if "member" in entry:
            return cls[entry["member"]]
        return tuple.__new__(cls, map(find, entry["tuple"]))
    ((kind, content),) = entry.items()
    return _MAKE[kind](content if kind == "count" else list(map(find, content)))


def _class(name: str) -> Any:
    """A class of this library by its full name; never anything else."""
    module, _, qualname = name.rpartition(".")
    found = getattr(sys.modules.get(module), qualname, None)
    if not name.startswith("gptmanager.") or not isinstance(found, type):
        raise RecordingError(f"a recording of this library has no objects of class {name!r}")
    if found.__module__ != module:
        raise RecordingError(f"{name!r} is no class of this library")
    return found


def _slots(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for cls in kind.__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))

"""Bodies in JSON, changed at random into what no client should send."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from hostile_values import HOSTILE, places, with_value

LARGE = {"a million items", "a million letters"}
_ODD = (
    *(b"null", b"true", b"false", b"0", b"1", b"2", b"0.5", b"-0.0", b'""', b"[]", b"{}", b"[[]]"),
    *(b"1e400", b"-1e308", b"5e-324", b"NaN", b"Infinity", b"-Infinity", b"1e5", b"01", b"0x1"),
    *(b"%d" % (2**32), b"%d" % (2**63), b"%d" % (2**64 - 1), b"%d" % (-(2**31)), b"9" * 5000),
    *(b'"\\ud800"', b'"\\udc00\\ud800"', b'"\xff\xfe"', b'"\xed\xa0\x80"', b'"\\u0000"', b'"\xf0"'),
    *(b'"' + "é\u202e\ufeff\U0001f600".encode() + b'"', b'"<|im_start|>"', b'"{{ 7 * 7 }}"'),
    *(b'"(a+)+$"', b'"(?=a)"', b'"a{1000}{1000}"', b'"[\\\\s\\\\S]*x{999999999}"', b'"\\\\1"'),
    *(b'"%s"' % (b"a" * 70_000), b'"%s"' % ("é".encode() * 3000), b'["%s"]' % (b" " * 5000)),
    *(b"[%s]" % b",".join([b'"a"'] * 3000), b"[%s]" % b",".join([b"[0]"] * 3000)),
    *(b"[%s0]" % (b"0," * 700), b"[" * 60 + b"]" * 60, b'{"a":' * 60 + b"1" + b"}" * 60),
    b"{%s}" % b",".join(b'"%d":1' % number for number in range(3000)),
    b'{"type":"json_schema","json_schema":{"name":"a","schema":{"$ref":"#"}}}',
    b'{"type":"object","properties":{"a":{"$ref":"#"}},"patternProperties":{"(a+)+$":{}}}',
    b'{"type":"json_schema","json_schema":{"name":"a","schema":{"minItems":999999}}}',
    b'{"type":"function","function":{"name":"a","parameters":{"type":"object"}}}',
    b'[{"type":"text","text":"a"},{"type":"image_url","image_url":{"url":"data:x"}}]',
    b'"/etc/passwd"',
    b'"../../.."',
)


def odd_value(chance: random.Random) -> bytes:
    """JSON text, or what looks like it; in one of twelve cases a large one."""
    if chance.random() < 0.25:
        name = chance.choice(list(HOSTILE))
        if name not in LARGE or chance.random() < 0.4:
            return HOSTILE[name]
    return chance.choice(_ODD)


def hostile_body(chance: random.Random, body: Any, fields: Mapping[str, Any]) -> bytes:
    """`body` after one to three changes. `fields`: others that it may have."""
    kinds: list[Callable[[random.Random, Any, Mapping[str, Any]], bytes]]
    kinds = [_replaced, _replaced, _replaced, _with_field, _with_field, _shuffled, _doubled, _torn]
    for _ in range(chance.choice([0, 0, 1])):
        body = _mild(chance, body, fields)
    return chance.choice(kinds)(chance, body, fields)


def _replaced(chance: random.Random, body: Any, _: Mapping[str, Any]) -> bytes:
    found = list(places(body)) or [()]
    return with_value(body, chance.choice(found), odd_value(chance))


def _with_field(chance: random.Random, body: Any, fields: Mapping[str, Any]) -> bytes:
    name = chance.choice([*fields, "unknown"])
    return with_value(body, (name,), odd_value(chance))


def _shuffled(chance: random.Random, body: Any, _: Mapping[str, Any]) -> bytes:
    """One value in another's place, itself included."""
    found = list(places(body)) or [()]
    value = body
    for key in chance.choice(found):
        value = value[key]
    if chance.random() < 0.3:
        value = [value] * chance.choice([2, 100, 5000 if len(str(value)) < 1000 else 20])
    return with_value(body, chance.choice(found), json.dumps(value).encode())


def _doubled(chance: random.Random, body: Any, fields: Mapping[str, Any]) -> bytes:
    """Keys that stand twice, or ten thousand times."""
    name = json.dumps(chance.choice([*body, *fields])).encode()
    times = chance.choice([1, 1, 1, 10_000])
    more = b",".join([name + b":" + chance.choice(_ODD[:12])] * times)
    return json.dumps(body).encode()[:-1] + b"," + more + b"}"


def _torn(chance: random.Random, body: Any, _: Mapping[str, Any]) -> bytes:
    """The bytes themselves: cut, turned, prolonged, in another encoding."""
    text = json.dumps(body, ensure_ascii=False)
    raw = bytearray(text.encode())
    kind = chance.randrange(6)
    if kind == 0:
        return bytes(raw[: chance.randrange(len(raw))])
    if kind == 1:
        for _ in range(chance.choice([1, 1, 5, 50])):
            raw[chance.randrange(len(raw))] = chance.randrange(256)
        return bytes(raw)
    if kind == 2:
        at = chance.randrange(len(raw))
        return bytes(raw[:at]) + chance.randbytes(chance.choice([1, 3, 100])) + bytes(raw[at:])
    if kind == 3:
        return bytes(raw) + chance.choice([b"}", b"\0", b"," * 9, b" " * 10**6, bytes(raw)])
    if kind == 4:
        return text.encode(chance.choice(["utf-16", "utf-32", "utf-8-sig"]))
    return chance.choice([b"", b" ", b"null", b"[]", b'"a"', b"1", b"\x00", b"{", b"[" * 10**6])


def _mild(chance: random.Random, body: Any, fields: Mapping[str, Any]) -> Any:
    """A body that may still be a right one: other changes are met deeper in the server."""
    changed = dict(body)
    if chance.random() < 0.3 and changed:
        changed.pop(chance.choice(list(changed)))
    name = chance.choice(list(fields) or ["unknown"])
    changed[name] = chance.choice([None, True, False, 0, 1, 2, 0.5, "a", [], {}, [1], ["a"]])
    return changed

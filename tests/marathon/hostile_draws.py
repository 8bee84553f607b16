"""Draws cases: case n of a seed is always the same one.

Bodies of real clients, changed; HTTP that is none; Triton's tensors with sizes that lie; messages
of gRPC. What is made up from the OpenAPI document is in `hostile_schema`.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Mapping
from typing import Any

from hostile_bodies import hostile_body
from hostile_case import Case, Piece, head, post
from hostile_messages import draw_message, draw_wire
from hostile_requests import OWN, client_bodies
from hostile_values import places, with_value

_INFER_HEADER = "Inference-Header-Content-Length"
_GETS = (
    *("/health", "/metrics", "/v1/models", "/v1/models/tiny_llama", "/version", "/openapi.json"),
    *("/", "/v2", "/v2/health/ready", "/v2/models/stats", "/v2/models/ensemble/config", "/nothing"),
    *("/v1/models/%00", "/%ff%fe", "/v2/models/a%2f..%2f../ready", "/live/../health", "//health"),
    *("/v1/models/" + "a" * 30_000, "/?" + "a=b&" * 8000, "*", "http://other/health"),
)


class Draws:
    """`fields`: the properties that the server's document lists for a route's body."""

    def __init__(self, seed: int, fields: Mapping[str, Mapping[str, Any]]) -> None:
        self._seed = seed
        self._fields = fields
        self._bodies = client_bodies()
        self._kinds: dict[str, tuple[float, Callable[[random.Random], dict[str, Any]]]] = {
            "body": (10, self._body),
            "wrong head": (3, self._wrong_head),
            "chunks": (3, self._chunks),
            "slow": (1, self._slow),
            "large": (0.3, self._large),
            "gone": (3, self._gone),
            "pipeline": (2, self._pipeline),
            "no http": (2, self._no_http),
            "lying tensors": (5, self._lying_tensors),
            "message": (8, draw_message),
            "wire": (1, draw_wire),
        }

    def case(self, number: int) -> Case:
        chance = random.Random(f"{self._seed}/{number}")
        weights = [weight for weight, _ in self._kinds.values()]
        [kind] = chance.choices(list(self._kinds), weights)
        return Case(self._seed, number, kind, **self._kinds[kind][1](chance))

    def _drawn(self, chance: random.Random, hostile: float = 0.9) -> tuple[str, bytes]:
        # completions have as many bodies as all other routes together, chats more than both
        route, body = chance.choice(self._bodies if chance.random() < 0.5 else OWN)
        if chance.random() >= hostile:
            return route, json.dumps(body).encode()
        template = "/v2/models/{name}/" + route.rpartition("/")[2]
        fields = self._fields.get(template if route.startswith("/v2") else route, {})
        return route, hostile_body(chance, body, fields)

    def _body(self, chance: random.Random) -> dict[str, Any]:
        route, body = self._drawn(chance)
        return _http(route, [post(route, body)], may_time_out=_has_deadline(body))

    def _large(self, chance: random.Random) -> dict[str, Any]:
        """Bodies of as much as is permitted, or a little more: 4 MiB, with tensors 64 MiB."""
        route, body = chance.choice([it for it in OWN if not it[0].endswith("_adapter")])
        size = chance.choice([1, 1, 1, 15 if route.endswith("/infer") else 1]) * (4 << 20)
        value = chance.choice([b"0", b"0.5", b'"a"', b"[0]", b'{"a":0}', b"1e5", b'"\\u00e9"'])
        count = (size - 2000) // (len(value) + 1)
        raw = b"[" + b",".join([value] * count) + b"]"
        if chance.random() < 0.2:
            raw = b'"' + b"a" * (size - 2000) + b'"'
        if chance.random() < 0.1:
            raw += b" " * 3000
        text = with_value(body, chance.choice(list(places(body))), raw)
        return _http(route, [post(route, text)], may_time_out=True)

    def _wrong_head(self, chance: random.Random) -> dict[str, Any]:
        route, body = self._drawn(chance, 0.2)
        headers: list[Mapping[str, str | int]] = [
            {"Content-Type": chance.choice(["text/plain", "", "multipart/form-data", "a/b;" * 99])},
            {"Content-Encoding": chance.choice(["gzip", "deflate", "br", "identity", "x" * 9000])},
            {"Expect": "100-continue"},
            {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMA"},
            {"Authorization": "Bearer " + "a" * chance.choice([1, 60_000])},
            {"X-Forwarded-For": ", ".join(["1.2.3.4"] * chance.choice([1, 3000]))},
            {"Host": chance.choice(["evil.example", "", "localhost:99999", "a" * 9000, "[::1"])},
            {"Origin": chance.choice(["http://evil.example", "null", "http://localhost"])},
            {f"x-{number}": "a" * chance.choice([0, 9]) for number in range(3000)},
            {"x": "a" * chance.choice([65_000, 66_000, 10**6])},
            {_INFER_HEADER: chance.choice(["-1", "0", "9" * 30, "a", " 1", str(len(body) + 1)])},
        ]
        chosen = chance.choice(headers)
        if chosen.get("Content-Encoding") == "gzip" and chance.random() < 0.7:
            body = gzip.compress(chance.choice([body, b"\0" * (40 << 20)]), 1, mtime=0)
        method = chance.choice(
            ["POST", "POST", "POST", "PUT", "OPTIONS", "PATCH", "DELETE", "BREW"]
        )
        if chance.random() < 0.3:
            route, body, method = chance.choice(_GETS), b"", chance.choice(["GET", "HEAD", "POST"])
        raw = head(method, route, chosen, len(body)) + body
        # of what is above the limit the server reads no more, and of a method that is none nothing
        may_close = len(raw) > 60_000 or "Upgrade" in chosen or "Expect" in chosen
        return _http(route.partition("?")[0], [raw], may_close=may_close or method == "BREW")

    def _chunks(self, chance: random.Random) -> dict[str, Any]:
        route, body = self._drawn(chance, 0.3)
        step = chance.choice([1, 7, 1000, 10**6])
        body = body[: step * 2000]
        sizes = [b"%x\r\n" % len(body[at : at + step]) for at in range(0, len(body), step)]
        parts = [body[at : at + step] + b"\r\n" for at in range(0, len(body), step)]
        end: bytes = b"0\r\n\r\n"
        kind = chance.randrange(8)
        if kind == 0 and sizes:
            at = chance.randrange(len(sizes))
            sizes[at] = chance.choice(
                [b"-1\r\n", b"zz\r\n", b"f" * 16 + b"\r\n", b"\r\n", b"0x1\r\n"]
            )
        elif kind == 1:
            sizes = [
                size[:-2] + b";a=" + b"b" * chance.choice([9, 70_000]) + b"\r\n"
                for size in sizes[:3]
            ]
        elif kind == 2:
            end = b"0\r\n" + b"x: y\r\n" * chance.choice([1, 100, 20_000]) + b"\r\n"
        elif kind == 3:
            end = b"0\r\n" + b"x" * chance.choice([100, 10**6]) + b"\r\n\r\n"
        raw = b"".join(size + part for size, part in zip(sizes, parts, strict=False)) + end
        headers: dict[str, str | int] = {"Transfer-Encoding": "chunked"}
        if kind == 4:
            headers["Content-Length"] = chance.choice([0, 5, len(raw)])
        if kind == 5:
            headers["Transfer-Encoding"] = chance.choice(["chunked, chunked", "gzip", "xchunked"])
        return _http(route, [head("POST", route, headers) + raw], may_close=kind < 6,
                     may_time_out=_has_deadline(body))  # fmt: skip

    def _slow(self, chance: random.Random) -> dict[str, Any]:
        """A body that arrives in pieces, or stops."""
        route, body = self._drawn(chance, 0.1)
        raw = post(route, body)
        cuts = sorted(chance.sample(range(1, len(raw)), min(len(raw) - 1, chance.randint(1, 12))))
        pieces: list[Piece] = []
        for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
            pieces += [raw[begin:end], chance.choice([0.0, 0.01, 0.2])]
        if chance.random() < 0.3:
            pieces = pieces[: chance.randint(1, len(pieces) - 2)]
        return _http(route, pieces, may_time_out=_has_deadline(body))

    def _gone(self, chance: random.Random) -> dict[str, Any]:
        """A client that goes away: in the middle of its body, or of the answer."""
        if chance.random() < 0.1:
            route = chance.choice(["/live/events", "/events", "/metrics"])
            return _http(route, [head("GET", route)], cut=chance.choice([0.0, 0.1, 0.5]))
        route, body = self._drawn(chance, 0.2)
        body = body.replace(b'"max_tokens": 4', b'"max_tokens": 200, "stream": true')
        raw = post(route, body)
        if chance.random() < 0.3:
            raw = raw[: chance.randrange(1, len(raw))]
        return _http(route, [raw], cut=chance.choice([0.0, 0.0, 0.005, 0.03, 0.2]))

    def _pipeline(self, chance: random.Random) -> dict[str, Any]:
        count = chance.choice([2, 5, 40, 64, 70, 1000])
        requests = []
        for _ in range(count):
            route, body = self._drawn(chance, 0.1 if count < 9 else 0.0)
            if count > 5 or chance.random() < 0.5:
                requests.append(head("GET", "/health"))
            else:
                requests.append(post(route, body))
        if chance.random() < 0.3:
            requests.insert(chance.randrange(count), chance.randbytes(50) + b"\r\n\r\n")
        return _http("pipeline", [b"".join(requests)], answers=count, may_close=True)

    def _no_http(self, chance: random.Random) -> dict[str, Any]:
        line = b"GET /health HTTP/1.1\r\n"
        raw = chance.choice(
            [
                chance.randbytes(chance.choice([1, 20, 3000])),
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(500),
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + chance.randbytes(50),
                line + b"Host: a\r\n" + b"a" * chance.choice([10, 10**6]),
                line + b"Host : a\r\n\r\n",
                line + b"Host: a\r\n b\r\n\r\n",
                line + b"Host: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
                line + b"Content-Length: " + b"9" * chance.choice([5, 19, 20, 400]) + b"\r\n\r\n",
                line.replace(b"1.1", chance.choice([b"0.9", b"1.0", b"2.0", b"9.9", b"1.1.1"]))
                + b"\r\n",
                b"GET " + b"/a" * chance.choice([100, 500_000]) + b" HTTP/1.1\r\n\r\n",
                b"\r\n" * chance.choice([3, 50_000]) + line + b"Host: localhost\r\n\r\n",
                line.replace(b"GET", chance.choice([b"get", b"G" * 9000, b"\xff", b""])) + b"\r\n",
                line + b"Host: localhost\nX: y\n\n",
                line + b"Host: localhost\r\n\x00: \x01\r\n\r\n",
            ]
        )
        return _http("no http", [raw], may_close=True, cut=1.0)

    def _lying_tensors(self, chance: random.Random) -> dict[str, Any]:
        """Triton's binary extension: JSON, and behind it bytes that are not as it says."""
        route = f"/v2/models/{chance.choice(['tensorrt_llm', 'ensemble'])}/infer"
        ids = b"".join(number.to_bytes(4, "little") for number in (9, 30, 71))
        tensors = [("input_ids", "INT32", [1, 3], ids),
                   ("input_lengths", "INT32", [1, 1], b"\3\0\0\0"),
                   ("request_output_len", "INT32", [1, 1], b"\4\0\0\0")]  # fmt: skip
        if "ensemble" in route:
            tensors = [("text_input", "BYTES", [1, 1], b"\3\0\0\0Tom"),
                       ("max_tokens", "INT32", [1, 1], b"\4\0\0\0")]  # fmt: skip
        body: dict[str, Any] = {"id": "x", "inputs": []}
        tail = b""
        liar = chance.randrange(len(tensors) + 1)
        for number, (name, datatype, shape, raw) in enumerate(tensors):
            size: Any = len(raw)
            if number == liar:
                size, shape, datatype, raw = _lie(chance, size, shape, datatype, raw)
            tensor = {"name": name, "shape": shape, "datatype": datatype}
            if number != liar or chance.random() < 0.9:
                tensor["parameters"] = {"binary_data_size": size}
            body["inputs"].append(tensor)
            tail += raw
        if chance.random() < 0.3 and "ensemble" not in route:
            names = ("output_ids", "sequence_length", "cum_log_probs")[: chance.choice([1, 2, 3])]
            body["outputs"] = [{"name": it, "parameters": {"binary_data": True}} for it in names]
        text = json.dumps(body).encode()
        if chance.random() < 0.1:
            text = hostile_body(chance, body, {})
        length = len(text)
        if chance.random() < 0.15:
            length += chance.choice([-1, 1, -length, 10**6, 2**63])
        raw = text + tail
        headers: dict[str, str | int] = {_INFER_HEADER: length}
        if chance.random() < 0.2:
            raw = gzip.compress(raw, 1, mtime=0)[: chance.choice([None, None, -3])]
            headers["Content-Encoding"] = chance.choice(["gzip", "gzip", "deflate"])
        return _http(route, [post(route, raw, headers)], may_time_out=b"timeout" in text)


def _lie(chance: random.Random, size: Any, shape: Any, datatype: Any, raw: bytes) -> Any:
    """The four with one of them, or two, changed."""
    for _ in range(chance.choice([1, 1, 2])):
        kind = chance.randrange(4)
        if kind == 0:
            size = chance.choice([0, -1, 3, 5, 2**31, 2**63 - 1, 1e9, "4", None])
        elif kind == 1:
            shape = chance.choice([[-1, 1], [2**31, 2**32], [0], [], [1] * 9, [1.5], None, [3, 1]])
        elif kind == 2:
            datatype = chance.choice(["INT64", "FP32", "BYTES", "BOOL", "FP16", "UINT8", "x", None])
        else:
            few = [b"", raw[:-1], raw + b"a", b"\xff" * len(raw), chance.randbytes(len(raw))]
            many = [b"\0\0\0\x40aaaa", b"\1\0\0\0a" * 1000, b"\0" * (2 << 20)]
            raw = chance.choice(few + many)
            size = chance.choice([size, len(raw), len(raw)])
    return size, shape, datatype, raw


def _http(route: str, pieces: list[Piece], **others: Any) -> dict[str, Any]:
    short = route if len(route) < 60 else route[:60] + "..."
    return {"front": "http", "route": short, "pieces": tuple(pieces), **others}


def _has_deadline(body: bytes) -> bool:
    return b"deadline_s" in body or b"timeout" in body

"""`Case`: what a hostile client does on one connection, as a value that a file can hold."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Piece = bytes | float  # bytes to send; seconds to wait


@dataclass(frozen=True)
class Case:
    """`front`: "http", "grpc", or "wire", which sends bytes to the port of gRPC.

    `route`: what is counted together; over gRPC the method. `pieces`: over gRPC each is a message.
    `answers`: the HTTP responses that must come, unless `may_close`: the server may close instead.
    `cut`: the client goes away after as many seconds; None: it waits for its answers.
    `may_time_out`: the request names a deadline of its own, so that a 504 is right.
    """

    seed: int
    number: int
    kind: str
    front: str
    route: str
    pieces: tuple[Piece, ...]
    answers: int = 1
    may_close: bool = False
    cut: float | None = None
    may_time_out: bool = False

    @property
    def size(self) -> int:
        return sum(len(piece) for piece in self.pieces if isinstance(piece, bytes))

    def as_json(self) -> str:
        pieces = [
            base64.b85encode(zlib.compress(piece)).decode() if isinstance(piece, bytes) else piece
            for piece in self.pieces
        ]
        return json.dumps({**vars(self), "pieces": pieces})

    @classmethod
    def from_json(cls, text: str) -> Case:
        fields: dict[str, Any] = json.loads(text)
        pieces = (
            zlib.decompress(base64.b85decode(piece)) if isinstance(piece, str) else piece
            for piece in fields["pieces"]
        )
        return cls(**{**fields, "pieces": tuple(pieces)})


def head(
    method: str, path: str, headers: Mapping[str, str | int] | None = None, size: int | None = None
) -> bytes:
    """The head of an HTTP request with a body of `size` bytes; None: without a body."""
    length = {} if size is None else {"Content-Length": size}
    given = {"Host": "localhost", "Content-Type": "application/json", **length, **(headers or {})}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in given.items())]
    return "\r\n".join([*lines, "", ""]).encode("utf-8", "surrogatepass")


def post(path: str, body: bytes, headers: Mapping[str, str | int] | None = None) -> bytes:
    return head("POST", path, headers, len(body)) + body

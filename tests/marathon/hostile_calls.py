"""Sends cases to a server, and tells what was wrong with its answers."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import grpc
import httptools
from hostile_case import Case

_KEPT = 1 << 20  # bytes of an answer that are looked at
_FAILED = (b"the server failed; its log", b"Traceback (most")
_SERVICE = "/inference.GRPCInferenceService/"
_STREAM = "ModelStreamInfer"
_CODES = grpc.StatusCode
_REFUSED = {
    *(_CODES.OK, _CODES.INVALID_ARGUMENT, _CODES.NOT_FOUND, _CODES.UNIMPLEMENTED),
    _CODES.RESOURCE_EXHAUSTED,
}


class Target(NamedTuple):
    """Where a server answers. `grpc`: host and port, "" for none."""

    host: str
    port: int
    grpc: str


@dataclass
class Outcome:
    """`answers`: statuses, names of codes, or "closed". `problem`: "" for none."""

    answers: list[str] = field(default_factory=list)
    problem: str = ""


def send(case: Case, target: Target, patience_s: float) -> Outcome:
    """`patience_s`: an answer that takes longer is none."""
    if case.front == "grpc":
        return _call(case, target, patience_s)
    host, port = target.host, target.port
    if case.front == "wire":
        host, _, number = target.grpc.rpartition(":")
        port = int(number)
    try:
        with socket.create_connection((host, port), patience_s) as connection:
            return _Exchange(case, connection, patience_s).run()
    except OSError as error:
        return Outcome(["no connection"], f"no connection: {error}")


# HTTP -----------------------------------------------------------------------------------------


class _Exchange:
    """One connection. It reads while it writes, as the server may answer early."""

    def __init__(self, case: Case, connection: socket.socket, patience_s: float) -> None:
        self._case = case
        self._connection = connection
        self._patience_s = patience_s
        self._outcome = Outcome()
        self._parser = httptools.HttpResponseParser(self)
        self._is_head = any(
            isinstance(piece, bytes) and piece.startswith(b"HEAD ") for piece in case.pieces
        )
        self._status = 0
        self._kept = bytearray()
        self._is_over = False

    def run(self) -> Outcome:
        self._connection.setblocking(False)
        for piece in self._case.pieces:
            if isinstance(piece, float):
                self._read_for(piece)
            else:
                self._write(piece)
        if self._case.cut is not None:
            self._read_for(self._case.cut)
            if self._case.number % 2 and not self._is_over:  # a reset instead of an end
                linger = b"\1\0\0\0\0\0\0\0"
                self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return self._outcome
        self._read_for(self._patience_s)
        self._check_end()
        return self._outcome

    def _write(self, piece: bytes) -> None:
        rest = memoryview(piece)
        give_up = time.monotonic() + self._patience_s
        while rest and not self._is_over and time.monotonic() < give_up:
            readable, writable, _ = select.select(
                [self._connection], [self._connection], [], self._patience_s
            )
            if readable:
                self._read()
            if writable and not self._is_over:
                try:
                    rest = rest[self._connection.send(rest[: 1 << 16]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self._read_for(self._patience_s)  # the answer may have come before
                    self._is_over = True

    def _read_for(self, seconds: float) -> None:
        give_up = time.monotonic() + seconds
        while not self._is_over and (left := give_up - time.monotonic()) > 0:
            if select.select([self._connection], [], [], left)[0]:
                self._read()

    def _read(self) -> None:
        try:
            data = self._connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._is_over = True
            return
        if self._case.front == "wire":
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._is_over = True
            if not self._is_head and not self._outcome.problem:
                self._outcome.problem = f"the answer is not HTTP: {error}: {data[:200]!r}"

    def _check_end(self) -> None:
        outcome, case = self._outcome, self._case
        if len(outcome.answers) >= case.answers or outcome.problem:
            return
        outcome.answers.append("closed" if self._is_over else "none")
        if not self._is_over:
            outcome.problem = f"no answer in {self._patience_s:g} s"
        elif not case.may_close or self._status:
            outcome.problem = "the connection was closed before the answer, or within it"

    # What the parser tells --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._kept.clear()

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()
        if self._is_head:
            self._outcome.answers.append(str(self._status))
            self._is_over = True

    def on_body(self, body: bytes) -> None:
        if len(self._kept) < _KEPT:
            self._kept += body

    def on_message_complete(self) -> None:
        status, self._status = self._status, 0
        if status < 200 or self._is_head:
            return
        self._outcome.answers.append(str(status))
        problem = _problem_of(status, bytes(self._kept), self._case)
        self._outcome.problem = self._outcome.problem or problem
        self._is_over = self._is_over or len(self._outcome.answers) >= self._case.answers


def _problem_of(status: int, body: bytes, case: Case) -> str:
    allowed = status < 500 or status in (501, 503) or (status == 504 and case.may_time_out)
    if not allowed or any(word in body for word in _FAILED):
        return f"{status}: {body[:500]!r}"
    if status < 400:
        return ""
    try:
        told = json.loads(body)["error"]
    except (ValueError, LookupError, TypeError):
        return f"{status} without an error object: {body[:500]!r}"
    return "" if told else f"{status} says nothing"


# gRPC -----------------------------------------------------------------------------------------

_channels: dict[str, Any] = {}


def _channel(address: str) -> Any:
    """One for all calls: gRPC would share the connection anyway."""
    if address not in _channels:
        sizes = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
        _channels[address] = grpc.insecure_channel(address, sizes)
    return _channels[address]


def _call(case: Case, target: Target, patience_s: float) -> Outcome:
    channel = _channel(target.grpc)
    path = _SERVICE + case.route
    began = time.monotonic()
    if case.route == _STREAM:
        call = channel.stream_stream(path)(_messages(case), timeout=patience_s)
    else:
        call = channel.unary_unary(path).future(case.pieces[0], timeout=patience_s)
    if case.cut is not None:
        time.sleep(case.cut)
        call.cancel()
    problem = ""
    try:
        for answer in call if case.route == _STREAM else [call.result()]:
            if any(word in answer for word in _FAILED):
                problem = f"an answer says: {answer[:500]!r}"
    except (grpc.RpcError, grpc.FutureCancelledError):
        pass
    code, details = call.code(), call.details() or ""
    allowed = {*_REFUSED, *({_CODES.CANCELLED} if case.cut is not None else ())}
    if case.may_time_out and time.monotonic() - began < patience_s:
        allowed.add(_CODES.DEADLINE_EXCEEDED)
    if code not in allowed or any(word in details.encode() for word in _FAILED):
        problem = problem or f"{code}: {details[:500]}"
    return Outcome([code.name], problem)


def _messages(case: Case) -> Iterator[bytes]:
    for piece in case.pieces:
        assert isinstance(piece, bytes)
        yield piece

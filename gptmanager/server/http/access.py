"""`AccessSettings`: the clients that may use the server, and limits on connections and bodies."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptmanager.errors import ConfigError, quoted, quoted_path
from gptmanager.server.http.key_file import ApiKey, read_key, read_key_file

_ORIGIN = re.compile(
    r"[a-z][a-z0-9+.-]*://[a-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-f:]+\](:\d{1,5})?"
)
_ROOT_PATH = re.compile(r"(/[\w.~-]+)+", re.ASCII)
TEXT_BYTES, TENSOR_BYTES = 4 << 20, 64 << 20
MAX_BODIES_BYTES = 1 << 30  # limit for the bodies of all clients together


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """Limits on clients and their connections.

    `api_key`: the key that clients must send. `api_key_file`: a file with one key or several named
    keys; SIGHUP reloads it. `allowed_hosts`: host names that clients may use in addition to
    localhost and loopback addresses. If `allowed_hosts` is empty, every name is accepted, unless
    the server listens on loopback without a key. `cors_origins`: web pages of these origins may
    call the server; "*" allows all. `root_path`: the prefix that all paths have at a proxy. `uds`:
    the path of a Unix socket at which the server listens instead of a port. `tls_cert`, `tls_key`:
    PEM files for HTTPS. `max_body_bytes`: limit for the bytes of a request's body, by default
    `TEXT_BYTES`, or `TENSOR_BYTES` for a route that accepts tensors.

    `max_connections`: limit of open connections, by default three quarters of the descriptor limit.
    `max_connections_per_address`: limit of open connections from one address, by default none. For
    a client behind a trusted proxy, the limit applies to concurrent requests instead.
    `forwarded_allow_ips`: addresses or networks of trusted proxies. `keep_alive_timeout`: seconds
    that an idle connection stays open. `read_timeout`: seconds within which a request must arrive
    completely. `sse_keep_alive`: seconds between the comments that a stream sends before its first
    token; None means no comments.
    """

    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    allowed_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    root_path: str = ""
    uds: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int | None = None
    max_connections: int | None = None
    max_connections_per_address: int | None = None
    forwarded_allow_ips: Sequence[str] = ("127.0.0.1", "::1")
    keep_alive_timeout: float = 130.0
    read_timeout: float = 60.0
    sse_keep_alive: float | None = None

    def __post_init__(self) -> None:
        self._check_minimum(max_body_bytes=1, max_connections=1, max_connections_per_address=1)
        if self.max_body_bytes is not None and self.max_body_bytes > MAX_BODIES_BYTES:
            raise ConfigError(
                f"max_body_bytes = {self.max_body_bytes} must be at most {MAX_BODIES_BYTES}, the "
                "limit for the bodies of all clients together"
            )
        for name in ("keep_alive_timeout", "read_timeout", "sse_keep_alive"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name} = {value} must be more than 0 seconds")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("pass either api_key or api_key_file, not both")
        self.read_keys()
        networks_of(self.forwarded_allow_ips)
        for origin in self.cors_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"cors_origins: {quoted(origin)} must be * or like https://host.example:8000"
                )
        if self.root_path and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path = {quoted(self.root_path)} must be like /llm or /llm/v2, with letters, "
                "digits and ._~- after each slash"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("pass tls_cert and tls_key together")
        self.tls_context()

    def body_limit(self, *, carries_tensors: bool = False) -> int:
        """Return the maximum size of a request's body in bytes.

        `carries_tensors`: the route accepts tensors.
        """
        return self.max_body_bytes or (TENSOR_BYTES if carries_tensors else TEXT_BYTES)

    @property
    def has_key(self) -> bool:
        """Whether clients must send a key."""
        return self.api_key is not None or self.api_key_file is not None

    def read_keys(self) -> tuple[ApiKey, ...]:
        """Return the keys. A key file is read again in each call.

        Raises ConfigError for a file that cannot be used, and for a key that a header cannot carry.
        """
        if self.api_key_file is not None:
            return read_key_file(self.api_key_file)
        return () if self.api_key is None else (read_key(self.api_key),)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS context of the certificate and its key, or None without TLS.

        Raises ConfigError if the files cannot be used.
        """
        if self.tls_cert is None or self.tls_key is None:
            return None
        files = f"--tls-cert {quoted_path(self.tls_cert)} --tls-key {quoted_path(self.tls_key)}"
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password OpenSSL would ask for one at the terminal if the key is encrypted.
            context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        except ssl.SSLError as error:
            told = f"{files} must be a certificate and its unencrypted key, in PEM: {error.reason}"
            raise ConfigError(told) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{files} cannot be used: {reason}") from None
        return context

    def _check_minimum(self, **minimums: int) -> None:
        for name, limit in minimums.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise ConfigError(f"{name} = {value} must be at least {limit}")


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks_of(allowed: Sequence[str]) -> list[_Network]:
    """Return the networks in `allowed` (`forwarded_allow_ips`). "*" means every address.

    Raises ConfigError for a text that is not an address or a network.
    """
    networks: list[_Network] = []
    for one in allowed:
        try:
            texts = ("0.0.0.0/0", "::/0") if one == "*" else (one,)
            networks += map(ipaddress.ip_network, texts)
        except ValueError as error:
            raise ConfigError(
                f"forwarded_allow_ips: {one!r} must be an address or a network: {error}"
            ) from None
    return networks

"""`AccessSettings`: which clients may reach the server, with how many connections and how large
bodies.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gptmanager.errors import ConfigError

TEXT_BYTES, TENSOR_BYTES = 4 << 20, 64 << 20


@dataclass(frozen=True, kw_only=True)
class AccessSettings:
    """Limits on clients and their connections.

    `api_key`: the key that clients must send. `api_key_file`: a file that contains the key; SIGHUP
    reloads it. `allowed_hosts`: host names that clients may use in addition to those of the
    server's own machine; empty: every name is accepted, except on loopback without a key.
    `max_body_bytes`: limit for a request's body; None: `TEXT_BYTES`, or `TENSOR_BYTES` for a route
    that accepts tensors.

    `max_connections`: open connections; None: as many as the descriptor limit allows.
    `max_connections_per_address`: connections of one client, None: no limit; of a client behind a
    proxy, the requests that run at once. `forwarded_allow_ips`: addresses or networks of trusted
    proxies. `keep_alive_timeout`: seconds that an idle connection stays open. `read_timeout`:
    seconds within which a request must arrive completely.
    """

    api_key: str | None = field(default=None, repr=False)
    api_key_file: Path | None = None
    allowed_hosts: Sequence[str] = ()
    max_body_bytes: int | None = None
    max_connections: int | None = None
    max_connections_per_address: int | None = None
    forwarded_allow_ips: Sequence[str] = ("127.0.0.1", "::1")
    keep_alive_timeout: float = 130.0
    read_timeout: float = 60.0

    def __post_init__(self) -> None:
        self._check_minimum(max_body_bytes=1, max_connections=1, max_connections_per_address=1)
        for name in ("keep_alive_timeout", "read_timeout"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} = {getattr(self, name)} must be more than 0 seconds")
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("pass either api_key or api_key_file, not both")
        self.read_key()
        networks_of(self.forwarded_allow_ips)

    def body_limit(self, *, carries_tensors: bool = False) -> int:
        """Return the maximum size of a request's body, in bytes."""
        return self.max_body_bytes or (TENSOR_BYTES if carries_tensors else TEXT_BYTES)

    @property
    def has_key(self) -> bool:
        return self.api_key is not None or self.api_key_file is not None

    def read_key(self) -> str | None:
        """Return the key, from the current content of its file if there is one.

        Raises ConfigError for a key that cannot be sent in a header.
        """
        if self.api_key_file is None:
            return None if self.api_key is None else _checked("api_key", self.api_key)
        try:
            text = self.api_key_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file cannot be read: {error}") from error
        return _checked(f"api_key_file = {self.api_key_file}: the key", text.rstrip("\r\n"))

    def _check_minimum(self, **minimums: int) -> None:
        for name, limit in minimums.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                raise ConfigError(f"{name} = {value} must be at least {limit}")


def _checked(where: str, key: str) -> str:
    if key == "":
        raise ConfigError(f"{where} is empty: leave it out to start the server without a key")
    if not (key.isprintable() and key == key.strip()):
        raise ConfigError(
            f"{where} must be printable and must not begin or end with a space: a header cannot "
            "carry it otherwise"
        )
    return key


_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def networks_of(allowed: Sequence[str]) -> list[_Network]:
    """Return the networks in `forwarded_allow_ips`; "*" is every address. Raises ConfigError."""
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

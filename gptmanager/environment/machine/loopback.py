"""`is_loopback`: whether a host is this machine, and no other machine can be meant."""

from ipaddress import ip_address


def is_loopback(host: str) -> bool:
    """Return whether `host`, without a port, is localhost or a loopback address."""
    try:
        address = ip_address(host)
    except ValueError:
        return host == "localhost"
    # before Python 3.13, ::ffff:127.0.0.1 is not a loopback address
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback

"""`host:port` as people write it, `[::1]:7000` included."""

from __future__ import annotations

from ekiden.errors import WrongUsage


def split_address(address: str) -> tuple[str, int]:
    """Host and port of one address. Raises `WrongUsage` if it is none."""
    host, colon, digits = address.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not host or not (digits.isascii() and digits.isdigit()):
        raise WrongUsage(
            f"{address!r} is not an address",
            remedy="write host:port, such as 127.0.0.1:7000 or [::1]:7000",
        )
    port = int(digits)
    if not 0 < port < 65536:
        raise WrongUsage(f"{address!r} has no usable port", remedy="use a port from 1 to 65535")
    return host, port


def split_addresses(text: str) -> list[str]:
    """The addresses of `a:7000,b:7000`, each checked, in order and without repeats."""
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise WrongUsage("no address was given", remedy="write host:port[,host:port]")
    for address in found:
        split_address(address)
    return list(dict.fromkeys(found))


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

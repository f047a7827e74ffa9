"""Which requests of browsers the server and its page answer."""

import ipaddress
from collections.abc import Mapping
from urllib.parse import urlsplit


def foreign_host(headers: Mapping[str, str], hosts: set[str]) -> bool:
    """Whether the Host header is none of these names, localhost or an IP address: DNS rebinding brings another name."""
    try:
        name = urlsplit(f"//{headers.get('host', '').lower()}").hostname or ""
        if name not in {"localhost", *hosts}:
            ipaddress.ip_address(name)
    except ValueError:
        return True
    return False


def foreign_origin(headers: Mapping[str, str], origins: tuple[str, ...] = ()) -> bool:
    """Whether the request comes from a web page of another origin that is none of these; "*" stands for all."""
    origin = headers.get("origin")
    if origin is None or not {origin, "*"}.isdisjoint(origins):
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("host", "").lower()
    except ValueError:
        return True

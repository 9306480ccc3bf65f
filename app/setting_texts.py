"""How values of settings are written as text: sizes, switches, addresses."""

from __future__ import annotations

import ipaddress
import re


def is_loopback(host: str) -> bool:
    """Whether `host` is this machine's own address; a name other than localhost is taken for another machine's."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)(i?[bB]?)")


def parse_bytes(text: str) -> int:
    """Bytes of `2GiB`, `2G`, `512M`, `1.5g` (powers of 1024) or `2GB` (powers of 1000) or a plain number.

    Raises:
        ValueError: anything else; says what is expected.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError("a size such as 2147483648, 512M or 2GiB")
    number, prefix, suffix = match.groups()
    decimal = suffix.lower() == "b" and prefix != ""
    return int(float(number) * (_UNITS if decimal else _BINARY_UNITS)[prefix.lower()])


def format_bytes(value: int) -> str:
    """The shortest exact or nearly exact form: `2 GiB`, `512 MiB`, `1.5 GiB`, `17 bytes`."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value} bytes"


def parse_bool(text: str) -> bool:
    """A switch as people write it in an environment variable.

    Raises:
        ValueError: neither a yes nor a no; says what is expected.
    """
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("true or false")

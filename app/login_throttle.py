"""Wrong keys at the login form: a few are human, many are guessing.

Only the form is throttled. A key in a header is not: one program with an old key would shut out every other behind the
same address, and whoever guesses there finds a created key never, and a flag's key only if its operator chose it badly.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable

MAX_FAILURES = 10
WINDOW_S = 60.0
MAX_ADDRESSES = 1024  # the table's bound: those that failed longest ago are forgotten first


class LoginThrottle:
    """After `MAX_FAILURES` wrong keys from one address within `WINDOW_S` no key is looked at until the window is over.

    Args:
        now: a monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()  # network -> (window's begin, failures)

    def wait_s(self, address: str) -> int:
        """Whole seconds until this address may try again; 0: now."""
        begin, failures = self._failures.get(_network(address), (0.0, 0))
        left = begin + WINDOW_S - self._now()
        return max(1, math.ceil(left)) if failures >= MAX_FAILURES and left > 0 else 0

    def failed(self, address: str) -> None:
        """Count a wrong key."""
        network, now = _network(address), self._now()
        begin, failures = self._failures.pop(network, (now, 0))
        if now - begin >= WINDOW_S:
            begin, failures = now, 0
        self._failures[network] = (begin, failures + 1)
        while len(self._failures) > MAX_ADDRESSES:
            self._failures.popitem(last=False)

    def __len__(self) -> int:
        return len(self._failures)


def _network(address: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 one, which is what one customer has."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 6:
        return str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))
    return str(parsed)

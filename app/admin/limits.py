"""The limits as people read them, and the entity tags that keep two admins from overwriting each other."""

from __future__ import annotations

import re

from app.encode import Json
from app.settings import Settings
from engine.async_engine import AsyncEngine
from engine.core.limits import LIMIT_TABLE, LimitRow, Limits, start_limits

_ETAG = re.compile(r'(?:W/)?"(\d{1,15})"')
_NO_VERSION = 0  # versions begin at 1: a tag that is none of ours is stale

_TAKES_EFFECT = {
    "max_num_queued_reqs": "at the next arrival",
    "queue_timeout_s": "for requests that arrive from now on",
    "request_timeout_s": "for requests that arrive from now on",
    "num_usable_blocks": "at once, before the next step",
}


def etag(version: int) -> str:
    """The entity tag of a version of the limits."""
    return f'"{version}"'


def expected_version(if_match: str) -> int | None:
    """The version that a client's If-Match names; None for `*`, any."""
    if if_match.strip() == "*":
        return None
    match = _ETAG.fullmatch(if_match.strip())
    return int(match[1]) if match else _NO_VERSION


def limits_table(engine: AsyncEngine, settings: Settings) -> list[Json]:
    """One row per limit, in the order of the table."""
    current, start = engine.state.limits.as_dict(), engine.start_limits.as_dict()
    default = start_limits(Limits(), engine.info.num_blocks, engine.info.device).as_dict()
    return [
        {
            "name": row.name,
            "value": current[row.name],
            "default": default[row.name],
            "start_value": start[row.name],
            "source": settings.source(row.name) if current[row.name] == start[row.name] else "runtime",
            "help": row.help,
            "kind": row.kind,
            "low": row.low,
            "high": _high(row, engine.info.num_blocks),
            "choices": list(row.choices),
            "range": row.range_text(engine.info.num_blocks),
            "takes_effect": _TAKES_EFFECT.get(row.name, "at the next step"),
        }
        for row in LIMIT_TABLE
    ]


def _high(row: LimitRow, num_blocks: int) -> float | None:
    return num_blocks if row.name == "num_usable_blocks" else row.high

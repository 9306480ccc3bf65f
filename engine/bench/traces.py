"""Recorded traces of production services: lengths and times, no text.

Three formats are read, gzipped or not: the Azure LLM inference traces (CSV: TIMESTAMP, ContextTokens, GeneratedTokens;
Patel et al., "Splitwise", ISCA 2024), the Mooncake traces (JSON lines: timestamp in ms, input_length, output_length,
hash_ids, the identities of the 512-token blocks of the prompt; Qin et al., "Mooncake", FAST 2025), and this project's
own workload files (JSON lines with prompt_token_ids, max_tokens, arrival_s).
"""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TextIO

from engine.bench.workloads import WorkloadError

MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One line of a trace."""

    arrival_s: float  # after the first
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_ids: tuple[int, ...] = ()  # equal ids mean equal content of that many leading blocks of prefix_block_tokens
    prefix_block_tokens: int = MOONCAKE_BLOCK_TOKENS


def read_trace(path: Path) -> list[TracedRequest]:
    """All requests in the order of their arrival.

    Raises:
        WorkloadError: the file cannot be read or is none of the formats; names the line.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as file:
            requests = list(_rows(file, path))
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise WorkloadError(f"the trace {path} cannot be read: {error}") from None
    if not requests:
        raise WorkloadError(f"the trace {path} holds no request")
    return sorted(requests, key=lambda request: request.arrival_s)


def _rows(file: TextIO, path: Path) -> Iterator[TracedRequest]:
    first = file.readline()
    file.seek(0)
    parse = _json_rows if first.lstrip().startswith("{") else _azure_rows
    number = 0
    try:
        for request in parse(file):
            number += 1
            if request.num_prompt_tokens < 1 or request.num_output_tokens < 1:
                raise ValueError("lengths must be >= 1")
            yield request
    except (ValueError, KeyError, TypeError) as error:
        raise WorkloadError(f"{path}, request {number + 1}: not a request of a known trace: {error}") from None


def _azure_rows(file: TextIO) -> Iterator[TracedRequest]:
    start: datetime | None = None
    for row in csv.DictReader(file):
        at = datetime.fromisoformat(row["TIMESTAMP"][:26])  # microseconds; the traces have a digit more
        start = start or at
        arrival_s = (at - start).total_seconds()
        yield TracedRequest(arrival_s, int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))


def _json_rows(file: TextIO) -> Iterator[TracedRequest]:
    for line in file:
        if line.strip():
            yield _json_request(json.loads(line))


def _json_request(row: Mapping[str, object]) -> TracedRequest:
    if "prompt_token_ids" in row:
        ids = row["prompt_token_ids"]
        assert isinstance(ids, list)
        # The workload's own ids say what is shared: each token is a block of one.
        return TracedRequest(
            _number(row.get("arrival_s", 0.0)), len(ids), int(_number(row["max_tokens"])), tuple(ids), 1
        )
    hash_ids = row["hash_ids"]
    assert isinstance(hash_ids, list)
    return TracedRequest(
        _number(row["timestamp"]) / 1000, int(_number(row["input_length"])), max(1, int(_number(row["output_length"]))),
        tuple(hash_ids),
    )  # fmt: skip


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)

"""The rows of `make bench`, on a fake engine."""

from __future__ import annotations

from itertools import pairwise

import pytest

import engine.bench.table
from engine.bench.table import latency_table, request_id, run_timed, throughput_table
from engine.bench.workloads import Item, Workload
from tests.helpers.engines import make_engine


def test_each_token_has_a_time_and_gaps_lie_between_those_of_one_request() -> None:
    fake = make_engine()
    workload = Workload("w", (Item((1, 2, 3), 4), Item((4, 5), 3, arrival_s=0.005)))
    timeline = run_timed(fake, workload, 0)
    names = [request_id(workload, 0, index) for index in range(2)]
    times = [timeline.token_times[name] for name in names]
    assert [len(each) for each in times] == [4, 3]
    assert times[1][0] >= 0.005
    assert all(each == sorted(each) for each in times)
    assert timeline.gaps(names) == [b - a for each in times for a, b in pairwise(each)]


def test_the_tables_are_markdown_of_what_ran(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(spec: str) -> Workload:
        long = Item(tuple(range(200)) * 6, 2)
        return Workload(spec, (Item((1, 2, 3), 40), Item((4, 5), 30), *([long] if spec == "interference" else [])))

    monkeypatch.setattr(engine.bench.table, "make_workload", small)
    monkeypatch.setattr(engine.bench.table, "SINGLE_PROMPT_TOKENS", (1, 2, 3))
    fake = make_engine(num_blocks=256)
    assert throughput_table(fake, ["mixed:2"], 1) == 0
    latency_table(fake, 1)
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line]
    assert rows[2][:4] == ["mixed:2", "2", "5", "70"]
    assert [len(row) for row in rows] == [7, 7, 7, 5, 5, 5]
    assert float(rows[5][0].replace(",", "")) > 0

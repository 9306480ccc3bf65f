"""Numbers and tables of the benches."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.report import format_table, percentile


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=2))
def test_percentiles_agree_with_the_standard_library(values: list[float]) -> None:
    assert percentile(values, 50) == pytest.approx(statistics.median(values))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, 99) == pytest.approx(cuts[98])
    assert percentile(values, 100) == max(values)


def test_a_table_is_aligned_and_shows_what_is_unknown_as_a_dash() -> None:
    assert format_table(("a", "long"), [(1, 2.0), (12345, None)]).splitlines() == [
        "     a  long",
        "     1     2",
        "12,345     –",
    ]

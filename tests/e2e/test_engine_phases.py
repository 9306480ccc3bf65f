"""The bar of a step's phases on /engine says what the admin API says."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.load import Console, Load

pytestmark = [pytest.mark.browser, pytest.mark.slow]

expect.set_options(timeout=20_000)


def test_the_bar_shows_the_medians_of_the_latest_steps(
    clean_page: Page, address: str, console: Console, traffic: Load
) -> None:
    page = clean_page
    page.goto(f"{address}/engine")
    now = page.locator(".phases-now")
    traffic.start(4, max_tokens=30)
    traffic.join()
    status, profile = console.call("GET", "/admin/api/phases?limit=100")
    assert status == 200
    assert profile["num_steps"] > 1
    expect(now).to_contain_text(f"median of the last {profile['num_steps']} steps")
    names = [phase["name"] for phase in profile["phases"]]
    assert {"schedule", "update", "publish"} <= set(names)
    assert page.locator(".phases-bar span").evaluate_all("all => all.map(e => e.dataset.phase)") == names
    texts = page.locator(".phases-list li").all_inner_texts()
    assert [re.split(r"\s+", text.strip())[0] for text in texts] == names
    shares = page.locator(".phases-bar span").evaluate_all("all => all.map(e => Number(e.style.flexGrow))")
    assert sum(shares) == pytest.approx(1.0)

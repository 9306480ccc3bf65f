"""/engine/requests/ID: reached from the engine page, alive while the request is, still there when it has ended."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.load import Console, Load

pytestmark = [pytest.mark.browser, pytest.mark.slow]


def test_the_page_of_a_request_follows_it_to_its_end(
    clean_page: Page, address: str, console: Console, traffic: Load
) -> None:
    page = clean_page
    page.goto(f"{address}/engine")
    traffic.start(1, max_tokens=400)
    page.locator("#running tbody tr").first.click()
    page.locator("#selection-open").click()
    page.wait_for_url(re.compile("/engine/requests/cmpl-"))
    (row,) = console.state()["running"]
    expect(page.locator("h1")).to_have_text(row["request_id"])
    expect(page.locator(".request-head .chip")).to_have_text("LIVE")
    expect(page.locator(".request-timeline .span-writing")).to_have_count(1)
    output = page.locator(".request-facts div", has_text="output / max").locator("dd")
    before = output.inner_text()
    expect(output).not_to_have_text(before)  # it goes on by itself
    console.call("POST", f"/admin/api/requests/{row['request_id']}/abort", {})
    expect(page.locator(".request-head .chip")).to_have_text("ENDED")
    expect(page.locator(".request-sequence h2")).to_contain_text("ended: abort")
    expect(page.locator(".request-events tbody tr").last).to_contain_text("aborted")
    expect(page.locator("#request")).to_have_attribute("data-live", "false")


def test_a_request_that_is_not_known_is_a_page_that_says_so(clean_page: Page, address: str) -> None:
    answer = clean_page.goto(f"{address}/engine/requests/no-such-request")
    assert answer is not None
    assert answer.status == 404
    expect(clean_page.locator("main")).to_contain_text("neither lives nor is in the trace")

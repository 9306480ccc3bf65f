"""Keys on /admin: made, shown once, used, revoked; and what the first one changes is said before."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from app.settings import Settings
from tests.e2e.load import Console
from tests.helpers.live_app import ADMIN, KEYS, READ_ONLY, LiveApp, serve

pytestmark = [pytest.mark.browser, pytest.mark.slow]
expect.set_options(timeout=20_000)  # an upper bound for a busy machine


@pytest.fixture
def start() -> Iterator[Callable[..., LiveApp]]:
    """Factory: an application with these settings."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(serve(Settings(port=0, **settings)))


def log_in(page: Page, address: str, key: str) -> None:
    """As a person does."""
    page.goto(f"{address}/admin")
    page.locator("#key").fill(key)
    page.get_by_role("button", name="Log in").click()
    page.wait_for_url(f"{address}/admin")


def make(page: Page, label: str, role: str) -> str:
    """A new key; its text."""
    page.locator("#new-key").click()
    page.locator("#key-label").fill(label)
    page.locator("#key-role").select_option(role)
    page.locator("#key-create").click()
    expect(page.locator("#key-shown")).to_be_visible()
    text = page.locator("#key-text").input_value()
    page.locator("#key-done").click()
    return text


def status(address: str, path: str, key: str | None) -> int:
    """Of a GET by a program."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return Console(address).call("GET", path, **headers)[0]


def test_a_key_is_shown_once_works_and_ends_when_it_is_revoked(
    browser_page: Page, visit: object, start: Callable[..., LiveApp]
) -> None:
    address = start(api_key=KEYS).address
    page = browser_page
    log_in(page, address, ADMIN)
    expect(page.locator("#key-rows tr")).to_have_count(3)
    expect(page.locator("#key-rows tr", has_text="this browser")).to_contain_text("--api-key 3")
    expect(page.locator("#key-rows [data-revoke]")).to_have_count(0)
    key = make(page, "notebook", "inference")
    assert re.fullmatch(r"pd-[\w-]{43}", key)
    row = page.locator("#key-rows tr", has_text="notebook")
    expect(row).to_contain_text("never")
    assert key not in page.content()
    assert page.locator("#key-text").input_value() == ""
    assert status(address, "/v1/models", key) == 200
    assert status(address, "/admin/api/state", key) == 403
    page.reload()
    expect(row.locator("td[data-label='last used']")).to_have_text(re.compile(r"\d\d:\d\d:\d\d"))
    row.locator("[data-revoke]").click()
    expect(page.locator("#ask-text")).to_contain_text("Programs that send it get 401 at once")
    page.locator("#ask-yes").click()
    expect(page.locator("#keys-receipt")).to_contain_text("was revoked")
    expect(row).to_have_count(0)
    assert status(address, "/v1/models", key) == 401
    expect(page.locator("#audit-rows tr").first).to_contain_text("key revoked")
    assert visit.page_errors == []  # type: ignore[attr-defined]


def test_the_first_key_says_what_it_changes_and_leaves_this_browser_in(
    browser_page: Page, browser_context: BrowserContext, visit: object, start: Callable[..., LiveApp], tmp_path: Path
) -> None:
    address = start(data_dir=str(tmp_path)).address
    page = browser_page
    page.goto(f"{address}/admin")
    expect(page.locator("#key-rows")).to_contain_text("No keys.")
    page.locator("#new-key").click()
    expect(page.locator("#key-first")).to_contain_text("This key turns authentication on.")
    expect(page.locator("#key-role")).to_be_disabled()
    page.locator("#key-create").click()
    expect(page.locator("#key-label-error")).to_contain_text("Say what it is for")
    assert status(address, "/admin/api/state", None) == 200, "nothing is on before there is a key"
    page.locator("#key-label").fill("my <b>own</b>")
    page.locator("#key-create").click()
    expect(page.locator("#key-shown")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#key-shown")).to_be_visible()
    key = page.locator("#key-text").input_value()
    page.locator("#key-done").click()
    expect(page.locator("#keys-state")).to_have_text("A KEY IS ASKED FOR")
    assert status(address, "/admin/api/state", None) == 401
    assert status(address, "/admin/api/state", key) == 200
    page.reload()
    row = page.locator("#key-rows tr", has_text="my <b>own</b>")
    expect(row).to_contain_text("this browser")
    other = browser_context.browser.new_context()  # type: ignore[union-attr]
    stranger = other.new_page()
    stranger.goto(f"{address}/admin")
    expect(stranger.locator("form.notice #key")).to_be_visible()
    other.close()
    row.locator("[data-revoke]").click()
    expect(page.locator("#ask-text")).to_contain_text("It is the only key: without it no key is asked for")
    page.locator("#ask-yes").click()
    expect(page.locator("#keys-state")).to_have_text("NO KEY IS ASKED FOR")
    assert status(address, "/admin/api/state", None) == 200
    assert visit.page_errors == []  # type: ignore[attr-defined]


def test_a_read_only_login_sees_no_keys(browser_page: Page, start: Callable[..., LiveApp]) -> None:
    address = start(api_key=KEYS).address
    log_in(browser_page, address, READ_ONLY)
    expect(browser_page.locator("[data-keys]")).to_contain_text("only an admin sees them")
    assert browser_page.locator("#key-rows").count() == 0
    assert "--api-key 3" not in browser_page.content()

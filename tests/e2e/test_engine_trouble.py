"""A step that takes too long, and an engine that has died: said in numbers on every page, gone when it is over."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from app.settings import Settings
from tests.e2e.chat_driver import ask
from tests.e2e.parrot import Parrot, ParrotServer
from tests.helpers.live_app import INFERENCE, KEYS, serve

pytestmark = [pytest.mark.browser, pytest.mark.slow]

LIMIT_S = 0.5
STUCK = re.compile(r"The engine is stuck: step 2 has been running for +\d+ s; a step should take less than 500 ms\.")


@pytest.fixture
def parrot_server(start_parrot: Callable[..., ParrotServer]) -> ParrotServer:
    """An engine whose steps may take half a second."""
    server = start_parrot()
    server.app.engine.stuck_after_s = LIMIT_S
    return server


@pytest.fixture
def pages(parrot_server: ParrotServer, browser_context: BrowserContext, clean_page: Page) -> list[Page]:
    """The chat, which waits for an answer since one step; then /engine and /admin."""
    chat, engine, admin = clean_page, browser_context.new_page(), browser_context.new_page()
    for page, path in ((chat, "/"), (engine, "/engine"), (admin, "/admin")):
        page.goto(parrot_server.base_url + path)
        expect(page.locator("#bar-state")).to_have_text("LIVE")
    return [chat, engine, admin]


def show(page: Page) -> None:
    """Hidden tabs get no frames."""
    page.bring_to_front()


def test_a_stuck_step_is_told_on_every_page_until_it_ends(parrot_server: ParrotServer, pages: list[Page]) -> None:
    parrot = parrot_server.parrot
    parrot.hold()
    parrot.say(1)
    show(pages[0])
    ask(pages[0], "say hello there")
    for page in pages:
        show(page)
        expect(page.locator("#engine-banner")).to_have_text(STUCK)
        expect(page.locator("#bar-state")).to_have_text("ENGINE STUCK")
    expect(pages[2].locator("#engine-state")).to_have_text("STUCK")
    seconds = pages[2].locator("#engine-banner [role=timer]")
    before = seconds.inner_text()
    expect(seconds).not_to_have_text(before)  # it counts on
    assert parrot_server.app.engine.is_stuck
    parrot.go_on()
    for page in pages:
        show(page)
        expect(page.locator("#engine-banner")).to_be_hidden()
        expect(page.locator("#bar-state")).to_have_text("LIVE")
    expect(pages[0].locator(".msg-answer")).to_contain_text("hello there")


def test_a_dead_engine_is_told_on_every_page_with_the_step_and_the_reason(
    parrot_server: ParrotServer, pages: list[Page]
) -> None:
    parrot = parrot_server.parrot
    parrot.hold()
    parrot.say(2)
    show(pages[0])
    ask(pages[0], "say hello there")
    expect(pages[0].locator(".msg-answer")).to_contain_text("he")
    parrot.fail("the device is gone")
    for page in pages:
        show(page)
        banner = page.locator("#engine-banner")
        expect(banner).to_contain_text("The engine has stopped after step 2: ")
        expect(banner).to_contain_text("the device is gone")
        expect(page.locator("#bar-state")).to_have_text("ENGINE DEAD")
    # A page that is opened afterwards says so too.
    pages[1].reload()
    expect(pages[1].locator("#engine-banner")).to_contain_text("the device is gone")


def test_who_may_only_chat_is_told_too(browser_page: Page) -> None:
    parrot = Parrot()
    settings = Settings(port=0, api_key=KEYS)
    with serve(settings, choose=parrot.choose, before_step=parrot.before_step, num_blocks=64) as live:
        live.engine.stuck_after_s = LIMIT_S
        browser_page.goto(f"{live.address}/admin/login?next=/")
        browser_page.locator("#key").fill(INFERENCE)
        browser_page.keyboard.press("Enter")
        browser_page.wait_for_url(f"{live.address}/")
        state, banner = browser_page.locator("#bar-state"), browser_page.locator("#engine-banner")
        expect(state).to_have_text("LIVE")
        parrot.hold()
        parrot.say(1)
        ask(browser_page, "say hello there")
        expect(banner).to_have_text(STUCK)
        expect(state).to_have_text("ENGINE STUCK")
        parrot.go_on()
        expect(banner).to_be_hidden()
        expect(state).to_have_text("LIVE")
        parrot.fail("the device is gone")
        ask(browser_page, "say more")
        expect(banner).to_contain_text("the device is gone")
        expect(state).to_have_text("ENGINE DEAD")

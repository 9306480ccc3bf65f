"""/api: the examples are what they say: they run here, and what can be copied runs elsewhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Locator, Page, expect

from app.reference.document import OPERATIONS
from app.settings import Settings
from tests.e2e.load import Console, paced
from tests.helpers.live_app import ADMIN, INFERENCE, KEYS, LiveApp, serve

pytestmark = [pytest.mark.browser, pytest.mark.slow]
expect.set_options(timeout=20_000)  # an upper bound for a busy machine


@pytest.fixture(scope="module")
def live() -> Iterator[LiveApp]:
    """An application on a fake model, slow enough to be watched."""
    with serve(Settings(port=0), num_blocks=64, before_step=paced) as live:
        yield live


@pytest.fixture
def page(clean_page: Page, live: LiveApp) -> Page:
    """/api."""
    clean_page.goto(f"{live.address}/api")
    expect(clean_page.locator("#create_chat_completion [data-code]")).to_contain_text("curl")
    return clean_page


def op(page: Page, name: str) -> Locator:
    """The section of an operation."""
    return page.locator(f"#{name}")


def choose(page: Page, language: str) -> None:
    """The tab of a language; all examples follow."""
    page.locator(f"#create_chat_completion [data-lang={language}]").click()


def test_every_operation_has_its_section_and_its_place_in_the_index(page: Page) -> None:
    assert page.locator(".op").evaluate_all("all => all.map(one => one.id)") == list(OPERATIONS)
    hrefs = page.locator(".api-index a").evaluate_all("all => all.map(one => one.hash.slice(1))")
    assert hrefs == list(OPERATIONS)
    expect(page.locator(".nav a[aria-current=page]")).to_have_text("API")
    page.locator(".api-index a[href='#patch_limits']").click()
    expect(page.locator(".api-index a[aria-current=true]")).to_have_attribute("href", "#patch_limits")


def test_a_stream_is_shown_while_it_comes_and_ends_with_stop(page: Page, live: LiveApp) -> None:
    chat = op(page, "create_chat_completion")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 500, "stream": True, "ignore_eos": True}
    chat.locator("[data-body]").fill(json.dumps(body))
    chat.locator("[data-run]").click()
    expect(chat.locator("[data-text]")).to_have_text(re.compile(r".{5,}", re.DOTALL))
    expect(chat.locator("[data-status]")).to_contain_text("200 OK")
    assert chat.locator("[data-run]").is_disabled()
    assert len(Console(live.address).state()["running"]) == 1
    chat.locator("[data-stop]").click()
    expect(chat.locator("[data-status]")).to_contain_text("stopped")
    expect(page.locator("#bar-running")).to_contain_text("0/")
    assert Console(live.address).state()["running"] == []
    expect(chat.locator("[data-run]")).to_be_enabled()


def test_an_answer_and_an_error_are_shown_with_their_status(page: Page) -> None:
    text = op(page, "tokenize")
    text.locator("[data-run]").click()
    expect(text.locator("[data-status]")).to_contain_text("200 OK")
    expect(text.locator("[data-raw]")).to_contain_text('"count": 15')
    text.locator("[data-body]").fill('{"prompt": 3}')
    text.locator("[data-run]").click()
    expect(text.locator("[data-status]")).to_contain_text("400 Bad Request")
    expect(text.locator("[data-raw]")).to_contain_text('"param": "prompt"')
    text.locator("[data-body]").fill('{"prompt": ')
    expect(text.locator("[data-problem]")).to_contain_text("No JSON yet")
    text.locator("[data-run]").click()
    expect(text.locator("[data-raw]")).to_contain_text("invalid_json")


def test_what_changes_the_engine_asks_first_and_what_cannot_be_undone_has_no_button(page: Page, live: LiveApp) -> None:
    pause = op(page, "pause")
    pause.locator("[data-run]").click()
    expect(page.locator("#run-text")).to_contain_text("changes this server for everyone")
    page.locator("#run-dialog [data-close]").last.click()
    expect(page.locator("#run-dialog")).to_be_hidden()
    assert Console(live.address).state()["paused"] is False
    pause.locator("[data-run]").click()
    page.locator("#run-yes").click()
    expect(pause.locator("[data-status]")).to_contain_text("200 OK")
    assert Console(live.address).state()["paused"] is True
    Console(live.address).act("resume")
    for name in ("drain", "revoke_key"):
        assert op(page, name).locator("[data-run]").count() == 0


def test_the_live_state_runs_until_it_is_stopped(page: Page) -> None:
    events = op(page, "engine_events")
    events.locator("[data-run]").click()
    expect(events.locator("[data-raw]")).to_contain_text("event: key")
    events.locator("[data-stop]").click()
    expect(events.locator("[data-status]")).to_contain_text("stopped")


@pytest.mark.parametrize("name", ["create_chat_completion", "create_completion", "tokenize", "steps", "patch_limits"])
@pytest.mark.parametrize("language", ["curl", "python", "javascript"])
def test_the_code_can_be_pasted_and_run(page: Page, name: str, language: str) -> None:
    commands = {
        "curl": ["bash", "-c"], "python": [sys.executable, "-c"],
        "javascript": ["node", "--input-type=module", "-e"],
    }  # fmt: skip
    if shutil.which(commands[language][0]) is None:
        pytest.skip(f"{commands[language][0]} is not installed")
    if language == "curl" and shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    choose(page, language)
    if name == "create_chat_completion":  # what shells and languages could trip over
        tricky = 'it\'s "quoted" $HOME `x` \\n é 🙂 \u2028'
        body = {"messages": [{"role": "user", "content": tricky}], "max_tokens": 4, "top_k": 3, "stream": True}
        op(page, name).locator("[data-body]").fill(json.dumps(body, ensure_ascii=False))
    expect(op(page, name).locator(f"[data-lang={language}]")).to_have_attribute("aria-selected", "true")
    code = op(page, name).locator("[data-code]").inner_text().replace("\u00a0", " ")
    done = subprocess.run([*commands[language], code], capture_output=True, text=True, timeout=60, env=environment())
    assert done.returncode == 0, done.stderr
    expected = {"tokenize": "count", "steps": "first_step", "patch_limits": "max_num_seqs"}.get(name, "")
    assert expected in done.stdout
    assert done.stdout.strip()
    assert '"error"' not in done.stdout


def environment() -> dict[str, str]:
    """Of a person's shell."""
    return {**os.environ, "API_KEY": ADMIN, "NO_PROXY": "127.0.0.1"}


def test_with_keys_the_examples_take_one_from_the_environment_and_roles_are_told(browser_page: Page) -> None:
    with serve(Settings(port=0, api_key=KEYS)) as live:
        browser_page.goto(f"{live.address}/api")
        browser_page.locator("#key").fill(INFERENCE)
        browser_page.get_by_role("button", name="Log in").click()
        models = op(browser_page, "list_models")
        expect(models.locator("[data-code]")).to_contain_text('-H "Authorization: Bearer $API_KEY"')
        expect(op(browser_page, "healthz").locator("[data-code]")).not_to_contain_text("Authorization")
        models.locator("[data-run]").click()
        expect(models.locator("[data-status]")).to_contain_text("200 OK")
        state = op(browser_page, "state")
        expect(state).to_contain_text("Needs the role read-only; this browser has inference.")
        state.locator("[data-run]").click(force=True)
        assert state.locator("[data-answer]").is_hidden()
        for language in ("curl", "python"):
            choose(browser_page, language)
            code = models.locator("[data-code]").inner_text()
            command = ["bash", "-c", code] if language == "curl" else [sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
            assert "max_model_len" in done.stdout, done.stderr


def test_on_a_phone_nothing_is_wider_than_the_screen_and_the_index_folds_away(page: Page) -> None:
    page.set_viewport_size({"width": 375, "height": 800})
    expect(page.locator("#index-drawer")).not_to_have_attribute("open", "")
    widths = page.evaluate("[document.documentElement.scrollWidth, document.querySelector('main').scrollWidth]")
    assert widths == [375, 375]
    assert page.evaluate("document.documentElement.scrollHeight") <= 800
    page.locator("#index-drawer summary").click()
    page.locator(".api-index a[href='#tokenize']").click()
    expect(page.locator("#index-drawer")).not_to_have_attribute("open", "")
    expect(op(page, "tokenize").locator("h3")).to_be_in_viewport()

"""The chat page in a real browser; ids as W1 are those of the list of faults seen in other chat pages."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from tests.e2e.chat_driver import ALL_ARE_TAKEN, answers, ask, get_json, set_max_tokens, wait_for_end
from tests.e2e.conftest import LiveServer, Visit
from tests.e2e.parrot import ParrotServer

pytestmark = pytest.mark.browser

SLOW_MS = 240_000  # a model on a busy CPU


def test_a_link_to_the_page_fills_the_composer_and_sends_nothing(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    browser_page.goto(f"{parrot_server.base_url}/?q=say+something")
    expect(browser_page.locator("#draft")).to_have_value("say something")
    expect(browser_page.locator("#counter")).to_contain_text("tokens")
    expect(browser_page.locator(".msg")).to_have_count(0)
    assert get_json(f"{parrot_server.base_url}/admin/api/state")["counters"]["num_requests"] == 0


def test_stop_frees_the_blocks_within_a_step_and_shows_the_receipt(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    """W3."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say " + "a long tale " * 100)
    parrot_server.parrot.say(60)
    expect(answers(browser_page).locator(".msg-body")).to_contain_text("a long tale a long tale")
    during = get_json(f"{parrot_server.base_url}/admin/api/state")
    assert len(during["running"]) == 1
    assert during["kv"]["used"] + during["kv"]["shared"] > 0
    browser_page.keyboard.press("Escape")
    expect(browser_page.locator("#send")).to_have_text("Stopping")
    parrot_server.parrot.go_on()
    receipt = answers(browser_page).locator("[data-receipt=stop]")
    said = re.compile(r"^Stopped at step ([\d,]+): (\d+) blocks? freed, (\d+) tokens produced\.$")
    expect(receipt).to_have_text(said)
    wait_for_end(browser_page)
    found = said.match(receipt.inner_text())
    assert found is not None
    step, num_blocks, num_tokens = (int(number.replace(",", "")) for number in found.groups())
    after = get_json(f"{parrot_server.base_url}/admin/api/state")
    assert after["running"] == []
    assert after["kv"]["used"] + after["kv"]["shared"] == 0
    assert after["step"] == step, "the engine went on with it after the receipt"
    assert num_tokens == after["counters"]["generation_tokens"]
    # Tokens whose keys and values were computed: the prompt and all of the answer but its last token.
    assert num_blocks == -(-(after["counters"]["prompt_tokens"] + num_tokens - 1) // 16)
    expect(answers(browser_page).locator(".stats-line span").first).to_have_text(f"{num_tokens} tokens")


def test_a_reload_in_mid_stream_keeps_the_text_goes_on_and_keeps_the_settings(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    """W4."""
    told = "It was a dark night. The keeper slept. 灯台と海 🌊 and so on until the end."
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    browser_page.locator("#toggle-settings").click()
    browser_page.locator("#p-temperature").fill("0.25")
    browser_page.locator("#system").fill("Be brief.")
    ask(browser_page, f"say {told}")
    parrot_server.parrot.say(30)
    body = answers(browser_page).locator(".msg-body")
    expect(body).to_contain_text("It was a dark night.")
    browser_page.reload()
    expect(body).to_contain_text("It was a dark night.")
    expect(answers(browser_page)).to_have_attribute("aria-busy", "true")
    parrot_server.parrot.go_on()
    wait_for_end(browser_page)
    expect(body).to_have_text(told)
    browser_page.locator("#toggle-settings").click()
    expect(browser_page.locator("#p-temperature")).to_have_value("0.25")
    expect(browser_page.locator("#system")).to_have_value("Be brief.")
    browser_page.reload()
    expect(body).to_have_text(told)
    assert get_json(f"{parrot_server.base_url}/admin/api/state")["counters"]["num_requests"] == 1


def test_a_reload_before_the_first_token_finds_the_answer(parrot_server: ParrotServer, browser_page: Page) -> None:
    """W6, W7: one request, however often the page is loaded."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say after all")
    expect(answers(browser_page).locator(".msg-status")).to_be_visible()
    expect(browser_page.locator(".conv-badge-writing")).to_be_visible()
    browser_page.wait_for_function(ALL_ARE_TAKEN)
    browser_page.reload()
    expect(answers(browser_page)).to_have_attribute("aria-busy", "true")
    parrot_server.parrot.go_on()
    expect(answers(browser_page).locator(".msg-body")).to_have_text("after all")
    wait_for_end(browser_page)
    assert get_json(f"{parrot_server.base_url}/admin/api/state")["counters"]["num_requests"] == 1


def test_an_answer_goes_on_while_another_conversation_is_open(parrot_server: ParrotServer, browser_page: Page) -> None:
    """W5, W15: a badge in the list, and no text in the wrong place."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say first of all")
    expect(browser_page.locator(".conv-badge-writing")).to_have_count(1)
    browser_page.locator("#sidebar [data-action=new]").click()
    ask(browser_page, "say second")
    expect(browser_page.locator(".conv-badge-writing")).to_have_count(2)
    parrot_server.parrot.go_on()
    expect(answers(browser_page).locator(".msg-body")).to_have_text(["second"])
    expect(browser_page.locator(".conv-badge-writing")).to_have_count(0)
    expect(browser_page.locator(".conv-badge-new")).to_have_count(1)
    browser_page.get_by_role("button", name="say first of all", exact=False).first.click()
    expect(answers(browser_page).locator(".msg-body")).to_have_text(["first of all"])
    expect(browser_page.locator(".conv-badge-new")).to_have_count(0)


def test_enter_that_confirms_a_composition_does_not_send(parrot_server: ParrotServer, browser_page: Page) -> None:
    """W9: isComposing, and keyCode 229 where a browser ends the composition first."""
    browser_page.goto(parrot_server.base_url)
    draft = browser_page.locator("#draft")
    draft.fill("say にほんご")
    for init in ({"isComposing": True}, {"keyCode": 229}):
        draft.evaluate(
            "(input, init) => input.dispatchEvent(new KeyboardEvent('keydown',"
            " {key: 'Enter', bubbles: true, cancelable: true, ...init}))",
            init,
        )
    expect(draft).to_have_value("say にほんご")
    expect(browser_page.locator(".msg")).to_have_count(0)
    draft.press("Shift+Enter")
    expect(draft).to_have_value("say にほんご\n")
    draft.press("Enter")
    expect(browser_page.locator(".msg-user")).to_have_count(1)
    expect(answers(browser_page).locator(".msg-body")).to_have_text("にほんご")


def test_the_page_follows_only_a_reader_who_is_at_the_end(parrot_server: ParrotServer, browser_page: Page) -> None:
    """W10."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    set_max_tokens(browser_page, 4000)
    ask(browser_page, "say " + "\n\n".join(f"P{n}." for n in range(100, 280)))
    parrot_server.parrot.say(450)
    expect(answers(browser_page)).to_contain_text("P150.")
    scroller = browser_page.locator("#scroller")
    distance = "s => s.scrollHeight - s.scrollTop - s.clientHeight"
    assert scroller.evaluate(distance) <= 64
    scroller.hover()
    browser_page.mouse.wheel(0, -600)
    pill = browser_page.locator("#new-text")
    top = scroller.evaluate("s => new Promise(done => requestAnimationFrame(() => done(s.scrollTop)))")
    parrot_server.parrot.say(200)
    expect(pill).to_be_visible()
    expect(answers(browser_page)).to_contain_text("P180.")
    assert scroller.evaluate("s => s.scrollTop") == top
    pill.click()
    expect(pill).to_be_hidden()
    parrot_server.parrot.go_on()
    wait_for_end(browser_page)
    assert scroller.evaluate(distance) <= 64


def test_the_figures_below_an_answer_are_the_engines(parrot_server: ParrotServer, browser_page: Page) -> None:
    """W16."""
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say exactly this")
    wait_for_end(browser_page)
    counters = get_json(f"{parrot_server.base_url}/admin/api/state")["counters"]
    line = answers(browser_page).locator(".stats-line")
    expect(line).to_contain_text(f"{counters['generation_tokens']} tokens")
    expect(line).to_contain_text(f"of {counters['prompt_tokens']} cached")
    expect(line).to_contain_text("finished")
    line.click()
    expect(answers(browser_page).locator(".stats-table")).to_contain_text("First token (TTFT)")


def test_a_second_answer_and_an_edited_question_are_kept_beside_the_first(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say one")
    wait_for_end(browser_page)
    answers(browser_page).locator("[data-action=regenerate]").click()
    expect(answers(browser_page).locator(".siblings-count")).to_have_text("2/2")
    wait_for_end(browser_page)
    user = browser_page.locator(".msg-user")
    user.hover()
    user.locator("[data-action=edit]").click()
    user.locator("textarea").fill("say two")
    user.locator("textarea").press("Enter")
    expect(answers(browser_page).locator(".msg-body")).to_have_text("two")
    expect(user.locator(".siblings-count")).to_have_text("2/2")
    user.locator("[data-action=sibling]").first.click()
    expect(answers(browser_page).locator(".msg-body")).to_have_text("one")


def test_a_conversation_longer_than_the_context_is_trimmed_when_asked(
    start_parrot: Callable[..., ParrotServer], browser_page: Page
) -> None:
    server = start_parrot(num_blocks=12)  # 192 tokens
    browser_page.goto(server.base_url)
    ask(browser_page, "say " + "a" * 50)
    wait_for_end(browser_page)
    browser_page.locator("#draft").fill("say " + "b" * 70)
    note = browser_page.locator("#overflow")
    expect(note).to_contain_text("too long for the context of 192 tokens")
    set_max_tokens(browser_page, 70)
    note.get_by_role("button").click()
    expect(answers(browser_page).last.locator(".msg-body")).to_have_text("b" * 70)
    expect(browser_page.locator(".cut-note")).to_contain_text("2 earlier messages are no longer sent")
    expect(note).to_be_hidden()


def test_a_question_that_cannot_fit_is_an_error_that_says_so(
    start_parrot: Callable[..., ParrotServer], browser_page: Page
) -> None:
    server = start_parrot(num_blocks=12)
    browser_page.goto(server.base_url)
    ask(browser_page, "say " + "a" * 300)
    error = answers(browser_page).get_by_role("alert")
    expect(error).to_contain_text("the 192 that fit")
    error.get_by_role("button", name="Trim the oldest turns and send").click()
    expect(browser_page.locator(".toast-error")).to_contain_text("Even the last message alone is too long")


def test_a_preempted_answer_carries_its_receipt_and_is_complete(
    start_parrot: Callable[..., ParrotServer], browser_page: Page
) -> None:
    server = start_parrot(num_blocks=24)
    server.parrot.hold()
    browser_page.goto(server.base_url)
    for letter in "ab":
        browser_page.locator("#sidebar [data-action=new]").click()
        ask(browser_page, f"say {letter * 110}")
        expect(browser_page.locator(".conv-badge-writing")).to_have_count("ab".index(letter) + 1)
    server.parrot.say(5)  # between two steps the engine takes what was sent
    browser_page.wait_for_function(ALL_ARE_TAKEN)
    server.parrot.go_on()
    expect(browser_page.locator(".conv-badge-writing")).to_have_count(0)
    assert get_json(f"{server.base_url}/admin/api/state")["counters"]["num_preemptions"] > 0
    expect(answers(browser_page).locator(".msg-body")).to_have_text("b" * 110)
    receipt = answers(browser_page).locator("[data-receipt=preempted]").first
    expect(receipt).to_have_text(
        re.compile(r"^Preempted at step [\d,]+ for chat-\w+: \d+ blocks? freed, \d+ tokens to compute again\.$")
    )


def test_when_the_engine_dies_the_text_so_far_is_kept_with_the_reason_below(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    """W14."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say what was said before it broke")
    parrot_server.parrot.say(25)
    body = answers(browser_page).locator(".msg-body")
    expect(body).to_contain_text("what was said")
    parrot_server.parrot.fail("the memory is gone")
    error = answers(browser_page).get_by_role("alert")
    expect(error).to_contain_text("the memory is gone")
    expect(error.get_by_role("button", name="Try again")).to_be_visible()
    expect(body).to_contain_text("what was said")
    expect(browser_page.locator("#bar-state")).to_have_text("ENGINE DEAD")
    expect(browser_page.locator("#engine-banner")).to_contain_text("the memory is gone")
    browser_page.reload()
    expect(body).to_contain_text("what was said")
    expect(error).to_contain_text("the memory is gone")


def test_the_curl_command_asks_v1_for_the_same(
    parrot_server: ParrotServer, browser_context: BrowserContext, browser_page: Page
) -> None:
    browser_context.grant_permissions(["clipboard-read", "clipboard-write"])
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, 'say it\'s "quoted" and $HOME')
    wait_for_end(browser_page)
    answers(browser_page).locator("[data-action=curl]").click()
    expect(browser_page.locator(".toast")).to_have_text("curl command copied")
    words = shlex.split(browser_page.evaluate("() => navigator.clipboard.readText()"))
    assert words[:3] == ["curl", "-N", f"{parrot_server.base_url}/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1]) | {"stream": False}
    assert body["temperature"] == 0.3
    request = urllib.request.Request(
        words[2], json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        answer = json.load(response)
    assert answer["choices"][0]["message"]["content"] == 'it\'s "quoted" and $HOME'


def test_a_question_whose_page_was_closed_while_it_was_sent_finds_its_answer(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    """The server took it, the page never learned under which id."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say found")
    expect(browser_page.locator(".conv-badge-writing")).to_be_visible()
    browser_page.wait_for_function(ALL_ARE_TAKEN)
    browser_page.goto("about:blank")
    page = browser_page.context.new_page()
    page.goto(f"{parrot_server.base_url}/static/icon.svg")
    page.evaluate(
        """() => {
          for (const key of Object.keys(localStorage).filter((key) => key.startsWith("pagedeck.chat."))) {
            localStorage[key] = localStorage[key]
              .replace(/"generation_id":"[0-9a-f]+"/, '"generation_id":null')
              .replace(/("running":{"[0-9a-f]+":)"[0-9a-f]+"/, '$1""');
          }
        }"""
    )
    page.goto(parrot_server.base_url)
    page.locator(".conv-open").click()
    expect(answers(page)).to_have_attribute("aria-busy", "true")
    parrot_server.parrot.go_on()
    expect(answers(page).locator(".msg-body")).to_have_text("found")
    wait_for_end(page)
    expect(page.locator(".conv-badge-writing")).to_have_count(0)


def test_two_tabs_share_one_connection_and_show_the_same_answer(
    parrot_server: ParrotServer, browser_context: BrowserContext, visit: Visit
) -> None:
    first = browser_context.new_page()
    first.goto(parrot_server.base_url)
    parrot_server.parrot.hold()
    ask(first, "say the same in both")
    expect(answers(first)).to_have_count(1)
    second = browser_context.new_page()
    second.goto(first.url)
    expect(second.locator("#bar-state")).to_have_text("LIVE")
    parrot_server.parrot.go_on()
    for page in (first, second):
        expect(answers(page).locator(".msg-body")).to_have_text("the same in both")
        viewers = "async () => (await import('/static/js/stream.js')).engineStream.state.num_viewers"
        assert page.evaluate(viewers) == 1
    assert visit.page_errors == []


def test_a_pause_of_the_engine_is_said_on_the_page_with_its_reason(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    browser_page.goto(parrot_server.base_url)
    expect(browser_page.locator("#bar-state")).to_have_text("LIVE")
    status = browser_page.evaluate(
        """() => fetch("/admin/api/engine/pause", {method: "POST", headers: {"Content-Type": "application/json"},
          body: JSON.stringify({reason: "looking at block 7"})}).then((response) => response.status)"""
    )
    assert status == 200
    expect(browser_page.locator("#bar-state")).to_have_text("ENGINE PAUSED")
    expect(browser_page.locator("#engine-banner")).to_contain_text("looking at block 7")
    ask(browser_page, "say it later")
    expect(answers(browser_page).locator(".msg-status")).to_contain_text("the engine is paused")


def test_a_screen_reader_hears_the_start_and_the_end_and_not_each_token(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    """W18."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    log = browser_page.get_by_role("log")
    expect(log).to_have_attribute("aria-live", "off")
    ask(browser_page, "say four")
    announcer = browser_page.locator("#announcer")
    expect(announcer).to_have_role("status")
    expect(announcer).to_have_text("The answer begins.")
    expect(answers(browser_page)).to_have_attribute("aria-busy", "true")
    parrot_server.parrot.go_on()
    expect(announcer).to_have_text("The answer is complete: 5 tokens.")
    expect(answers(browser_page)).to_have_attribute("aria-busy", "false")


def test_on_a_phone_nothing_is_wider_than_the_screen_and_fields_do_not_zoom(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    """W17."""
    browser_page.set_viewport_size({"width": 375, "height": 667})
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say | a | b |\n| - | - |\n| " + "wide " * 40 + " | x |\n\n```\n" + "c" * 200 + "\n```")
    wait_for_end(browser_page)
    assert browser_page.evaluate("() => document.documentElement.scrollWidth") == 375
    box = browser_page.locator("#composer").bounding_box()
    assert box is not None
    assert box["y"] + box["height"] <= 667
    assert browser_page.locator("#draft").evaluate("e => parseFloat(getComputedStyle(e).fontSize)") >= 16
    browser_page.locator("#toggle-sidebar").click()
    expect(browser_page.locator("#sidebar")).to_be_visible()
    browser_page.keyboard.press("Escape")
    expect(browser_page.locator("#sidebar")).to_be_hidden()
    expect(browser_page.locator("#toggle-sidebar")).to_be_focused()


def test_the_first_load_is_small_and_asks_nobody_else(
    parrot_server: ParrotServer, browser_page: Page, visit: Visit
) -> None:
    sizes: dict[str, int] = {}
    browser_page.on("requestfinished", lambda request: sizes.update({request.url: request.sizes()["responseBodySize"]}))
    browser_page.goto(parrot_server.base_url)
    expect(browser_page.locator("#bar-state")).to_have_text("LIVE")
    expect(browser_page.locator("#welcome")).to_be_visible()
    assert any("markdown-it" in url for url in sizes)
    assert sum(sizes.values()) <= 400_000, sizes
    assert visit.outside_requests == []
    assert visit.page_errors == []
    assert visit.console_errors == []


@pytest.mark.model
@pytest.mark.slow
def test_the_real_model_answers_and_a_stop_leaves_nothing_behind(
    live_server: LiveServer, browser_page: Page, visit: Visit
) -> None:
    browser_page.set_default_timeout(SLOW_MS)
    browser_page.goto(live_server.base_url)
    browser_page.locator("#toggle-settings").click()
    browser_page.locator("#p-temperature").fill("0")
    browser_page.locator("#p-max_tokens").fill("8")
    ask(browser_page, "What is the capital of France?")
    expect(answers(browser_page).locator(".stats-line")).to_contain_text(re.compile(r"^\d tokens"), timeout=SLOW_MS)
    expect(answers(browser_page).locator(".msg-body")).to_contain_text(re.compile(r"\w\w"))
    browser_page.locator("#p-max_tokens").fill("2000")
    ask(browser_page, "Tell a very long story about a lighthouse and its keeper.")
    expect(answers(browser_page).last.locator(".msg-body")).to_contain_text(re.compile(r"\w\w"), timeout=SLOW_MS)
    browser_page.locator("#send").click()
    expect(answers(browser_page).last.locator("[data-receipt=stop]")).to_contain_text(
        "Stopped at step", timeout=SLOW_MS
    )
    wait_for_end(browser_page)
    assert get_json(f"{live_server.base_url}/admin/api/state")["running"] == []
    assert visit.page_errors == []

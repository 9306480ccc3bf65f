"""The chat page in a real browser; ids as W1 are those of the list of faults seen in other chat pages."""

from __future__ import annotations

import json
import re
import shlex
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.e2e.conftest import LiveServer, Visit
from tests.e2e.parrot import ParrotServer

pytestmark = pytest.mark.browser

SLOW_MS = 240_000  # a model on a busy CPU

HOSTILE = """<img src=x onerror="window.pwned=1"><svg onload="window.pwned=2"></svg><script>window.pwned=3</script>

[click](javascript:window.pwned=4) [ok](https://example.org/x) <div hx-post="/admin" data-hx-get="/x" id="main">no</div>

```html
<img src=x onerror="window.pwned=5">
```

&lt;img src=x onerror=window.pwned=6&gt; <iframe src="javascript:window.pwned=7"></iframe> [data](data:text/html,x)
"""

# Notes every element that ever is in an answer and should not be, and every attribute that could act.
WATCH = """
window.strange = [];
const allowed = new Set(("P BR STRONG EM S DEL CODE PRE BLOCKQUOTE UL OL LI H1 H2 H3 H4 H5 H6 TABLE THEAD TBODY TR " +
  "TH TD HR A SPAN DIV BUTTON svg use").split(" "));
const look = (element) => {
  if (!element.closest?.(".msg-body")) return;
  if (!allowed.has(element.tagName)) window.strange.push(element.tagName);
  for (const { name } of element.attributes) {
    const own = element.tagName === "BUTTON" && name === "data-action";
    if (/^(on|hx-|data-|id$|style$|src$|srcset$|form)/.test(name) && !own) window.strange.push(name);
  }
};
new MutationObserver((records) => {
  for (const record of records) {
    look(record.target);
    for (const node of record.addedNodes) {
      if (node.nodeType === 1) [node, ...node.querySelectorAll("*")].forEach(look);
    }
  }
}).observe(document, { subtree: true, childList: true, attributes: true });
"""


# The server has taken all that was sent: each message that is being written knows its generation's id.
ALL_ARE_TAKEN = """() => JSON.parse(localStorage["pagedeck.chat.index"])
  .every((entry) => Object.values(entry.running).every((id) => id.length > 0))"""


def ask(page: Page, text: str) -> None:
    """Type and press Enter."""
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")


def set_max_tokens(page: Page, num_tokens: int) -> None:
    """In the settings, which are closed again."""
    page.locator("#toggle-settings").click()
    page.locator("#p-max_tokens").fill(str(num_tokens))
    page.locator("[data-action=close-settings]").click()


def answers(page: Page) -> Locator:
    """The answers that are shown."""
    return page.locator(".msg-answer")


def wait_for_end(page: Page) -> None:
    """Until no answer of the open conversation is being written."""
    expect(page.locator(".msg-answer[aria-busy=true]")).to_have_count(0)


def get_json(address: str) -> Any:
    with urllib.request.urlopen(address, timeout=10) as response:
        return json.load(response)


def test_html_in_an_answer_is_text_and_nothing_of_it_ever_acts(
    parrot_server: ParrotServer, browser_page: Page, visit: Visit
) -> None:
    """W1, a byte at a time."""
    browser_page.add_init_script(WATCH)
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, f"say {HOSTILE}")
    wait_for_end(browser_page)
    body = answers(browser_page).locator(".msg-body")
    expect(body).to_contain_text('<img src=x onerror="window.pwned=1">')
    expect(body).to_contain_text("<img src=x onerror=window.pwned=6>")
    expect(body.locator("a")).to_have_count(1)
    link = body.locator("a")
    expect(link).to_have_attribute("href", "https://example.org/x")
    expect(link).to_have_attribute("target", "_blank")
    expect(link).to_have_attribute("rel", "noopener noreferrer nofollow")
    expect(body.locator(".codeblock code")).to_have_text('<img src=x onerror="window.pwned=5">\n')
    assert browser_page.evaluate("() => [window.strange, window.pwned ?? null]") == [[], None]
    expect(browser_page.locator("#transcript")).to_have_attribute("hx-ignore", "")
    assert visit.page_errors == []
    assert visit.console_errors == []


def test_an_image_in_an_answer_is_a_chip_and_is_not_fetched(
    parrot_server: ParrotServer, browser_page: Page, visit: Visit
) -> None:
    """W2: no address in an answer is asked for."""
    browser_page.goto(parrot_server.base_url)
    images = (
        "![a cat](https://leak.example/cat.png?secret=1) ![](http://127.0.0.1:9/x.png) <img src=https://leak.example/b>"
    )
    requests: list[str] = []
    browser_page.on("request", lambda request: requests.append(request.url))
    ask(browser_page, f"say {images}\n\n[ref]: https://leak.example/c\n\n![d][ref]")
    wait_for_end(browser_page)
    chips = answers(browser_page).locator(".image-chip")
    expect(chips).to_have_text(["a cat · leak.example", "image · 127.0.0.1:9", "d · leak.example"])
    assert answers(browser_page).locator("img").count() == 0
    assert visit.outside_requests == []
    assert [url for url in requests if ".png" in url or "leak" in url] == []


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


def test_finished_blocks_stay_the_same_elements_while_text_is_added(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    """W11: a selection and the copy buttons stay."""
    parrot_server.parrot.hold()
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, "say First paragraph.\n\n```python\nx = 1\n```\n\nThen a third one that goes on and on.")
    parrot_server.parrot.say(52)
    body = answers(browser_page).locator(".msg-body")
    expect(body).to_contain_text("Then")
    browser_page.evaluate(
        """() => {
          const [first, code] = document.querySelector(".msg-answer .msg-body").children;
          window.kept = [first, code];
          getSelection().selectAllChildren(first);
        }"""
    )
    parrot_server.parrot.go_on()
    wait_for_end(browser_page)
    expect(body).to_contain_text("goes on and on.")
    same = "() => window.kept.every((e, i) => e === document.querySelector('.msg-answer .msg-body').children[i])"
    assert browser_page.evaluate(same)
    assert browser_page.evaluate("() => getSelection().toString()") == "First paragraph."


def test_an_answer_drawn_while_it_grows_is_the_answer_drawn_at_once(
    parrot_server: ParrotServer, browser_page: Page
) -> None:
    text = """a
#
#x b

- one
- two

  of item two

end
***
***bold***

| a | b |
| - | -: |
| 1 | 2 |
below

```js
let x = 1;
````
```

[x]: https://a.example/y

[x] and ![i][r]

1. a
2. b

> q
lazy

    indented

~~~
open *em
"""
    browser_page.goto(parrot_server.base_url)
    html = browser_page.evaluate(
        """async (text) => {
          const { MarkdownView } = await import("/static/js/chat/markdown.js");
          const draw = (cuts) => {
            const root = document.createElement("div");
            const view = new MarkdownView(root);
            for (const cut of cuts) view.update(text.slice(0, cut), false);
            view.update(text, true);
            for (const code of root.querySelectorAll("pre code")) code.textContent = code.textContent;
            return root.innerHTML.replace(/\\s*\\n\\s*/g, "\\n");
          };
          return [draw([]), draw([...text].map((_, i) => i)), draw([7, 50, 90, 130, 160])];
        }""",
        text,
    )
    assert "<table>" in html[0]
    assert html[1] == html[0]
    assert html[2] == html[0]


def test_without_the_libraries_an_answer_is_plain_text(parrot_server: ParrotServer, browser_page: Page) -> None:
    browser_page.route("**/static/vendor/**", lambda route: route.abort())
    browser_page.goto(parrot_server.base_url)
    expect(browser_page.locator(".toast-error")).to_contain_text("“make setup” installs them")
    ask(browser_page, "say <b>bold</b> **text**")
    expect(answers(browser_page).locator(".msg-body")).to_have_text("<b>bold</b> **text**")


def test_characters_of_several_tokens_arrive_whole(parrot_server: ParrotServer, browser_page: Page) -> None:
    """W13: every token is one byte here."""
    text = "👩‍👩‍👧 日本語 žluťoučký 🇨🇿 𝔘"
    browser_page.goto(parrot_server.base_url)
    ask(browser_page, f"say {text}")
    wait_for_end(browser_page)
    expect(answers(browser_page).locator(".msg-body")).to_have_text(text)


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

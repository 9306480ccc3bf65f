"""How an answer is drawn: hostile text, text that grows, any script. Ids as W1 are those of the list of faults."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page, expect

from tests.e2e.chat_driver import answers, ask, wait_for_end
from tests.e2e.conftest import Visit
from tests.e2e.parrot import ParrotServer

pytestmark = pytest.mark.browser

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

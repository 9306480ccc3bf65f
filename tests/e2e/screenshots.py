"""Take the README's pictures in the tests' browser, of the real server under real load: `make screenshots`."""

from __future__ import annotations

import json
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from playwright.sync_api import Browser, Page, sync_playwright

from tests.conftest import chromium
from tests.e2e.conftest import CHROMIUM_ARGS, LiveServer, start_process

FOLDER = Path(__file__).parent / "screenshots"
SHARED = (
    "You explain how language models are served, to engineers who are new to it. Be brief and exact, use plain words, "
    "give numbers with their units, and say what you are unsure of. "
)
QUESTIONS = (
    "What is a KV cache?", "Why are blocks 16 tokens long?", "Explain continuous batching with an example.",
    "What does preemption by recompute cost?", "What is chunked prefill good for?", "When is a prefix cache hit?",
    "Write a haiku about a waiting queue.", "List five things that slow a server down.", "What is a block table?",
    "Why does the first token take longest?",
)  # fmt: skip


def ask(base_url: str, question: str) -> None:
    """One long answer; whatever happens to it is the picture's business."""
    body = {
        "messages": [{"role": "system", "content": SHARED}, {"role": "user", "content": question}],
        "max_tokens": 220, "ignore_eos": True, "temperature": 0.8, "seed": 1,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{base_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with suppress(OSError), urllib.request.urlopen(request, timeout=600) as response:
        response.read()


def page(browser: Browser, theme: str, width: int = 1440, height: int = 900) -> Page:
    """A page of a fresh profile."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=theme)  # type: ignore[arg-type]
    context.set_default_timeout(300_000)
    return context.new_page()


def shoot(server: LiveServer, browser: Browser) -> None:
    """All pictures."""
    FOLDER.mkdir(exist_ok=True)
    chat = page(browser, "light", 1280, 800)
    chat.goto(server.base_url)
    chat.locator("#draft").fill(
        "Show me a short Python function that turns a token position into a block and an offset."
    )
    chat.locator("#draft").press("Enter")
    chat.locator(".msg-answer .stats-line").wait_for()
    chat.screenshot(path=FOLDER / "chat-light.png")

    engine = page(browser, "dark")
    engine.goto(f"{server.base_url}/engine")
    threads = [threading.Thread(target=ask, args=(server.base_url, question)) for question in QUESTIONS]
    for thread in threads:
        thread.start()
    engine.get_by_text("preempted", exact=False).first.wait_for()
    engine.wait_for_function("() => document.body.innerText.includes('to compute again')")
    engine.screenshot(path=FOLDER / "engine-dark.png")

    admin = page(browser, "light")
    admin.goto(f"{server.base_url}/admin")
    admin.locator("#engine-state", has_text="RUNNING").wait_for()
    admin.screenshot(path=FOLDER / "admin-light.png")
    phone = page(browser, "dark", 375, 812)
    phone.goto(f"{server.base_url}/engine")
    phone.wait_for_function("() => document.body.innerText.includes('LIVE')")
    phone.screenshot(path=FOLDER / "engine-phone-dark.png")
    for thread in threads:
        thread.join()


def main() -> None:
    """Start a server with a small pool, load it, and look."""
    with TemporaryDirectory() as directory, sync_playwright() as driver:
        server = start_process(Path(directory), ("--num-kv-blocks", "96", "--max-num-seqs", "8"))
        browser = driver.chromium.launch(executable_path=chromium(), args=list(CHROMIUM_ARGS))
        try:
            shoot(server, browser)
        finally:
            browser.close()
            server.stop()


if __name__ == "__main__":
    main()

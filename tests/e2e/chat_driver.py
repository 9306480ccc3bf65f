"""What tests of the chat page do with it."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

from playwright.sync_api import Locator, Page, expect

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

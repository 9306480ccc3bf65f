"""A whole server on a fake engine, and the `openai` client of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.helpers.live_app import LiveApp, serve


@pytest.fixture(scope="module")
def live() -> Iterator[LiveApp]:
    """The server, one for the tests of a module."""
    with serve() as live:
        yield live


@pytest.fixture(scope="module")
def client(live: LiveApp) -> Iterator[OpenAI]:
    """Its client; what fails is not tried again."""
    with OpenAI(base_url=f"{live.address}/v1", api_key="none", max_retries=0) as client:
        yield client

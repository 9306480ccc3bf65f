"""A short storm on the real server: every accepted request ends once, the metrics agree with the clients."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.e2e.chaos import Chaos, imbalances
from tests.e2e.conftest import StartServer

pytestmark = [pytest.mark.model, pytest.mark.slow]

# So few blocks at first that sequences preempt each other on a machine of any speed.
FLAGS = ("--num-kv-blocks", "64", "--num-usable-blocks", "12", "--max-num-seqs", "16", "--log-level", "warning")


def test_whatever_clients_and_admins_do_the_books_balance(start_server: StartServer) -> None:
    server = start_server(*FLAGS)
    books, difference = asyncio.run(Chaos(server.base_url, num_requests=150, seed=1).run())
    state = httpx.get(f"{server.base_url}/admin/api/state").json()
    assert imbalances(books, difference, state) == []
    assert books.refused[400] > 0
    assert books.unseen > 0
    assert difference["vllm:num_preemptions_total"] > 0
    assert "Traceback" not in server.log()

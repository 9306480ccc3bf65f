"""Wrong keys at the login form are counted per address, in a table that cannot grow without bound."""

from __future__ import annotations

import asyncio
from urllib.parse import urlencode

import pytest

from app.login_throttle import MAX_ADDRESSES, MAX_FAILURES, WINDOW_S, LoginThrottle
from app.settings import Settings
from tests.helpers.live_app import ADMIN, KEYS, Exchange, request, running_app

FORM = {"content_type": "application/x-www-form-urlencoded", "sec_fetch_site": "same-origin"}


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def test_too_many_failures_close_the_form_for_the_rest_of_the_window() -> None:
    clock = Clock()
    throttle = LoginThrottle(clock)
    for _ in range(MAX_FAILURES):
        assert throttle.wait_s("192.0.2.1") == 0
        throttle.failed("192.0.2.1")
    assert throttle.wait_s("192.0.2.1") == WINDOW_S
    assert throttle.wait_s("192.0.2.2") == 0
    clock.now += WINDOW_S - 0.5
    assert throttle.wait_s("192.0.2.1") == 1
    clock.now += 0.5
    assert throttle.wait_s("192.0.2.1") == 0
    throttle.failed("192.0.2.1")
    assert throttle.wait_s("192.0.2.1") == 0, "a new window"


def test_the_addresses_of_one_ipv6_network_count_as_one() -> None:
    throttle = LoginThrottle(Clock())
    for number in range(MAX_FAILURES):
        throttle.failed(f"2001:db8::{number:x}")
    assert throttle.wait_s("2001:db8::ffff:1") > 0
    assert throttle.wait_s("2001:db8:0:1::1") == 0


def test_the_table_is_bounded() -> None:
    throttle = LoginThrottle(Clock())
    for number in range(MAX_ADDRESSES + 100):
        throttle.failed(f"10.0.{number // 256}.{number % 256}")
    assert len(throttle) == MAX_ADDRESSES


@pytest.mark.parametrize("address", ["", "unix:", "testclient"])
def test_what_is_no_address_is_counted_too(address: str) -> None:
    throttle = LoginThrottle(Clock())
    for _ in range(MAX_FAILURES):
        throttle.failed(address)
    assert throttle.wait_s(address) > 0


def test_the_form_says_how_long_to_wait_and_keys_in_headers_still_work() -> None:
    async def scenario() -> None:
        async with running_app(Settings(api_key=KEYS)) as app:

            async def log_in(key: str) -> Exchange:
                return await request(app, "POST", "/admin/login", body=urlencode({"key": key}).encode(), **FORM)

            for _ in range(MAX_FAILURES):
                assert (await log_in("wrong")).status == 401
            refused = await log_in(ADMIN)
            assert refused.status == 429
            assert 1 <= int(refused.response_headers["retry-after"]) <= WINDOW_S
            assert b"Too many wrong keys" in refused.body
            assert "set-cookie" not in refused.response_headers
            bearer = {"authorization": f"Bearer {ADMIN}"}
            assert (await request(app, "GET", "/admin/api/state", **bearer)).status == 200

    asyncio.run(scenario())

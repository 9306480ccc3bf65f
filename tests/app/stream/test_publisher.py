"""Delivery of the engine's stream: what a client gets that is new, comes back, is slow, or stays silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.admin.events import Client, Publisher
from app.sse import FrameRing
from tests.app.stream.mirror import Mirror, events_of
from tests.app.stream.stage import Stage, expected


class Show:
    """A stage and a publisher of it; time between frames is up to the test."""

    def __init__(self, **options: Any) -> None:
        self.stage = Stage(num_blocks=64)
        options = {"frame_interval_s": 0, "tick_s": 0, "linger_s": 5.0, **options}
        stage = self.stage
        self.publisher = Publisher(stage.frames, stage.fold, "e1", stage.clock, **options)

    def run_step(self) -> None:
        """One step of the engine, published as a frame of its own."""
        self.stage.step()
        self.publisher.on_records(self.stage.apply())
        self.publisher.flush()

    def run_request(self, name: str, num_tokens: int) -> None:
        """A request from its arrival to its end, each step a frame."""
        self.stage.submit(name, 20, max_tokens=num_tokens)
        for _ in range(num_tokens):
            self.run_step()


class Viewer:
    """One client's connection and what it made of it."""

    def __init__(self, show: Show, last_id: str | None = None, mirror: Mirror | None = None) -> None:
        self.client = Client()
        self.mirror = mirror or Mirror()
        self.kinds: list[str] = []
        self._chunks: AsyncIterator[bytes] = show.publisher.stream(last_id, self.client)

    async def read(self, until: str = "tick") -> list[str]:
        """Take what there is, to the first event called `until`; returns the kinds that came."""
        kinds: list[str] = []
        buffer = b""
        while until not in kinds:
            buffer += await anext(self._chunks)
            if not buffer.endswith(b"\n\n"):
                continue
            for event, data, event_id in events_of(buffer):
                kinds.append(event)
                self.mirror.feed(event, data, event_id)
            buffer = b""
        return kinds

    async def has_ended(self) -> bool:
        return await anext(self._chunks, None) is None

    async def leave(self) -> None:
        await self._chunks.aclose()  # type: ignore[attr-defined]


def run(test: Any) -> None:
    asyncio.run(test)


def test_a_new_client_gets_hello_and_a_keyframe_and_then_deltas() -> None:
    async def test() -> None:
        show = Show()
        show.stage.submit("r-1", 20, max_tokens=5)
        show.stage.apply()
        viewer = Viewer(show)
        assert await viewer.read() == ["hello", "key", "tick"]
        assert viewer.mirror.last_id == "e1-1"
        show.run_step()
        show.run_step()
        assert await viewer.read() == ["delta", "delta", "tick"]
        assert viewer.mirror.last_id == "e1-3"
        assert viewer.mirror.state() == expected(show.stage.fold)
        await viewer.leave()

    run(test())


def test_without_viewers_records_are_not_looked_at() -> None:
    async def test() -> None:
        show = Show()
        looked = 0

        def delta(*args: Any) -> Any:
            nonlocal looked
            looked += 1

        show.stage.frames.delta = delta  # type: ignore[method-assign]
        show.run_request("r-1", 10)
        assert looked == 0
        assert show.publisher.ring.end == 0

    run(test())


def test_a_frame_is_encoded_once_however_many_watch() -> None:
    async def test() -> None:
        show = Show()
        viewers = [Viewer(show) for _ in range(5)]
        for viewer in viewers:
            await viewer.read()
        made = show.publisher.ring.end
        show.stage.submit("r-1", 20, max_tokens=5)
        show.run_step()
        for viewer in viewers:
            assert await viewer.read() == ["delta", "tick"]
            assert viewer.mirror.state() == expected(show.stage.fold)
        assert show.publisher.ring.end == made + 1
        frames = [show.publisher.ring.since(made) for _ in viewers]
        assert all(f is not None and f[0].data is frames[0][0].data for f in frames if frames[0])  # type: ignore[index]

    run(test())


def test_records_between_two_frames_share_one() -> None:
    async def test() -> None:
        show = Show(frame_interval_s=3600.0)
        viewer = Viewer(show)
        await viewer.read()
        show.stage.submit("r-1", 20, max_tokens=9)
        show.run_step()  # a frame: long nothing came before it
        for _ in range(8):
            show.stage.step()
            show.publisher.on_records(show.stage.apply())
            await asyncio.sleep(0)
        assert await viewer.read() == ["delta", "tick"]
        show.publisher.flush()
        assert await viewer.read() == ["delta", "tick"]
        assert viewer.mirror.state() == expected(show.stage.fold)
        assert [step[0] for step in viewer.mirror.steps] == list(range(1, 10))
        await viewer.leave()

    run(test())


def test_a_slow_client_gets_a_keyframe_instead_of_its_backlog() -> None:
    async def test() -> None:
        show = Show(max_backlog_bytes=4096)
        slow, quick = Viewer(show), Viewer(show)
        await slow.read()
        await quick.read()
        show.stage.submit("r-1", 20, max_tokens=60)
        for _ in range(60):
            show.run_step()
            assert "key" not in await quick.read()
        kinds = await slow.read()
        assert kinds == ["key", "tick"]
        assert slow.mirror.state() == quick.mirror.state() == expected(show.stage.fold)
        assert slow.mirror.steps == quick.mirror.steps

    run(test())


def test_a_client_that_comes_back_resumes_where_it_was() -> None:
    async def test() -> None:
        show = Show()
        first = Viewer(show)
        await first.read()
        show.stage.submit("r-1", 20, max_tokens=9)
        show.run_step()
        await first.read()
        await first.leave()
        for _ in range(4):  # missed, but kept: it left a moment ago
            show.run_step()
        again = Viewer(show, first.mirror.last_id, first.mirror)
        assert await again.read() == ["hello", "delta", "delta", "delta", "delta", "tick"]
        assert again.mirror.state() == expected(show.stage.fold)
        assert len(again.mirror.steps) == 5
        idle = Viewer(show, again.mirror.last_id)
        assert await idle.read() == ["hello", "tick"]

    run(test())


@pytest.mark.parametrize(
    "last_id",
    ["e2-1", "e1-999", "e1-", "e1", "-1", "e1--1", "e1-1e3", "e1-²", "e1-" + "9" * 400, "", "e1-0001x", "key"],
)
def test_an_id_that_leads_nowhere_gets_a_keyframe(last_id: str) -> None:
    async def test() -> None:
        show = Show()
        first = Viewer(show)
        await first.read()
        show.run_request("r-1", 3)
        viewer = Viewer(show, last_id)
        assert await viewer.read() == ["hello", "key", "tick"]
        assert viewer.mirror.state() == expected(show.stage.fold)

    run(test())


def test_an_id_whose_frames_are_gone_gets_a_keyframe() -> None:
    async def test() -> None:
        show = Show(ring=FrameRing(max_frames=3))
        first = Viewer(show)
        await first.read()
        show.run_request("r-1", 3)
        await first.read()
        assert first.mirror.last_id == "e1-4"
        show.run_request("r-2", 3)
        assert await Viewer(show, "e1-3").read() == ["hello", "key", "tick"]
        assert await Viewer(show, "e1-5").read() == ["hello", "key", "tick"]  # in the middle of a frame
        again = Viewer(show, "e1-4", first.mirror)
        assert await again.read() == ["hello", "delta", "delta", "delta", "tick"]
        assert again.mirror.state() == expected(show.stage.fold)

    run(test())


def test_nothing_is_kept_long_after_the_last_viewer_left() -> None:
    async def test() -> None:
        show = Show(linger_s=5.0)
        viewer = Viewer(show)
        await viewer.read()
        await viewer.leave()
        show.stage.submit("r-1", 20, max_tokens=9)
        show.run_step()
        assert show.publisher.is_tracking
        show.stage.clock.now += 6
        show.run_step()
        assert not show.publisher.is_tracking
        show.run_step()
        late = Viewer(show, viewer.mirror.last_id, viewer.mirror)
        assert await late.read() == ["hello", "key", "tick"]
        assert late.mirror.state() == expected(show.stage.fold)

    run(test())


def test_rates_are_told_to_be_zero_when_the_engine_has_become_idle() -> None:
    async def test() -> None:
        show = Show(rates_s=0, tick_s=20)
        viewer = Viewer(show)
        await viewer.read(until="key")
        show.run_request("r-1", 3)
        rates = [{"steps_per_s": 1.0, "tokens_per_s": 1.0}]
        while rates[-1]["steps_per_s"]:
            show.stage.clock.now += 1.0
            assert set(await viewer.read(until="delta")) == {"delta"}
            rates.append(viewer.mirror.rates)
        assert rates[-1] == {"steps_per_s": 0.0, "tokens_per_s": 0.0}
        end = show.publisher.ring.end
        for _ in range(3):
            await asyncio.sleep(0)
        assert show.publisher.ring.end == end, "zero is told once"
        assert viewer.mirror.state() == expected(show.stage.fold)
        await viewer.leave()

    run(test())


def test_close_says_goodbye_after_what_is_left() -> None:
    async def test() -> None:
        show = Show()
        viewer = Viewer(show)
        await viewer.read()
        show.run_request("r-1", 2)
        show.publisher.close("shutdown")
        assert await viewer.read(until="bye") == ["delta", "delta", "bye"]
        late = Viewer(show)
        assert await late.read(until="bye") == ["hello", "key", "bye"]
        assert await viewer.has_ended()
        assert await late.has_ended()
        assert not show.publisher.clients

    run(test())


def test_the_ring_is_bounded_in_bytes_and_keeps_the_newest() -> None:
    ring = FrameRing(max_frames=100, max_bytes=10)
    for seq in range(1, 6):
        ring.append(seq, b"1234")
    assert ring.num_bytes == 8
    assert [f.seq for f in ring.since(ring.start) or []] == [4, 5]
    assert ring.since(ring.start - 1) is None
    assert ring.position_after(3) == ring.start
    assert ring.position_after(2) is None
    ring.append(6, b"x" * 50)
    assert [f.seq for f in ring.since(ring.start) or []] == [6]

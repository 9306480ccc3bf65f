"""/engine against a whole application: it shows what the admin API says, and what it does has the stated effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import BrowserContext, Page, expect

from app.settings import Settings
from tests.e2e.load import NUM_BLOCKS, Console, Load, load
from tests.helpers.live_app import KEYS, READ_ONLY, serve

pytestmark = [pytest.mark.browser, pytest.mark.slow]

expect.set_options(timeout=20_000)  # an upper bound for a busy machine; nothing waits longer than it must


@pytest.fixture
def page(clean_page: Page, address: str) -> Page:
    """/engine, live."""
    clean_page.goto(f"{address}/engine")
    expect(clean_page.locator("#bar-state")).to_contain_text(re.compile("LIVE|ENGINE PAUSED"))
    expect(clean_page.locator("#map-stage")).to_have_attribute("data-ready", "true")
    return clean_page


def number(text: str) -> int:
    """`1,204` -> 1204."""
    return int(text.replace(",", ""))


def legend(page: Page) -> dict[str, int]:
    """The counts under the map's title."""
    names = ("free", "cached", "used", "shared", "total")
    return {name: number(page.locator(f"[data-legend={name}]").inner_text()) for name in names}


def until_running(page: Page, at_least: int) -> None:
    """Wait until that many rows run."""
    page.wait_for_function("n => document.querySelectorAll('#running tbody tr').length >= n", arg=at_least)


def pause(console: Console, page: Page) -> None:
    """Stop the engine, and wait until the page says so."""
    console.act("pause", {"reason": "a test compares"})
    expect(page.locator("#bar-state")).to_contain_text("ENGINE PAUSED")


def test_counts_of_the_map_and_rows_of_the_tables_equal_the_admin_state(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(10)
    until_running(page, 3)
    pause(console, page)
    state = console.state()
    expect(page.locator("[data-legend=used]")).to_have_text(str(state["kv"]["used"]))
    kv = state["kv"]
    assert legend(page) == {name: kv[name] for name in ("free", "cached", "used", "shared")} | {"total": NUM_BLOCKS}
    assert kv["used"] + kv["shared"] > 0
    expect(page.locator("#running tbody tr")).to_have_count(len(state["running"]))
    expect(page.locator("#waiting tbody tr")).to_have_count(len(state["waiting"]))
    ids = page.locator("#running tbody tr").evaluate_all("rows => rows.map(row => row.dataset.id)")
    assert ids == [row["id"] for row in state["running"]]
    expect(page.locator("#waiting tbody tr").first).to_contain_text("engine paused")


def test_block_table_lists_as_many_blocks_of_each_state_as_there_are(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(4)
    until_running(page, 4)
    pause(console, page)
    kv = console.state()["kv"]
    page.locator("#table-toggle").click()
    for value, name in enumerate(("free", "cached", "used", "shared")):
        page.locator("#block-table select").select_option(str(value))
        expected = f"of {kv[name]} blocks" if kv[name] else "no such blocks"
        expect(page.locator(".table-range")).to_contain_text(expected)


def test_pixels_of_the_map_show_a_used_block_where_the_engine_has_one(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(2)
    until_running(page, 2)
    pause(console, page)
    used = [b for row in console.state()["running"] for b in row["block_table"][:1]]
    for block in used:
        # The keyboard cursor knows where each block is; its sentence says what the page believes of it.
        page.locator("#map").focus()
        page.keyboard.press("Home")
        for _ in range(block):
            page.keyboard.press("ArrowRight")
        expect(page.locator("#map-cursor")).to_contain_text(re.compile(f"^Block {block}: (used|shared)"))
    colours = page.evaluate(
        """() => {
          const canvas = document.querySelector('#map canvas');
          const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
          const seen = new Set();
          for (let i = 0; i < data.length; i += 4) if (data[i + 3] === 255) seen.add(data.slice(i, i + 3).join());
          return [...seen];
        }"""
    )
    assert "30,118,230" in colours, "the colour of used blocks, from the one table of colours"


def test_preemptions_stand_in_the_feed_in_the_counters_and_in_the_metrics(
    page: Page, console: Console, traffic: Load
) -> None:
    before = console.state()["counters"]["num_preemptions"]
    traffic.start(8, prompt_tokens=50, max_tokens=250)
    expect(page.locator("#feed li[data-kind=preempted]").first).to_be_visible()
    expect(page.locator("#feed li[data-kind=preempted]").first).to_contain_text(
        re.compile(r"preempted .+ blocks? freed, [\d,]+ tokens? to compute again")
    )
    page.locator(".toggle[data-group=preemptions]").click()
    expect(page.locator("#feed li[data-kind=preempted]").first).to_be_hidden()
    page.locator(".toggle[data-group=preemptions]").click()
    traffic.join()
    assert all(status == 200 for status, _ in traffic.answers), traffic.answers
    total = console.state()["counters"]["num_preemptions"]
    assert total > before
    expect(page.locator("[data-counter=preemptions] .counter-value")).to_have_text(f"{total:,}")
    assert console.metric("vllm:num_preemptions_total") == total


def test_the_first_in_the_queue_says_what_would_admit_it_and_the_others_whom_they_wait_for(
    page: Page, console: Console, traffic: Load
) -> None:
    console.set_limits(max_num_seqs=2)
    traffic.start(5)
    until_running(page, 2)
    rows = page.locator("#waiting tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0)).to_contain_text("max_num_seqs: 2 of 2 slots taken")
    expect(rows.nth(1)).to_contain_text("behind ")
    console.set_limits(max_num_seqs=8, num_usable_blocks=12)
    expect(rows.first).to_contain_text(re.compile(r"needs \d+ blocks?, \d+ available.*; \d+ more would admit it"))
    expect(page.locator("#usable-note")).to_contain_text("usable 12 of 64")


def test_pausing_the_view_stops_this_page_only_and_resuming_it_shows_the_present(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(3, max_tokens=600)
    until_running(page, 3)
    page.locator("#view-pause").click()
    expect(page.locator("#bar-state")).to_contain_text("VIEW PAUSED")
    frozen = page.locator("#running tbody").inner_text()
    expect(page.locator(".frozen-missed")).to_have_text(re.compile(r"^([2-9]|\d\d+) steps missed"))
    assert page.locator("#running tbody").inner_text() == frozen
    assert console.state()["paused"] is False
    page.locator("#view-pause").click()
    expect(page.locator("#frozen-note")).to_be_hidden()
    pause(console, page)
    state = console.state()
    expect(page.locator("#running tbody tr").first.locator(".col-output")).to_contain_text(
        f"{state['running'][0]['num_output_tokens']} /"
    )


def test_pausing_the_engine_asks_why_tells_every_tab_and_steps_one_at_a_time(
    page: Page, browser_context: BrowserContext, address: str, console: Console, traffic: Load
) -> None:
    other = browser_context.new_page()
    other.goto(f"{address}/admin")
    traffic.start(3, max_tokens=600)
    until_running(page, 3)
    expect(page.locator("[data-engine=step]").first).to_have_attribute("title", re.compile("Pause the engine first"))
    page.locator("[data-engine=pause]").click()
    page.locator("#ask-yes").click()
    expect(page.locator("#ask-dialog .field-error")).to_contain_text("Say why")
    page.locator("#ask-reason").fill("counting blocks")
    page.keyboard.press("Enter")
    for tab in (page, other):
        expect(tab.locator("#engine-banner")).to_contain_text("counting blocks")
    step = console.state()["step"]
    page.locator("[data-engine=step][data-n='1']").click()
    expect(page.locator("#bar-step")).to_have_text(f"{step + 1:,}")
    page.locator("[data-engine=step][data-n='10']").click()
    expect(page.locator("#bar-step")).to_have_text(f"{step + 11:,}")
    assert console.state()["step"] == step + 11
    page.locator("[data-engine=resume]").click()
    expect(page.locator("#engine-banner")).to_be_hidden()


def test_abort_says_what_it_would_do_and_the_receipt_says_what_it_did(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(3, max_tokens=600)
    until_running(page, 3)
    pause(console, page)
    before = console.state()
    victim = before["running"][1]
    line = page.locator(f"#running tr[data-id='{victim['id']}']")
    line.locator("button.abort").click()
    num_blocks = len(victim["block_table"])
    expect(line.locator(".confirm-effect")).to_have_text(
        f"frees {num_blocks} blocks, loses {victim['num_computed_tokens']:,} tokens"
    )
    page.keyboard.press("Escape")
    expect(line.locator(".confirm")).to_have_count(0)
    line.locator("button.abort").click()
    line.locator(".confirm .btn-danger").click()
    expect(page.locator("#receipt-text")).to_contain_text(
        f"{num_blocks} blocks freed, {victim['num_output_tokens']} tokens produced"
    )
    after = console.state()
    assert victim["id"] not in [row["id"] for row in after["running"]]
    held = [kv["used"] + kv["shared"] for kv in (before["kv"], after["kv"])]
    assert held[0] - held[1] == num_blocks
    expect(page.locator("[data-legend=used]")).to_have_text(str(after["kv"]["used"]))
    expect(line).to_have_count(0)


def test_selecting_a_block_selects_its_request_and_the_selection_outlives_updates(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(2, max_tokens=600)
    until_running(page, 2)
    row = console.state()["running"][0]
    page.locator("#map").focus()
    page.keyboard.press("Home")
    for _ in range(row["block_table"][0]):
        page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    line = page.locator(f"#running tr[data-id='{row['id']}']")
    expect(line).to_have_class(re.compile("is-selected"))
    element = line.element_handle()
    step = console.state()["step"]
    page.wait_for_function(
        "step => Number(document.getElementById('bar-step').textContent.replaceAll(',', '')) > step + 5", arg=step
    )
    assert element is not None
    assert element.evaluate("row => row.isConnected && row.classList.contains('is-selected')")
    expect(page.locator("#selection")).to_contain_text("running")
    page.keyboard.press("Escape")
    expect(line).not_to_have_class(re.compile("is-selected"))


def test_filter_is_in_the_address_and_hides_what_does_not_pass(page: Page, console: Console, traffic: Load) -> None:
    console.set_limits(max_num_seqs=2)
    traffic.start(4, prompt_tokens=40)
    until_running(page, 2)
    expect(page.locator("#waiting tbody tr")).to_have_count(2)
    page.locator("#filter").fill("state:waiting prompt>=40")
    expect(page.locator("#running tbody tr")).to_have_count(0)
    expect(page.locator("#running .if-filtered")).to_be_visible()
    expect(page.locator("#waiting tbody tr")).to_have_count(2)
    assert "filter=state:waiting" in page.url
    page.reload()
    expect(page.locator("#filter")).to_have_value("state:waiting prompt>=40")
    expect(page.locator("#waiting .panel-count")).to_have_text("2 of 2")
    page.locator("#filter").fill("prompt>many")
    expect(page.locator("#filter-error")).to_contain_text("wants a number")
    expect(page.locator("#running tbody tr")).to_have_count(2)


def test_a_read_only_role_sees_everything_and_can_do_nothing(browser_page: Page) -> None:
    with serve(Settings(port=0, api_key=KEYS), num_blocks=NUM_BLOCKS) as live:
        browser_page.goto(f"{live.address}/admin/login?next=/engine")
        browser_page.locator("#key").fill(READ_ONLY)
        browser_page.keyboard.press("Enter")
        browser_page.wait_for_url(f"{live.address}/engine")
        expect(browser_page.locator("[data-legend=total]")).to_have_text(str(NUM_BLOCKS))
        button = browser_page.locator("[data-engine=pause]")
        expect(button).to_have_attribute("aria-disabled", "true")
        expect(button).to_have_attribute("title", re.compile("may look, not act"))
        button.click(force=True)
        expect(browser_page.locator("#ask-dialog")).to_be_hidden()
        browser_page.goto(f"{live.address}/admin")
        expect(browser_page.locator(".notice")).to_contain_text("Read-only")
        expect(browser_page.locator("#limit-max_num_seqs")).not_to_be_editable()
        expect(browser_page.locator("[data-action=drain]")).to_have_attribute("aria-disabled", "true")


def test_every_block_has_one_place_inside_the_map_whatever_its_size(page: Page) -> None:
    problems = page.evaluate(
        """async () => {
          const { physicalLayout, groupedLayout } = await import('/static/js/engine/map-layout.js');
          const problems = [];
          const check = (what, layout, n, width, height) => {
            const places = new Set(layout.place);
            if (places.size !== n || places.has(-1)) problems.push(`${what}: ${places.size} places`);
            if (layout.place.some((position, b) => layout.order[position] !== b)) problems.push(`${what}: misplaced`);
            const right = layout.left + layout.cols * layout.cell;
            const bottom = layout.rows * layout.tall;
            if (right > width || bottom > height) problems.push(`${what}: ${right} x ${bottom}`);
          };
          for (const n of [1, 63, 64, 100, 2048, 50000]) {
            for (const [width, height, dpr] of [[745, 470, 1], [1490, 940, 2], [340, 300, 3]]) {
              const what = `${n} blocks in ${width} x ${height} at ${dpr}`;
              check(`physical, ${what}`, physicalLayout(n, width, height, dpr), n, width, height);
              const half = n >> 1;
              const groups = [
                { name: 'a', id: 'a', blocks: Array.from({ length: half }, (_, i) => n - 1 - i) },
                { name: 'free', id: null, blocks: Array.from({ length: n - half }, (_, i) => i) },
              ];
              check(`grouped, ${what}`, groupedLayout(n, groups, width, height, dpr, Infinity), n, width, height);
            }
          }
          return problems;
        }"""
    )
    assert problems == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["a", "b", "c"]),
        ("state:waiting", ["b"]),
        ("state:running prompt>512", ["a"]),
        ("preempted", ["b"]),
        ("-preempted source:v1", ["a"]),
        ("output<=3", ["b", "c"]),
        ("age>60", ["c"]),
        ("C", ["c"]),
        ("preemptions=2 shared", ["b"]),
    ],
)
def test_filter_terms_must_all_hold(page: Page, text: str, expected: list[str]) -> None:
    rows = [
        {"id": "a", "status": "RUNNING", "source": "v1", "num_prompt_tokens": 600, "num_output_tokens": 9,
         "num_preemptions": 0, "num_shared_blocks": 0, "arrival_unix": 1000},
        {"id": "b", "status": "WAITING", "source": "v1", "num_prompt_tokens": 600, "num_output_tokens": 3,
         "num_preemptions": 2, "num_shared_blocks": 1, "arrival_unix": 1000},
        {"id": "c", "status": "RUNNING", "source": "chat", "num_prompt_tokens": 10, "num_output_tokens": 0,
         "num_preemptions": 0, "num_shared_blocks": 0, "arrival_unix": 900},
    ]  # fmt: skip
    kept = page.evaluate(
        """async ([text, rows]) => {
          const { parseFilter } = await import('/static/js/engine/filter.js');
          const { error, matches } = parseFilter(text);
          return error ?? rows.filter((row) => matches(row, 1010)).map((row) => row.id);
        }""",
        [text, rows],
    )
    assert kept == expected


@pytest.mark.parametrize(
    ("why", "sentence"),
    [
        (("blocks", 9, 5, 1, None), "needs 9 blocks, 4 available above the watermark of 1; 5 more would admit it"),
        (("blocks", 2, 1, 0, None), "needs 2 blocks, 1 available; 1 more would admit it"),
        (("slots", 1, 0, 0, None), "max_num_seqs: 2 of 2 slots taken"),
        (("token_budget", 40, 8, 0, None), "needs 40 tokens, 8 left in this step's budget of 2,048"),
        (
            ("prefill_budget", 1, 0, 0, None),
            "needs 1 token, 0 left of the 256 a step gives prompts while others decode",
        ),
        (("behind", None, None, None, "r-71"), "behind r-71"),
        (("paused", 0, 0, 0, None), "engine paused"),
    ],
)
def test_reasons_for_waiting_carry_the_numbers_of_the_test_that_failed(
    page: Page, why: tuple[object, ...], sentence: str
) -> None:
    names = ("constraint", "needed", "available", "watermark", "behind")
    text = page.evaluate(
        """async (why) => {
          const { whyText } = await import('/static/js/engine/why.js');
          const limits = { max_num_seqs: 2, max_num_batched_tokens: 2048, max_prefill_tokens_while_decoding: 256 };
          return whyText(why, { limits, numRunning: 2, paused: false }).text;
        }""",
        dict(zip(names, why, strict=True)),
    )
    assert text == sentence


def test_events_stand_still_under_the_pointer_and_catch_up_when_it_leaves(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(1, max_tokens=3)
    expect(page.locator("#feed li").first).to_be_visible()
    traffic.join()
    page.locator(".feed-scroll").hover()
    first = page.locator("#feed li").first.inner_text()
    traffic.start(2, max_tokens=3)
    expect(page.locator(".feed-more")).to_have_text(re.compile(r"^\d+ new$"))
    assert page.locator("#feed li").first.inner_text() == first
    page.locator("#filter").hover()
    expect(page.locator(".feed-more")).to_be_hidden()
    assert page.locator("#feed li").first.inner_text() != first


def test_page_is_usable_at_phone_width_without_scrolling_sideways(page: Page, traffic: Load) -> None:
    page.set_viewport_size({"width": 375, "height": 812})
    traffic.start(10, max_tokens=600)
    until_running(page, 2)
    expect(page.locator("#waiting tbody tr").first).to_be_visible()
    assert page.evaluate("document.querySelector('main').scrollWidth") <= 375
    assert page.locator("#running tbody tr").first.locator("button.abort").bounding_box()["x"] < 375 - 24  # type: ignore[index]


@pytest.mark.model
@pytest.mark.timeout(600)
def test_eight_requests_at_once_in_sixty_four_blocks_of_the_real_model(
    start_server: Callable[..., Any], browser_page: Page, browser_context: BrowserContext
) -> None:
    server = start_server("--num-kv-blocks", str(NUM_BLOCKS), "--max-num-seqs", "8")
    console = Console(server.base_url)
    browser_page.goto(f"{server.base_url}/engine")
    admin = browser_context.new_page()
    admin.goto(f"{server.base_url}/admin")
    with load(console) as traffic:
        # Paused and stepped, so that it is the same on a machine of any speed.
        console.act("pause", {"reason": "step by step"})
        traffic.start(8, prompt_tokens=96, max_tokens=64)
        expect(browser_page.locator("#waiting tbody tr")).to_have_count(8, timeout=60_000)
        while not console.state()["counters"]["num_preemptions"]:
            console.act("step", {"n": 1})
        expect(browser_page.locator("#feed li[data-kind=preempted]").first).to_be_visible(timeout=60_000)
        expect(browser_page.locator("#waiting .preempted-mark:visible").first).to_be_visible(timeout=60_000)
        admin.locator("#limit-max_num_seqs").fill("2")
        admin.locator("#review").click()
        admin.locator("#apply").click()
        expect(admin.locator("#stage-note")).to_contain_text("Applied as version", timeout=60_000)
        assert console.state()["limits"]["max_num_seqs"] == 2
        while console.state()["waiting"][0]["why"]["constraint"] != "slots":  # the next step that doesn't preempt
            console.act("step", {"n": 1})
        first = browser_page.locator("#waiting tbody tr").first
        expect(first).to_contain_text(re.compile(r"max_num_seqs: \d of 2 slots taken"), timeout=60_000)
        console.set_limits(max_num_seqs=8)
        console.act("resume")
        traffic.join()
        assert [status for status, _ in traffic.answers] == [200] * 8
        counters = console.state()["counters"]
        assert counters["num_preemptions"] == console.metric("vllm:num_preemptions_total") > 0
        shown = browser_page.locator("[data-counter=preemptions] .counter-value")
        expect(shown).to_have_text(f"{counters['num_preemptions']:,}")
        kv = console.state()["kv"]
        assert (kv["used"], kv["shared"]) == (0, 0)
        expect(browser_page.locator("[data-legend=used]")).to_have_text("0")


def test_the_kv_chart_knows_steps_from_before_the_page_was_opened(
    clean_page: Page, address: str, console: Console, traffic: Load
) -> None:
    before = console.state()["step"]
    traffic.start(4)
    while (state := console.state())["step"] < before + 30 or not state["running"]:
        pass
    console.act("pause", {"reason": "a test looks"})
    state = console.state()
    last, kv = state["step"], state["kv"]
    clean_page.goto(f"{address}/engine")
    chart = clean_page.locator("[data-chart=kv]")
    in_use = 100 * (kv["used"] + kv["shared"]) / kv["num_blocks"]
    now = chart.locator(".chart-now")
    expect(now).to_contain_text(" % in use")
    assert float(now.inner_text().split()[0]) == pytest.approx(in_use, abs=0.5)
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    first, end = max(0, last - 599), max(599, last)
    at = (last - 10 - first) / (end - first)
    clean_page.mouse.move(box["x"] + at * box["width"], box["y"] + box["height"] / 2)
    expect(now).to_have_text(re.compile(r"step [\d,]+: \d+(\.\d)? % in use"))
    shown = number(re.findall(r"step ([\d,]+)", now.inner_text())[0])
    assert shown < last

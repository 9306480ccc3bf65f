"""/admin against a whole application: staged edits survive everything, and are applied all or none."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import BrowserContext, Locator, Page, expect

from tests.e2e.load import NUM_BLOCKS, Console, Load

pytestmark = [pytest.mark.browser, pytest.mark.slow]

expect.set_options(timeout=20_000)  # an upper bound for a busy machine; nothing waits longer than it must


@pytest.fixture
def page(clean_page: Page, address: str) -> Page:
    """/admin, live."""
    clean_page.goto(f"{address}/admin")
    expect(clean_page.locator("#bar-state")).to_contain_text("LIVE")
    return clean_page


def field(page: Page, name: str) -> Locator:
    """The input of a limit."""
    return page.locator(f"#limit-{name}")


def row(page: Page, name: str) -> Locator:
    """The row of a limit."""
    return page.locator(f"tr[data-limit={name}]")


def test_lowering_max_num_seqs_takes_effect_and_waiting_rows_say_why(
    page: Page, browser_context: BrowserContext, address: str, console: Console, traffic: Load
) -> None:
    engine = browser_context.new_page()
    engine.goto(f"{address}/engine")
    traffic.start(6, prompt_tokens=20, max_tokens=120)
    expect(row(page, "max_num_seqs").locator("[data-pressure]")).to_have_text("running 6 of 8")
    field(page, "max_num_seqs").fill("2")
    expect(page.locator("#stage-note")).to_contain_text("1 change staged")
    assert console.state()["limits"]["max_num_seqs"] == 8, "nothing is applied before it is reviewed"
    field(page, "max_num_seqs").press("Enter")
    expect(page.locator("#review-dialog tbody tr")).to_contain_text(re.compile("max_num_seqs.*8.*2", re.DOTALL))
    expect(page.locator(".diff-effect")).to_contain_text(
        re.compile("run on; nothing is admitted until fewer than 2 run")
    )
    page.locator("#apply").click()
    expect(page.locator("#stage-note")).to_contain_text("Applied as version")
    assert console.state()["limits"]["max_num_seqs"] == 2
    expect(row(page, "max_num_seqs").locator("[data-source]")).to_have_text("runtime")
    traffic.start(2)
    expect(engine.locator("#waiting tbody tr").first).to_contain_text(re.compile(r"max_num_seqs: \d of 2 slots taken"))
    expect(engine.locator("#waiting tbody tr").nth(1)).to_contain_text("behind ")
    expect(engine.locator("#feed li[data-kind=limits]").first).to_contain_text("max_num_seqs 8 → 2")


def test_typing_in_a_limit_survives_live_updates_and_changes_by_others(
    page: Page, console: Console, traffic: Load
) -> None:
    traffic.start(4, max_tokens=900)
    box = field(page, "max_num_batched_tokens")
    box.click()
    box.press("ControlOrMeta+a")
    step = console.state()["step"]
    text = "1234567890" * 4
    box.press_sequentially(text[:20], delay=120)
    console.set_limits(max_num_batched_tokens=777, max_num_queued_reqs=55)
    expect(row(page, "max_num_batched_tokens").locator("[data-current]")).to_have_text("777")
    for _ in range(5):
        box.press("ArrowLeft")
    caret = "field => [field.selectionStart, field.selectionEnd, document.activeElement === field]"
    assert box.evaluate(caret) == [15, 15, True]
    box.press_sequentially("000", delay=300)
    expect(box).to_have_value(text[:15] + "000" + text[15:20])
    assert box.evaluate(caret) == [18, 18, True]
    expect(page.locator("#conflict")).to_contain_text("max_num_batched_tokens 2,048 → 777")
    expect(field(page, "max_num_queued_reqs")).to_have_value("55")
    assert console.state()["step"] > step + 20, "there were updates all the time"
    box.press("Escape")
    expect(box).to_have_value("777")


def test_a_change_in_between_refuses_the_review_and_keeps_the_edits(page: Page, console: Console) -> None:
    field(page, "watermark").fill("0.25")
    page.locator("#review").click()
    expect(page.locator("#review-dialog")).to_be_visible()
    console.set_limits(max_num_seqs=5)
    page.locator("#apply").click()
    expect(page.locator("#review-dialog")).to_be_hidden()
    expect(page.locator("#conflict")).to_contain_text("max_num_seqs 8 → 5")
    expect(field(page, "watermark")).to_have_value("0.25")
    assert console.state()["limits"]["watermark"] == 0.01
    page.locator("#review").click()
    page.locator("#apply").click()
    expect(page.locator("#stage-note")).to_contain_text("Applied as version")
    limits = console.state()["limits"]
    assert (limits["watermark"], limits["max_num_seqs"]) == (0.25, 5)


def test_a_value_out_of_range_is_told_at_its_field_and_nothing_is_applied(page: Page, console: Console) -> None:
    before = console.state()["limits"]
    field(page, "max_num_seqs").fill("0")
    field(page, "watermark").fill("0.2")
    page.locator("#review").click()
    page.locator("#apply").click()
    expect(row(page, "max_num_seqs").locator(".field-error")).to_contain_text(
        re.compile("max_num_seqs must be an integer >= 1")
    )
    expect(field(page, "max_num_seqs")).to_have_attribute("aria-invalid", "true")
    expect(field(page, "max_num_seqs")).to_be_focused()
    expect(field(page, "watermark")).to_have_value("0.2")
    assert console.state()["limits"] == before
    field(page, "max_num_seqs").fill("many")
    page.locator("#review").click()
    expect(row(page, "max_num_seqs").locator(".field-error")).to_contain_text("not a number")
    expect(page.locator("#review-dialog")).to_be_hidden()


def test_several_limits_are_applied_as_one_change_and_undone_as_one(page: Page, console: Console) -> None:
    before = console.state()
    field(page, "queue_timeout_s").fill("30")
    field(page, "scheduling_policy").select_option("priority")
    field(page, "num_usable_blocks").fill("48")
    page.locator("#review").click()
    expect(page.locator("#review-dialog tbody tr")).to_have_count(3)
    page.locator("#apply").click()
    expect(page.locator("#stage-note")).to_contain_text("Applied as version")
    after = console.state()
    assert after["limits_version"] == before["limits_version"] + 1
    changed = {name: value for name, value in after["limits"].items() if value != before["limits"][name]}
    assert changed == {"queue_timeout_s": 30, "scheduling_policy": "priority", "num_usable_blocks": 48}
    expect(row(page, "queue_timeout_s").locator("[data-current]")).to_have_text("30 s")
    page.locator("#undo").click()
    expect(page.locator("#stage-note")).to_contain_text("Undone as version")
    assert console.state()["limits"] == before["limits"]
    expect(field(page, "queue_timeout_s")).to_have_value("")


def test_each_action_is_in_the_audit_log_with_its_outcome(page: Page, console: Console, traffic: Load) -> None:
    traffic.start(2, max_tokens=600)
    page.locator("[data-action=pause]").click()
    page.locator("#ask-reason").fill("night shift")
    page.locator("#ask-yes").click()
    expect(page.locator("#engine-receipt")).to_contain_text("Paused after step")
    expect(page.locator("#audit-rows tr").first).to_contain_text(re.compile("admin.*pause.*night shift.*ok", re.DOTALL))
    expect(page.locator("#engine-state")).to_have_text("PAUSED")
    step = console.state()["step"]
    page.locator("[data-action=step][data-n='1']").click()
    expect(page.locator("#engine-receipt")).to_contain_text(f"Ran 1 step; at step {step + 1:,}")
    page.locator("[data-action=resume]").click()
    expect(page.locator("#audit-rows tr").first).to_contain_text("resume")
    times = page.locator("#audit-rows time").all_inner_texts()
    assert times
    assert all(re.fullmatch(r"(.* )?\d\d:\d\d:\d\d", text) for text in times), times


def test_resetting_the_prefix_cache_says_first_what_it_drops(page: Page, console: Console, traffic: Load) -> None:
    traffic.start(1, prompt_tokens=80, max_tokens=2)
    traffic.join()
    cached = console.state()["kv"]["cached"]
    assert cached > 0
    page.locator("[data-action=reset]").click()
    expect(page.locator("#ask-text")).to_contain_text(f"{cached} cached blocks become free")
    page.locator("#ask-yes").click()
    expect(page.locator("#engine-receipt")).to_contain_text(f"content of {cached} blocks dropped")
    kv = console.state()["kv"]
    assert (kv["cached"], kv["free"]) == (0, NUM_BLOCKS)

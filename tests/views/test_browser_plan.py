"""The page that plans a cluster, in a real browser: choose, compare, see why, and hand the answer on as a file."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser_cases import Seen, until
from browser_fixtures import browser as browser

from octopipe.cli.verbs.serve import planned
from octopipe.views.report.serve import make_server


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    made = make_server(planner=planned)
    threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    host, port = made.server_address[:2]
    yield f"http://{host if isinstance(host, str) else host.decode()}:{port}/plan"
    made.shutdown()
    made.server_close()


def ask(page: Any, **fields: str) -> None:
    """Fill the form and wait for the answer, or for what is wrong with the question."""
    for name, value in fields.items():
        field = page.locator(f'[name="{name}"]').first
        if field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.click("#go")
    until(page, "!document.getElementById('go').disabled")


def shown(page: Any) -> dict[str, Any]:
    """The rows that are chosen, the comparison of them, and every number of the table."""
    return {
        "rows": page.locator(".plan-table").first.inner_text(),
        "compared": page.locator(".plan-compare").inner_text(),
        "chosen": page.locator(".choose:checked").count(),
    }


def test_choose_compare_see_why_and_hand_the_answer_on(browser: Any, address: str, tmp_path: Path) -> None:
    one = Seen(browser)
    page = one.page
    page.goto(address)
    ask(page, model="llama3-8b", gpu="h100", gpus="16", global_batch="64", today="tp=2,pp=2", budget_s="1")
    assert page.locator("#problem").inner_text() == ""
    first = shown(page)
    assert first["chosen"] == 2 and "today" in first["rows"]
    assert "matrix products" in first["compared"], "two rows are compared part by part as soon as they are there"
    # Another row: the comparison follows.
    boxes = page.locator(".choose")
    boxes.nth(0).uncheck()
    boxes.nth(1).check()
    assert shown(page)["compared"] != first["compared"]
    boxes.nth(1).uncheck()
    boxes.nth(0).check()
    assert shown(page) == first
    assert "torchrun" in (page.locator("#found").text_content() or ""), "how it is started"
    # The answer as a file, opened by somebody else.
    with page.expect_download() as waiting:
        page.click("#share")
    file = tmp_path / "answer.json"
    waiting.value.save_as(file)
    assert json.loads(file.read_text())["format"] == "octopipe.cluster-answer/1"
    with page.expect_download() as waiting:
        page.click("#download")
    plan = tmp_path / "plan.json"
    waiting.value.save_as(plan)
    assert json.loads(plan.read_text())["format"].startswith("octopipe.plan/")
    other = Seen(browser)
    other.page.goto(address)
    other.page.set_input_files("#open", str(file))
    until(other.page, "document.querySelector('.plan-table') !== null")
    assert shown(other.page) == first
    assert one.complaints == [] == other.complaints
    for seen in (one, other):
        assert all(url.startswith((address.removesuffix("/plan"), "blob:", "data:")) for url in seen.requests)
        seen.page.close()


def test_a_wrong_question_or_file_is_told_and_the_page_goes_on(browser: Any, address: str, tmp_path: Path) -> None:
    page = Seen(browser).page
    page.goto(address)
    ask(page, model="llama3-8b", gpu="h100", gpus="8", global_batch="64", today="tp=3", budget_s="1")
    assert "needs multiples of 3 GPUs" in page.locator("#problem").inner_text()
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    page.set_input_files("#open", str(broken))
    until(page, "!document.getElementById('problem').textContent.includes('multiples')")
    until(page, "document.getElementById('problem').textContent !== ''")
    ask(page, today="")
    assert page.locator("#problem").inner_text() == "" and page.locator(".plan-table").count() >= 1
    page.close()

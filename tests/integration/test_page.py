"""The master's page in a real browser, before a real run: what it shows, when, and to whom (`make test-slow`).

Screenshots go to $DIPS_SHOTS, or below pytest's own directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from dips.view.page import document
from tests.integration import cluster_harness as harness
from tests.integration import train_watched as script

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not here: no page was looked at")

HERE = Path(__file__).parent
PROBE = (HERE / "page_probe.js").read_text()  # texts and bytes only: a file would start a thread of playwright
CHROMIUM = shutil.which("chromium")
HEARTBEAT_S = 2.0
LEAST_CONTRAST = 4.5  # WCAG 2, level AA
PHONE = {"width": 360, "height": 780}
DESK = {"width": 1280, "height": 900}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not here: no page was looked at"),
]


class Watched:
    """A run with two clusters and one that died of markup, and a browser that looks at it."""

    def __init__(self, run: harness.Run, url: str, browser: Any, shots: Path) -> None:
        self.run, self.url, self.browser, self.shots = run, url, browser, shots
        self.problems: list[str] = []

    def start_cluster(self, name: str, *words: str, steps: int = 5) -> harness.Process:
        command = [sys.executable, str(HERE / "train_watched.py"), *words]
        return self.run.start_cluster(name, command, steps=steps)

    def open_page(self, size: dict[str, int] = DESK, scheme: str = "light") -> Any:
        """A page that has shown the run; whatever the browser complains about is in `problems`."""
        context = self.browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
        page = context.new_page()
        page.add_init_script(script=PROBE)
        page.on("console", lambda m: self.problems.append(f"{m.type}: {m.text}") if m.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(f"raised: {error}"))
        page.goto(self.url)
        page.locator("#clusters tbody tr").first.wait_for()
        page.wait_for_function("() => document.querySelectorAll('#curve-loss polyline').length > 0")
        return page

    def keep_shot(self, page: Any, name: str, *, whole: bool = True) -> None:
        (self.shots / name).write_bytes(page.screenshot(full_page=whole))


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    directory = tmp_path_factory.mktemp("page")
    shots = Path(os.environ.get("DIPS_SHOTS", directory / "shots"))
    shots.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.zeros(tuple(p.shape), np.float32) for name, p in script.make_model().named_parameters()}
    port = harness.free_port()
    shared = {"stop": {"tokens": 4_000_000}, "penalty": {"warmup_rounds": 2}, "heartbeat_s": HEARTBEAT_S}
    timing = {"window_s": 1.0}
    with (
        harness.Run(directory, tensors, shared=shared, timing=timing) as run,
        sync_api.sync_playwright() as playwright,
    ):
        content = yaml.safe_load(run.file.read_text())
        content["master"]["http"] = f"127.0.0.1:{port}"
        run.file.write_text(yaml.safe_dump(content))
        run.start_servers()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = Watched(run, f"http://127.0.0.1:{port}/", browser, shots)
        made.start_cluster("west-h100", "0.2", "4096")
        made.start_cluster("east-a100", "0.3", "2048", "wild")
        hostile = made.start_cluster("odd-one", "0.1", "16", "hostile")
        run.until(lambda: hostile.code is not None, 60, "the hostile cluster dies")
        with run.ledger() as ledger:
            run.until(lambda: any(r.kind != "unfinished" for r in ledger.read_history(9)), 60, "a round ends")
            run.until(lambda: len(ledger.read_history(9)) >= 6, 60, "six rounds")
        yield made
        browser.close()


def word_of(page: Any, cluster: str) -> str:
    return str(page.locator(f"#clusters tr[data-key='{cluster}'] .pill").inner_text())


def wait_for_word(page: Any, cluster: str, words: str, within_s: float) -> None:
    """Until the state of a cluster is, or with ! is none of, these words."""
    told, absent = words.lstrip("!").split("|"), words.startswith("!")
    page.wait_for_function(
        "([c, told, absent]) => told.includes(document.querySelector(`#clusters tr[data-key='${c}'] .pill`)"
        "?.textContent) !== absent",
        arg=[cluster, told, absent],
        timeout=within_s * 1000,
    )


def test_markup_as_a_reason_stays_text(watched: Watched) -> None:
    """A trainer's last line is shown letter by letter, and runs nowhere."""
    page = watched.open_page()
    row = page.locator("#clusters tr[data-key='odd-one']")
    assert script.MARKUP in row.inner_text()
    assert page.evaluate("window.stolen") is None
    assert page.locator("main img, main script").count() == 0
    page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_can_be_read(watched: Watched, scheme: str) -> None:
    """Computed contrast, of plots too; beside every colour there is a word."""
    page = watched.open_page(scheme=scheme)
    for summary in page.locator("summary").all():
        summary.click()
    page.wait_for_timeout(300)
    found = page.evaluate("dipsProbe.contrasts()")
    assert len(found) > 100
    assert {t["text"]: t["ratio"] for t in found if t["ratio"] < LEAST_CONTRAST} == {}
    for summary in page.locator("summary").all():
        summary.click()
    watched.keep_shot(page, f"{scheme}.png")
    page.context.close()


def test_a_phone_scrolls_tables_and_not_the_page(watched: Watched) -> None:
    page = watched.open_page(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    assert page.evaluate("document.querySelector('#clusters').parentElement.scrollWidth") > PHONE["width"]
    watched.keep_shot(page, "phone.png")
    page.context.close()


def test_a_walk_by_keyboard_reaches_everything_and_is_seen(watched: Watched) -> None:
    """From the skip link through every region that scrolls; each shows that it has the focus; nothing traps it."""
    page = watched.open_page()
    walked = []
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            break
        walked.append(page.evaluate("dipsProbe.focused()"))
    reachable = page.evaluate(
        "[...document.querySelectorAll('a[href], summary, select, [tabindex=\"0\"]')]"
        ".filter(n => n.getClientRects().length && "
        "!(n.closest('details') && !n.closest('details').open && n.tagName !== 'SUMMARY')).length"
    )
    assert len(walked) == len({step["key"] for step in walked}) == reachable >= 8
    assert all(step["outline"] >= 2 and step["seen"] for step in walked), walked
    page.reload()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.context.close()


def test_a_screen_reader_finds_its_way(watched: Watched) -> None:
    """Landmarks, one first heading, captions, header cells, words for every plot; and silence while all goes on."""
    page = watched.open_page()
    assert [page.locator(tag).count() for tag in ("header", "main", "footer", "h1")] == [1, 1, 1, 1]
    assert page.evaluate("[...document.querySelectorAll('table')].every(t => t.caption.textContent.length > 20)")
    assert page.evaluate("[...document.querySelectorAll('thead th')].every(t => t.scope === 'col')")
    assert page.evaluate("[...document.querySelectorAll('section')].every(s => s.hasAttribute('aria-labelledby'))")
    named = "s.closest('[aria-hidden=true]') || s.matches('[role=img][aria-label], [role=img][aria-labelledby]')"
    assert page.evaluate(f"[...document.querySelectorAll('svg')].every(s => {named})")
    assert "made a version" in page.locator("#timeline-says").inner_text()
    assert "loss fell from" in page.locator("#curve-loss figcaption").inner_text()
    page.wait_for_timeout(2500)
    assert page.locator("#say").inner_text() == ""
    page.context.close()


def test_a_part_of_a_curve_is_looked_at_closer(watched: Watched) -> None:
    """What the pointer marks is shown in all curves; a double click, or another axis, shows everything again."""
    page = watched.open_page()
    plot = page.locator("#curve-loss svg")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box is not None
    ticks = "[...document.querySelectorAll('#curve-delta_norm text')].map(t => t.textContent).join()"
    before = page.evaluate(ticks)
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 100)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 100)
    page.mouse.up()
    assert page.locator("#range").input_value() == "drag" and page.evaluate(ticks) != before
    plot.dblclick()
    assert page.locator("#range").input_value() == "1"
    page.locator("#axis").select_option("0")
    assert page.locator("#curve-score polyline").count() == 2
    page.context.close()


def test_the_legend_has_the_colours_of_the_lines(watched: Watched) -> None:
    """A master that starts again may know clusters in another order, by the rounds that it reads: an open page gave
    each line the name of another one's cluster.
    """
    page = watched.open_page()
    whole = page.request.get(page.url + "api/state").json()
    turned = {**whole["curves"], "name": "another master's", "clusters": whole["curves"]["clusters"][::-1]}
    page.route("**/api/state*", lambda route: route.fulfill(json={**whole, "curves": turned}))
    entry = "l => l.textContent + l.querySelector('line').getAttribute('stroke')"
    legend = f"[...document.querySelectorAll('#curves-legend li')].map({entry})"
    wanted = ["the runvar(--ink)", *(f"{c['name']}var(--c{i})" for i, c in enumerate(turned["clusters"]))]
    page.wait_for_function(f"wanted => ({legend}).join() === wanted", arg=",".join(wanted), timeout=15_000)
    page.unroute_all(behavior="wait")
    page.context.close()


def test_last_lines_and_options_are_there_when_opened(watched: Watched) -> None:
    """What the trainer said last stays text; the configuration is what the run agreed on."""
    page = watched.open_page()
    page.locator("#lines summary").click()
    said = page.locator("#lines-of [data-key='west-h100'] pre")
    said.wait_for()
    assert script.MARKUP in said.inner_text()
    page.locator("#options summary").click()
    page.locator("#options tr[data-key='penalty.warmup_rounds']").wait_for()
    assert page.locator("#options tr[data-key='penalty.warmup_rounds'] td").inner_text() == "2"
    watched.keep_shot(page, "opened.png")
    page.context.close()


def test_a_killed_cluster_turns_silent_and_back(watched: Watched) -> None:
    """Within three heartbeats of its death, and of its return; it is said aloud."""
    run, page = watched.run, watched.open_page()
    west = next(p for p in run.processes if p.name == "west-h100")
    west.kill()
    began = time.monotonic()
    wait_for_word(page, "west-h100", "silent", 3 * HEARTBEAT_S)
    print(f"silent after {(time.monotonic() - began) / HEARTBEAT_S:.1f} heartbeats")
    assert "west-h100" in page.locator("#concerns").inner_text() and "is silent" in page.locator("#say").inner_text()
    watched.keep_shot(page, "silent.png")
    watched.start_cluster("west-h100", "0.2", "4096")
    with run.ledger() as ledger:
        incs = lambda: {c.name: c.inc for c in ledger.read_state().clusters}  # noqa: E731
        run.until(lambda: incs()["west-h100"] == 2, 60, "it joins again")
    began = time.monotonic()
    wait_for_word(page, "west-h100", "!silent|gone", 3 * HEARTBEAT_S)
    print(f"back after {(time.monotonic() - began) / HEARTBEAT_S:.1f} heartbeats")
    page.context.close()


def test_a_master_that_is_away_is_said_and_found_again(watched: Watched) -> None:
    """A stopped one, and one that was killed: what is shown is said to be old; then its next term is shown."""
    run, page = watched.run, watched.open_page()
    master = next(p for p in run.processes if p.name == "master")
    os.kill(master.pid, signal.SIGSTOP)
    page.locator("#lost").wait_for(timeout=15_000)
    assert "Last seen" in page.locator("#lost").inner_text()
    watched.keep_shot(page, "lost.png", whole=False)
    os.kill(master.pid, signal.SIGCONT)
    page.locator("#lost").wait_for(state="hidden", timeout=15_000)
    known = len(watched.problems)
    master.kill()
    page.locator("#lost").wait_for(timeout=15_000)
    assert page.title().startswith("✕")
    run.start_master()
    page.locator("#lost").wait_for(state="hidden", timeout=30_000)
    page.wait_for_function("() => document.querySelector('#foot').textContent.includes('term 2')", timeout=10_000)
    page.wait_for_function("() => document.querySelector('#health').textContent === 'All is well'", timeout=30_000)
    away = [p for p in watched.problems[known:] if "ERR_CONNECTION" in p or "ERR_EMPTY" in p]
    assert watched.problems[known:] == away  # the browser's own words for what the page says
    del watched.problems[known:]
    page.context.close()


def test_what_answers_in_the_masters_place_is_not_taken_for_silence(watched: Watched) -> None:
    """A proxy's page to sign in, and a master of another release, which has upgraded beside an open page: each says
    what to do. The page goes on when the master is back.
    """
    page = watched.open_page()
    lost = page.locator("#lost")

    def answer(says: str, **how: Any) -> None:
        page.route("**/api/state*", lambda route: route.fulfill(**how))
        page.wait_for_function(
            "text => document.querySelector('#lost:not([hidden])')?.innerText.includes(text)",
            arg=says,
            timeout=15_000,
        )
        page.unroute("**/api/state*")
        lost.wait_for(state="hidden", timeout=15_000)

    answer("Something else answers", status=200, content_type="text/html", body="<form>Sign in</form>")
    answer("is of another release than this page: load it again", status=200, json={"format": document.FORMAT + 1})
    whole = page.request.get(page.url + "api/state").json()
    for unshown in ({"format": document.FORMAT}, {**whole, "slaves": None}):  # at once, and in the middle
        answer("cannot show what the master says", status=200, json=unshown)
    answer("does not answer", status=502, body="")
    del watched.problems[:]  # the browser's own words for the last
    page.context.close()


def test_a_time_is_told_in_whole_hours_and_minutes(watched: Watched) -> None:
    """Half a minute before two hours it was `1 h 60 min`."""
    page, uptime = watched.open_page(), [0]
    page.route("**/api/state*", lambda route: route.fulfill(json={**route.fetch().json(), "uptime_s": uptime[0]}))
    for uptime[0], told in ((7169, "1 h 59 min"), (7171, "2 h 0 min"), (7200, "2 h 0 min")):
        page.wait_for_function("text => document.querySelector('#foot').innerText.includes(text)", arg=f"up {told}")
    page.unroute_all(behavior="wait")
    page.context.close()


def test_the_browser_had_nothing_to_complain_about(watched: Watched) -> None:
    """No error, and nothing that the content security policy stopped, in all of the above."""
    assert watched.problems == []

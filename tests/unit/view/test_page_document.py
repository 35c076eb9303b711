"""The document of `/api/state`: one word for the whole run, bounded lists, and text that stays text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from dips.errors import UnavailableMaster
from dips.ids import PullId, PushId, VersionId
from dips.master.page import MasterPage, SlaveRates
from dips.protocol.enums import DurabilityState, OutcomeKind
from dips.protocol.events import PullRequested
from dips.protocol.heartbeats import Transfer
from dips.protocol.records import FoldRow, OutcomeRow
from dips.protocol.view import (
    DurabilityView,
    JournalView,
    LeaseView,
    LedgerMirrorView,
    MirrorView,
    RunView,
    StandbyView,
)
from dips.view.page import document
from dips.view.page.memory import MOST_CHARS, EndedRound, PageMemory, Span, SpanKind, clean_text
from dips.view.points import RoundHistory
from tests.unit.view.views import make_cluster, make_run, make_slave

MOST_BYTES = 256 << 10  # of any document


def state(told: RunView, memory: PageMemory | None = None, **more: Any) -> dict[str, Any]:
    made = document.make_state(told, memory or PageMemory(), wall=1000.0, **more)
    assert json.loads(json.dumps(made, allow_nan=False)) == json.loads(json.dumps(made))
    return made


def level(told: RunView, memory: PageMemory | None = None) -> str:
    return str(state(told, memory)["health"]["level"])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (make_run(), "well"),
        (make_run({}), "waiting"),
        (make_run({"west": make_cluster("gone", "silent")}, finished="v3@r3"), "finished"),
        (make_run({"west": make_cluster("gone", "left"), "east": make_cluster()}), "well"),
        (make_run({"west": make_cluster("gone", "silent"), "east": make_cluster()}), "attention"),
        (make_run({"west": make_cluster("idle", "stalled", trainer="starting")}), "well"),
        (make_run(slaves={"ps0": make_slave(), "ps1": make_slave("lost", "silent")}), "broken"),
        (make_run(slaves={"ps0": make_slave("restoring", "loads")}), "broken"),
        (make_run(slaves={"ps0": make_slave(mirror=MirrorView(failing=True))}), "attention"),
        (make_run(durability=DurabilityView(state=DurabilityState.DEGRADED)), "attention"),
        (make_run(durability=DurabilityView(state=DurabilityState.STOPPED)), "broken"),
        (make_run(ledger_mirror=LedgerMirrorView(red=True)), "attention"),
        (make_run(lease=LeaseView("a", True, 1.0, standbys=(StandbyView("b", True),))), "well"),
        (make_run(lease=LeaseView("a", True, 1.0, standbys=(StandbyView("b", False),))), "attention"),
        (make_run(lease=LeaseView("a", True, 5.0, failing=True)), "attention"),
        (make_run(lease=LeaseView("a", False, 5.0, failing=True)), "well"),
        (make_run(journal=JournalView(writing=False)), "attention"),
    ],
)
def test_one_word_says_whether_all_is_well(told: RunView, expected: str) -> None:
    """Broken: no version can be made; attention: it goes on, and something needs a look."""
    assert level(told) == expected


def test_who_always_was_different_is_flagged_and_asks_for_no_look() -> None:
    """Sentences with numbers under its state; no gate keeps it out, so all is well."""
    told = make_run({"west": make_cluster(differs={"loss": "its loss is\x1busually +30 %"}), "east": make_cluster()})
    east, west = state(told)["clusters"]["rows"]
    assert (west["flags"], west["severity"]) == (["flagged, not gated: its loss is usually +30 %"], "good")
    assert east["flags"] == [] and level(told) == "well"


def ended(number: int, at: float, kind: str = "applied", reason: str = "") -> EndedRound:
    version = VersionId(number, number) if kind == "applied" else None
    return EndedRound(RoundHistory(number, kind, reason, at, at + 1, version, None, 10), {})


def test_a_head_that_is_late_asks_for_a_look() -> None:
    """Later than five times the usual, and than a minute; so does a round that was skipped last."""
    memory = PageMemory()
    memory.rounds.extend(ended(n, n * 20.0) for n in range(1, 6))
    memory.head_at = 1000.0 - 99
    assert level(make_run(), memory) == "well"
    memory.head_at = 1000.0 - 101
    told = state(make_run(), memory)["health"]
    assert told["level"] == "attention" and told["concerns"][0]["what"] == (
        "no new version for 101 s; usually it takes 20 s"
    )
    memory.head_at = 999.0
    memory.rounds.append(ended(6, 120.0, "skipped", "ps1 is lost"))
    assert [c["who"] for c in state(make_run(), memory)["health"]["concerns"]] == ["round 6"]


def test_a_thousand_peers_are_bounded_and_those_that_ask_for_a_look_are_listed() -> None:
    long = {"script": "n" * 5000}
    clusters = {
        f"c{n:04}": make_cluster(tokens_accepted=10, remarks=long, reason="r" * 5000, lines=("l" * 160,) * 8)
        for n in range(1000)
    }
    clusters["c0999"] = make_cluster(heard_s=60.0)
    moving = tuple(Transfer(f"c{n:04}", 1, 1, True, 5, 9, 1e6) for n in range(80))
    slaves = {f"s{n:04}": make_slave(reason="r" * 5000, transfers=moving) for n in range(1000)}
    memory = PageMemory()
    memory.begin_lineage(VersionId(0, 0), 0)
    for n in range(1, 2000):
        pushes = [PushId(f"c{k:04}", 1, n) for k in range(20)]
        folds = tuple(FoldRow(p, VersionId(n - 1, n - 1), 10, 5, 1.0, 1.0, 0.5, 3.14159 + n, ()) for p in pushes)
        outcomes = tuple(OutcomeRow(p, OutcomeKind.ACCEPTED, "", 10, 5, 1.0, 0.123456789, ()) for p in pushes)
        memory.recall_round(
            RoundHistory(
                n,
                "applied",
                "",
                float(n),
                n + 0.5,
                VersionId(n, n),
                VersionId(n - 1, n - 1),
                200,
                delta_norm=0.01,
                folds=folds,
                outcomes=outcomes,
            )
        )
    for n in range(2000):
        memory.spans.add_span(Span(f"c{n % 40:04}", SpanKind.PUSH, 999.0, 999.5, "x" * 9))
    told = state(make_run(clusters, slaves), memory)
    rows = told["clusters"]["rows"]
    assert len(rows) == document.MOST_PEERS and rows[-1]["name"] == "c0999" and rows[-1]["word"] == "silent"
    assert len(rows[0]["ends"]) == document.MOST_ENDS
    assert told["clusters"]["rest"] == {"count": 952, "tokens": 9520}
    assert told["slaves"]["rest"] == {"count": 952}
    assert len(told["timeline"]["lanes"]) == document.MOST_LANES + 1 and told["timeline"]["more"] == 28
    assert sum(len(lane["spans"]) for lane in told["timeline"]["lanes"]) <= document.MOST_SPANS
    assert len(json.dumps(told.pop("curves"), separators=(",", ":"))) < MOST_BYTES
    assert len(json.dumps(told, separators=(",", ":"))) < MOST_BYTES


def test_clusters_that_are_not_drawn_take_no_room_on_the_timeline() -> None:
    """With a hundred clusters their bars, of which a dozen's are drawn, left none of the last rounds'."""
    memory = PageMemory()
    for n in range(8):
        memory.spans.add_span(Span("", SpanKind.WINDOW, 990.0 + n, 991.0 + n, f"r{n}"))
        for k in range(100):
            memory.spans.add_span(Span(f"c{k:02}", SpanKind.PUSH, 990.0 + n, 991.0 + n, ""))
    timeline = state(make_run(), memory)["timeline"]
    assert [len(lane["spans"]) for lane in timeline["lanes"]] == [8] * (1 + document.MOST_LANES)
    assert timeline["more"] == 88


def test_hostile_text_stays_text_of_one_line() -> None:
    """Markup is passed on as the characters that it is; control and direction characters are not."""
    hostile = "\x1b[2J\u202egone\n" + "y" * 999
    told = make_run(
        {
            "west": make_cluster(
                cause="skipped", reason="<script>alert(1)</script>", remarks={"script": hostile}, lines=(hostile,)
            )
        }
    )
    [row] = state(told)["clusters"]["rows"]
    assert row["why"] == "<script>alert(1)</script>"
    for shown in (row["remarks"][0], row["lines"][0]):
        assert shown.startswith(" [2J gone y") and len(shown) == MOST_CHARS
    assert clean_text("a\u2028b\x00c\u200fd") == "a b c d" and clean_text("θ′ – ok") == "θ′ – ok"


def test_numbers_that_json_does_not_know_are_null() -> None:
    told = make_run({"west": make_cluster(loss=float("nan"), pace_s=float("inf"), tokens_accepted=2**70)})
    [row] = state(told)["clusters"]["rows"]
    assert (row["loss"], row["pace_s"], row["tokens_accepted"]) == (None, None, 2**70)


def test_numbers_that_a_browser_cannot_draw_are_null() -> None:
    """A loss near the largest double left the plot without ticks: over tokens the browser's tab hung for good."""
    rows = state(make_run({str(loss): make_cluster(loss=loss) for loss in (1.7e308, -1.7e308, 9e299)}))["clusters"]
    assert [row["loss"] for row in rows["rows"]] == [None, None, 9e299]


def test_rates_of_a_slave_come_from_its_heartbeats() -> None:
    """From the second on; a new process counts from 0 again."""
    rates = SlaveRates()

    def measure(heard_s: float, bytes_in: int, bytes_out: int, now: float) -> dict[str, tuple[float, float]]:
        return rates.measure_rates({"ps0": make_slave(heard_s=heard_s, bytes_in=bytes_in, bytes_out=bytes_out)}, now)

    assert measure(0.5, 1000, 0, 10.5) == {}
    assert measure(1.5, 1000, 0, 11.5) == {}
    assert measure(0.5, 5000, 8, 12.5)["ps0"] == (2000, 4)
    assert measure(0.5, 5000, 16, 14.5)["ps0"] == (1000, 4), "it only sends"
    assert measure(0.5, 9000, 16, 18.5)["ps0"] == (1000, 2), "it only receives"
    assert measure(0.5, 7, 32, 20.5) == {}
    assert measure(0.5, 14, 3, 22.5) == {}
    assert measure(0.5, 14, 3, 23.5)["ps0"] == (0, 0)


def test_refusals_are_told_by_reason() -> None:
    """The most frequent first, and only so many."""
    made = state(make_run(), refusals={f"reason{i}": i for i in range(100)})
    assert made["refusals"][:2] == [["reason99", 99], ["reason98", 98]]
    assert len(made["refusals"]) == document.MOST_REASONS
    assert state(make_run())["refusals"] == []


def test_a_run_in_which_nobody_trains_is_not_said_to_go_on() -> None:
    """A trainer that hangs, alone: the sign stays, the sentence does not say that training goes on."""
    hangs = make_cluster("idle", "stalled", "its trainer hangs: no inner step seen for 120 s")
    assert state(make_run({"west": hangs}))["health"]["title"] == "No cluster trains; one thing needs a look"
    both = state(make_run({"west": hangs, "east": make_cluster()}))
    assert both["health"]["title"] == "Training goes on; one thing needs a look"


def test_what_no_event_ended_ends_when_its_cluster_does_something_else() -> None:
    """A pull past its deadline: once the cluster trains, its bar grows no longer."""
    told = [make_run({"west": make_cluster("pulling", "pulls")}), make_run({"west": make_cluster()})]
    page, runtime = MasterPage({}), SimpleNamespace(build_view=lambda: told.pop(0))
    page.watch_steps(lambda event, now: [])(PullRequested(1, PullId("west", 1, 1), 2), 0.0)
    shown = []
    for _ in range(2):
        lanes = page.read_state(runtime)["timeline"]["lanes"]  # type: ignore[arg-type]
        shown += [(kind, end is None) for lane in lanes if lane["name"] == "west" for kind, _, end, *_ in lane["spans"]]
    assert shown == [("pull", True), ("pull", False)]


async def test_what_a_busy_loop_could_not_answer_in_time_is_not_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers ask every other second: a loop that was held up would build one document for each of them."""
    read = list[RunView]()
    routes = list[Callable[[], Mapping[str, Any]]]()
    monkeypatch.setattr("dips.view.page.routes.page_routes", lambda ask: routes.append(ask) or [])
    monkeypatch.setattr("dips.master.page.READ_S", 0.01)
    runtime: Any = SimpleNamespace(build_view=lambda: read.append(make_run()) or read[-1])
    MasterPage({}).make_routes(runtime)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(routes[0])
        assert isinstance(asked.exception(), UnavailableMaster)  # it waits here, on the loop
        await asyncio.sleep(0.01)
        assert read == []
        answered = await asyncio.wrap_future(pool.submit(routes[0]))
    assert answered["health"] and len(read) == 1


def test_the_foot_names_the_standby_and_what_an_upgrade_waits_for() -> None:
    """As `dips status` does; nothing where there is neither."""
    lease = LeaseView("a", True, 1.2, standbys=(StandbyView("b", True),))
    told = make_run(lease=lease, protocol=1, protocol_newest=2, holdouts=("standby b",))
    assert state(told)["lines"] == [
        "a, lease 1 s old; standby: b ready",
        "speaks 1, can speak 2: waits for standby b",
    ]
    assert state(make_run())["lines"] == []

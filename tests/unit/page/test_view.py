"""The document of `/api/state`: one word for the whole run, bounded lists, and text that stays text."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from dips.ids import PullId
from dips.master.page import MasterPage
from dips.page import peers, view
from dips.page.memory import LastOutcome, PageMemory, RoundMemory
from dips.page.rates import SeenTransfer, SeenTransfers, SlaveRates
from dips.page.spans import Span, SpanKind
from dips.page.text import MOST_CHARS, clean_text
from dips.protocol.events import PullRequested

HEARTBEAT_S = 2.0
MOST_BYTES = 256 << 10  # of any document


def cluster(**fields: Any) -> dict[str, Any]:
    return {"state": "training", "reason": "training", "heard_s": 0.5, "trainer": "training", **fields}


def slave(**fields: Any) -> dict[str, Any]:
    return {"state": "ready", "reason": "serves v3@r3", "heard_s": 0.5, **fields}


def status(
    clusters: dict[str, Any] | None = None, slaves: dict[str, Any] | None = None, **fields: Any
) -> dict[str, Any]:
    return {
        "run": "demo", "term": 1, "uptime_s": 100.0, "head": "v3@r3", "finished": None,
        "progress": {"tokens": 10, "tokens_target": 100},
        "round": {"state": "idle", "round": None, "reason": "waits for the first push", "pushes": []},
        "clusters": {"west": cluster()} if clusters is None else clusters,
        "slaves": {"ps0": slave()} if slaves is None else slaves,
        **fields,
    }  # fmt: skip


def state(
    told: dict[str, Any], memory: PageMemory | None = None, seen: dict[tuple[str, str], SeenTransfer] | None = None
) -> dict[str, Any]:
    made = view.make_state(
        told, memory or PageMemory(), rates={}, seen=seen or {}, heartbeat_s=HEARTBEAT_S, wall=1000.0
    )
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    return made


def level(told: dict[str, Any], memory: PageMemory | None = None) -> str:
    return str(state(told, memory)["health"]["level"])


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (status(), "well"),
        (status(clusters={}), "waiting"),
        (status(finished="v3@r3", clusters={"west": cluster(state="gone", reason="left")}), "finished"),
        (status(clusters={"west": cluster(state="gone", reason="left"), "east": cluster()}), "well"),
        (status(clusters={"west": cluster(state="gone", reason="silent for 10.1 s"), "east": cluster()}), "attention"),
        (status(clusters={"west": cluster(heard_s=4.1)}), "attention"),
        (status(clusters={"west": cluster(quarantined=True)}), "attention"),
        (status(clusters={"west": cluster(state="idle", reason="its trainer hangs")}), "attention"),
        (status(clusters={"west": cluster(state="idle", trainer="starting")}), "well"),
        (status(clusters={"west": cluster(trainer="dead", note="crashing, 1 of 3")}), "attention"),
        (status(slaves={"ps0": slave(), "ps1": slave(state="lost", reason="silent")}), "broken"),
        (status(slaves={"ps0": slave(state="restoring", reason="reads v3@r3")}), "broken"),
        (status(slaves={"ps0": slave(mirror={"failing": True, "reason": "full"})}), "attention"),
        (status(durability={"red": True, "state": "degraded", "reason": "disk full"}), "attention"),
        (status(durability={"red": True, "state": "stopped", "reason": "disk full"}), "broken"),
        (status(ledger_mirror={"red": True, "reason": "slow"}), "attention"),
        (status(journal={"writing": 0}), "attention"),
    ],
)
def test_one_word_says_whether_all_is_well(told: dict[str, Any], expected: str) -> None:
    """Broken: no version can be made; attention: it goes on, and something needs a look."""
    assert level(told) == expected


def test_who_was_gated_last_asks_for_a_look_until_a_push_counts_again() -> None:
    memory = PageMemory()
    memory.outcomes["west"] = LastOutcome("gated", "norm 9 above 3", 7, 990.0)
    [row] = state(status(), memory)["clusters"]["rows"]
    assert (row["word"], row["gravity"]) == ("training", "attention") and "norm 9 above 3" in row["why"]
    memory.outcomes["west"] = LastOutcome("accepted", "", 8, 999.0)
    assert level(status(), memory) == "well"


def test_who_always_was_different_is_flagged_and_asks_for_no_look() -> None:
    """Sentences with numbers under its state; no gate keeps it out, so all is well."""
    told = status(clusters={"west": cluster(differs={"loss": "its loss is\x1busually +30 %"}), "east": cluster()})
    east, west = state(told)["clusters"]["rows"]
    assert (west["flags"], west["gravity"]) == (["flagged, not gated: its loss is usually +30 %"], "good")
    assert east["flags"] == [] and level(told) == "well"


def test_a_head_that_is_late_asks_for_a_look() -> None:
    """Later than five times the usual, and than a minute."""
    memory = PageMemory()
    memory.rounds.extend(
        RoundMemory(n, "applied", f"v{n}@r{n}", "", n * 20.0, n * 20.0 + 1, {}, ()) for n in range(1, 6)
    )
    memory.head_at = 1000.0 - 99
    assert level(status(), memory) == "well"
    memory.head_at = 1000.0 - 101
    told = state(status(), memory)["health"]
    assert told["level"] == "attention" and told["concerns"][0]["what"] == (
        "no new version for 101 s; usually it takes 20 s"
    )


def test_a_thousand_peers_are_bounded_and_those_that_ask_for_a_look_are_listed() -> None:
    clusters = {f"c{n:04}": cluster(tokens_accepted=10, note="n" * 5000, reason="r" * 5000) for n in range(1000)}
    clusters["c0999"] = cluster(heard_s=60.0)
    slaves = {f"s{n:04}": slave(reason="r" * 5000) for n in range(1000)}
    memory = PageMemory()
    for n in range(2000):
        memory.curves.add_version(n * 1000, float(n), [(f"c{k:04}", 10, 3.14159 + n) for k in range(20)])
        memory.spans.add_span(Span(f"c{n % 40:04}", SpanKind.PUSH, 999.0, 999.5, "x" * 9))
    seen = {(f"c{n:04}", f"s{k:04}"): SeenTransfer(True, 1e6) for n in range(80) for k in range(100)}
    told = state(status(clusters, slaves), memory, seen)
    rows = told["clusters"]["rows"]
    assert len(rows) == peers.MOST_CLUSTERS and rows[-1]["name"] == "c0999" and rows[-1]["word"] == "silent"
    assert told["clusters"]["rest"] == {"count": 952, "tokens": 9520}
    assert told["slaves"]["rest"] == {"count": 952}
    assert len(told["timeline"]["lanes"]) == view.MOST_LANES + 1 and told["timeline"]["more"] == 28
    assert sum(len(lane["spans"]) for lane in told["timeline"]["lanes"]) <= view.MOST_SPANS
    assert len(json.dumps(told)) < MOST_BYTES


def test_hostile_text_stays_text_of_one_line() -> None:
    """Markup is passed on as the characters that it is; control and direction characters are not."""
    told = status(
        clusters={"west": cluster(reason="<script>alert(1)</script>", note="\x1b[2J\u202egone\n" + "y" * 999)}
    )
    [row] = state(told)["clusters"]["rows"]
    assert row["why"] == "<script>alert(1)</script>"
    assert row["note"].startswith(" [2J gone y") and len(row["note"]) == MOST_CHARS
    assert clean_text("a\u2028b\x00c\u200fd") == "a b c d" and clean_text("θ′ – ok") == "θ′ – ok"


def test_numbers_that_json_does_not_know_are_null() -> None:
    told = status(clusters={"west": cluster(loss=float("nan"), pace_s=float("inf"), tokens_accepted=2**70)})
    [row] = state(told)["clusters"]["rows"]
    assert (row["loss"], row["pace_s"], row["tokens"]) == (None, None, 2**70)


def test_rates_of_a_slave_come_from_its_heartbeats() -> None:
    """From the second on; a new process counts from 0 again."""
    rates = SlaveRates()
    assert rates.measure_rates({"ps0": {"heard_s": 0.5, "bytes_in": 1000, "bytes_out": 0}}, 10.5) == {}
    assert rates.measure_rates({"ps0": {"heard_s": 1.5, "bytes_in": 1000, "bytes_out": 0}}, 11.5) == {}
    assert rates.measure_rates({"ps0": {"heard_s": 0.5, "bytes_in": 5000, "bytes_out": 8}}, 12.5)["ps0"] == (2000, 4)
    assert rates.measure_rates({"ps0": {"heard_s": 0.5, "bytes_in": 7, "bytes_out": 0}}, 14.5) == {}


def test_a_link_keeps_the_rate_that_was_seen_last() -> None:
    seen = SeenTransfers()
    moving = {"cluster": "west", "push": True, "bytes_per_s": 5.0}
    slaves: dict[str, Any] = {"ps0": {"transfers": [moving, {**moving, "cluster": "nobody"}]}}
    assert seen.note_transfers(slaves, {"west": {}}) == {("west", "ps0"): (True, 5.0)}
    assert seen.note_transfers({"ps0": {"transfers": []}}, {"west": {}}) == {("west", "ps0"): (True, 5.0)}
    [row] = state(status(), seen={("west", "ps0"): SeenTransfer(True, 5.0)})["links"]["rows"]
    assert row["ends"] == [{"slave": "ps0", "way": "push", "rate": 5.0}] and row["way"] is None
    assert seen.note_transfers({}, {"west": {}}) == {}


def test_refusals_are_told_by_reason() -> None:
    """The most frequent first, and only so many."""
    many = {f"reason{i}": i for i in range(100)}
    made = view.make_state(
        status(), PageMemory(), rates={}, seen={}, heartbeat_s=HEARTBEAT_S, wall=1000.0, refusals=many
    )
    assert made["refusals"][:2] == [["reason99", 99], ["reason98", 98]] and len(made["refusals"]) == view.MOST_REASONS
    assert state(status())["refusals"] == []


def test_a_run_in_which_nobody_trains_is_not_said_to_go_on() -> None:
    """A trainer that hangs, alone: the sign stays, the sentence does not say that training goes on."""
    hangs = cluster(state="idle", reason="its trainer hangs: no inner step seen for 120 s", trainer="hangs")
    assert state(status(clusters={"west": hangs}))["health"]["title"] == "No cluster trains; one thing needs a look"
    both = state(status(clusters={"west": hangs, "east": cluster()}))
    assert both["health"]["title"] == "Training goes on; one thing needs a look"


def test_what_no_event_ended_ends_when_its_cluster_does_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull past its deadline: once the cluster trains, its bar grows no longer."""
    told = status(clusters={"west": cluster(state="pulling")})
    monkeypatch.setattr("dips.master.page.build_status", lambda *_: told)
    page, runtime = MasterPage(HEARTBEAT_S), SimpleNamespace(build_view=dict, heartbeats={})
    page.watch_steps(lambda event, now: [])(PullRequested(1, PullId("west", 1, 1), 2), 0.0)

    def shown() -> list[Any]:
        (lane,) = [lane for lane in page.read_state(runtime)["timeline"]["lanes"] if lane["name"] == "west"]  # type: ignore[arg-type]
        return [(kind, end is None) for kind, _, end, *_ in lane["spans"]]

    assert shown() == [("pull", True)]
    told["clusters"]["west"] = cluster()
    assert shown() == [("pull", False)]

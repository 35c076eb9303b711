"""`dips status`, `--watch` and `dips history` in a terminal of 80 × 24, with four clusters and four slaves."""

from __future__ import annotations

import io
from dataclasses import replace
from math import nan
from typing import Any

from rich.console import Console, RenderableType

from dips.commands.history import draw_rounds
from dips.protocol.enums import RoundState
from dips.protocol.options import Targets
from dips.protocol.view import (
    ClusterView,
    LeaseView,
    MetView,
    MirrorView,
    NewestView,
    ProgressView,
    RangesView,
    RoundCounts,
    RoundView,
    SlaveView,
    StandbyView,
)
from dips.view.terminal import FittedStatus, _state_text, format_count, render_status
from tests.unit.view.views import make_cluster, make_run, make_slave


def cluster(state: str, cause: str, reason: str, **more: Any) -> ClusterView:
    numbers = {"accepted": 40, "skipped": 1, "staleness": 0, "base": "v41@r43", "tokens_accepted": 52_000_000}
    told = {"last_push_steps": 64, "inner_steps": 2624, "loss": 2.5, "bytes_per_s": 2.5e7}
    return make_cluster(state, cause, reason, **(numbers | told | more))


def slave(state: str, cause: str, reason: str, **more: Any) -> SlaveView:
    pool = {"pool_used": 1_200_000_000, "pool_limit": 2_400_000_000, "persist_s": 1.25}
    moved = {"bytes_in": 91_000_000_000, "bytes_out": 88_000_000_000}
    numbers = {"version": "v41@r43", "slots": 2, "slots_used": 1} | pool | moved | more
    return make_slave(state, cause, reason, **numbers)


CRASH = "crashing, 4 of 10, exit 1, last line: ValueError: no such file: corpus/ranges/0007.bin"
STATUS = make_run(
    run="llama-1b",
    term=2,
    head="v41@r43",
    progress=ProgressView(208_000_000, 1_000_000_000),
    rounds=RoundCounts(41, 0, 2),
    met=MetView(17, 20),
    round=RoundView(RoundState.COLLECTING, 44, "1 committed, closes in 0.4 s"),
    ranges=RangesView(4096, free=3276, leased=8, settled=812),
    clusters={
        "berlin": cluster("training", "trains", "trains on v41@r43"),
        "oslo": cluster("idle", "stalled", "its trainer died", trainer="dead", remarks={"crash": CRASH}, loss=nan),
        "tokyo": cluster("committed", "committed", "its push is committed", staleness=2, base="v39@r41"),
        "zurich": cluster("gone", "gave_up", "crashed too often: 11 times, max_restarts is 10 in 86400 s: exit 1"),
    },
    slaves={
        "ps0": slave("ready", "serves", "serves v41@r43"),
        "ps1": slave("ready", "serves", "serves v41@r43", mirror=MirrorView()),
        "ps2": slave("lost", "silent", "silent for 10.2 s", version=None),
        "ps3": slave("ready", "serves", "serves v41@r43"),
    },
)

SHOT = """\
llama-1b  head v41@r43  term 2  208.00M tokens (21%)
rounds: 41 applied, 0 unchanged, 2 skipped; 17 of the last 20 with all clusters
round: r44 collecting: 1 committed, closes in 0.4 s
data: 812 settled, 8 leased, 3276 free of 4096 ranges
clusters
cluster  state       loss  tokens     base  stale  acc/gate/skip  H/steps  MB/s
berlin   training   2.500  52.00M  v41@r43      0         40/0/1  64/2624  25.0
oslo     crashing       –  52.00M  v41@r43      0         40/0/1  64/2624  25.0
  crashing, 4 of 10, exit 1, last line: ValueError: no such file:
  corpus/ranges/0007.bin
tokyo    committed  2.500  52.00M  v39@r41      2         40/0/1  64/2624  25.0
zurich   gone       2.500  52.00M  v41@r43      0         40/0/1  64/2624  25.0
  crashed too often: 11 times, max_restarts is 10 in 86400 s: exit 1
slaves
slave  state  version  slots  mirror    pool MB  persist s  in MB  out MB
ps0    ready  v41@r43    1/2    none  1200/2400       1.25  91000   88000
ps1    ready  v41@r43    1/2      ok  1200/2400       1.25  91000   88000
ps2    lost         –    1/2    none  1200/2400       1.25  91000   88000
  silent for 10.2 s
ps3    ready  v41@r43    1/2    none  1200/2400       1.25  91000   88000
"""


def drawn(what: RenderableType, height: int = 24) -> str:
    out = io.StringIO()
    Console(file=out, width=80, height=height).print(what)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def test_the_page_is_named() -> None:
    """Where the master has an HTTP port; otherwise nothing is said."""
    assert "page: https://10.0.0.5:9400/" in drawn(render_status(replace(STATUS, page="https://10.0.0.5:9400/")))
    assert "page:" not in drawn(render_status(STATUS))


def test_the_master_and_its_standby_are_named() -> None:
    """Which one serves, how old its lease is, and who would take over; nothing where there is no standby."""
    lease = LeaseView("a", True, 1.2, standbys=(StandbyView("b", True), StandbyView("c", False, "no store")))
    assert "master: a, lease 1 s old; standby: b ready, c not ready" in drawn(
        render_status(replace(STATUS, lease=lease))
    )
    forbidden = replace(lease, claimable=False, standbys=lease.standbys[:1])
    assert "standby: b not ready" in drawn(render_status(replace(STATUS, lease=forbidden)))
    assert "standby" not in drawn(render_status(replace(STATUS, lease=replace(lease, standbys=()))))


def test_what_was_changed_while_it_runs_is_named() -> None:
    """Options that differ from the run file, and a protocol that is not the newest of all."""
    tuned = drawn(render_status(replace(STATUS, tuned={"penalty.alpha": 0.5, "outer.clip.norm": None})))
    assert "tuned: penalty.alpha 0.5, outer.clip.norm off" in tuned
    assert "tuned:" not in drawn(render_status(STATUS))
    older = drawn(render_status(replace(STATUS, protocol=1, protocol_newest=2)))
    assert "protocol: speaks 1, can speak 2: dips finalise" in older


def test_status_in_80_columns() -> None:
    """A line for each cluster and slave, and one more where the reason says more than the state; no word is cut."""
    assert drawn(render_status(STATUS)) == SHOT


def test_watch_fits_and_says_how_many_more() -> None:
    """In 18 lines those with something to say come first; the others are counted."""
    text = drawn(FittedStatus(STATUS), height=18)
    print(text)
    assert len(text.splitlines()) <= 17
    assert "oslo" in text and "ps2" in text and text.count("more") == 2
    assert drawn(FittedStatus(STATUS)) == SHOT
    assert drawn(FittedStatus(STATUS), height=SHOT.count("\n") + 1) == SHOT, "each line but the last is used"


def test_clusters_that_cannot_meet_are_named() -> None:
    """Windows that heartbeats cannot steer are said, and nothing is said where there is nothing to meet."""
    warning = "windows every 1.4 s are too short"
    assert f"pace: {warning}" in drawn(render_status(replace(STATUS, pace_warning=warning)))
    one = STATUS.clusters["berlin"]
    for alone in ({"berlin": one}, {"berlin": one, "ada.operator": replace(one, reads=True)}):
        assert "all clusters" not in drawn(render_status(replace(STATUS, clusters=alone)))
    two = replace(STATUS, clusters={name: STATUS.clusters[name] for name in ("berlin", "tokyo")})
    assert "17 of the last 20 with all clusters" in drawn(render_status(two))
    assert "all clusters" not in drawn(render_status(replace(two, met=MetView())))


def test_counts_are_short() -> None:
    """From each unit on in the unit."""
    counts = (None, 0, 9_999, 10_000, 999_999, 1_000_000, 999_999_999, 1_000_000_000)
    assert [format_count(n) for n in counts] == ["–", "0", "9999", "10k", "1000k", "1.00M", "1000.00M", "1.00G"]


def test_a_state_has_its_colour() -> None:
    """By how grave it is; of what is good, what moves is told from what computes."""
    clusters = {
        "cyan": make_cluster("pushing", "pushes"), "green": make_cluster(), "yellow": make_cluster(heard_s=9.0),
        "": make_cluster("gone", "left"),
    }  # fmt: skip
    for style, judged in make_run(clusters, {}).clusters.items():
        assert _state_text(judged).style == style
    gated = make_run({"a": make_cluster("pushing", "pushes", gated="norm 9")}).clusters["a"]
    assert (gated.word, _state_text(gated).style) == ("pushing", "yellow")
    assert _state_text(make_run(slaves={"a": make_slave("lost", "silent")}).slaves["a"]).style == "red"


def test_a_cluster_that_said_goodbye_is_not_called_gone() -> None:
    text = drawn(render_status(make_run(clusters={"berlin": cluster("gone", "left", "left")})))
    assert "berlin   left " in text and "gone" not in text


def test_history_in_80_columns() -> None:
    assert drawn(draw_rounds(ROUNDS)) == HISTORY


def test_a_finished_run_shows_its_last_loss() -> None:
    text = drawn(render_status(replace(STATUS, finished="v41@r43", newest=NewestView(loss=2.3456))))
    assert "finished at v41@r43, last loss 2.346" in text.splitlines(), "a line of its own, not wrapped at 80 columns"
    assert "finished at v41@r43, last loss –" in drawn(render_status(replace(STATUS, finished="v41@r43")))


def round_(number: int, **more: Any) -> dict[str, Any]:
    made = {"version": f"v{number - 2}@r{number}", "parent": f"v{number - 3}@r{number - 1}", "tokens": 5_200_000}
    blank = {"kind": "applied", "reason": "", "delta_norm": 0.0123, "clipped": False, "durable": True, "undone": None}
    return {"round": number, "ended": 1e9 + 75.4 * number, "folds": [], "outcomes": [], **made, **blank, **more}


def fold(base: int, loss: float | None, tokens: int = 1_300_000) -> dict[str, Any]:
    return {"base": {"version": base, "round": base + 2}, "loss": loss, "tokens": tokens}


def outcome(name: str, kind: str = "accepted", reason: str = "") -> dict[str, Any]:
    return {"push": {"cluster": name}, "kind": kind, "reason": reason, "ranges": ()}


NOTHING = {"version": None, "parent": None, "tokens": 0, "delta_norm": 0.0}
ROUNDS = [
    round_(40, folds=[fold(37, 2.625), fold(37, 2.375)], outcomes=[outcome("berlin"), outcome("oslo")]),
    round_(
        41,
        folds=[fold(36, 2.5)],
        outcomes=[outcome("tokyo"), outcome("zurich", "gated", "norm 9 above the hard cap 2")],
    ),
    round_(
        42,
        kind="skipped",
        reason="ps2 was lost: silent for 10.2 s",
        outcomes=[outcome("berlin", "skipped", "x")],
        **NOTHING,
    ),
    round_(43, parent="v39@r41", version="v40@r43", folds=[fold(39, None)], outcomes=[outcome("berlin")]),
    {
        "kind": "extended",
        "version": "v40@r43",
        "said": Targets(tokens=2_000_000_000, versions=500, epochs=2).describe(),
    },
    round_(44, parent="v40@r43", version="v41@r44", folds=[fold(40, 2.25)], outcomes=[outcome("berlin")]),
]

HISTORY = """\
rounds
round  ended     version   loss  tokens  seconds  stale     ‖δ‖
r40    applied   v38@r40  2.500   5.20M        –      0  0.0123
  parent: v37@r39
  from: berlin, oslo
r41    applied   v39@r41  2.500   5.20M       75      2  0.0123
  from: tokyo, zurich (gated: norm 9 above the hard cap 2)
r42    skipped   –            –       0       75      –       –
  from: berlin (skipped: x)
  skipped: ps2 was lost: silent for 10.2 s
r43    applied   v40@r43      –   5.20M       75      0  0.0123
  parent: v39@r41
  from: berlin
–      extended  –            –       –        –      –       –
  until 2,000,000,000 tokens or 500 versions or 2 epochs of its data; it was
  finished at v40@r43 and goes on
r44    applied   v41@r44  2.250   5.20M       75      0  0.0123
  from: berlin
"""

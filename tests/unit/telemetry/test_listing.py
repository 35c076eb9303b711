"""What people read in a terminal of 80 columns: `dips status` and `dips history`, with nothing cut off."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from dips.commands.history import draw_rounds, shorten_ranges
from dips.protocol.enums import DurabilityState, RoundState
from dips.protocol.view import DurabilityView, ProgressView, RangesView, RoundCounts, RoundView, VersionProcessView
from dips.telemetry.listing import Column, Listing, ListingRow
from dips.view.terminal import NONE, render_status
from tests.unit.view.views import make_cluster, make_run, make_slave

NO_SPACE = "parameter-server-frankfurt-0 refused: FailedDisk: /var/lib/dips/snapshots: No space left on device"
FAILED_EVAL = "exit code 1: CUDA out of memory"
WAITS = "2 committed, closes in 13.2 s, not before v1203@r1250 is on every disk"
STATUS = make_run(
    run="llama-8b-europe",
    term=3,
    head="v1203@r1250",
    progress=ProgressView(812_000_000_000, 2_000_000_000_000),
    rounds=RoundCounts(1203, 12, 35),
    round=RoundView(RoundState.COLLECTING, 1251, WAITS),
    ranges=RangesView(120_000, free=59_865, leased=12, settled=60_123),
    durability=DurabilityView(state=DurabilityState.DEGRADED, reason=NO_SPACE),
    on_version=VersionProcessView(version="v1200@r1247", red=True, reason=FAILED_EVAL),
    clusters={
        "berlin-h100-west": make_cluster(
            reason="trains on v1203@r1250", base="v1203@r1250", staleness=0, inner_steps=123_456,
            tokens_accepted=412_000_000_000, loss=2.3456, bytes_per_s=1.25e9, accepted=1190, skipped=35,
        ),
        "tokyo": make_cluster("gone", "silent", "silent for 30.0 s, its lease ran out", quarantined=True),
    },
    slaves={
        "parameter-server-frankfurt-0": make_slave(
            reason="serves v1203@r1250", version="v1203@r1250", slots=4, slots_used=2, pool_used=32 * 10**9,
            pool_limit=128 * 10**9, bytes_in=91 * 10**11, bytes_out=89 * 10**11, persist_s=12.34,
        ),
        "ps1": make_slave("awaited", "unregistered", "not registered since this master started", slots=4),
    },
)  # fmt: skip
STATUS_WORDS = (  # also where some columns have no room
    *(
        "llama-8b-europe",
        "1203 applied, 12 unchanged, 35 skipped",
        WAITS,
        NO_SPACE,
        FAILED_EVAL,
        "in a wider terminal, or with --json:",
    ),
    *("berlin-h100-west", "training", "412.00G", "2.346", "v1203@r1250", "tokyo", "gone"),
    "quarantined by the gate until `dips cluster readmit`; silent for 30.0 s, its lease ran out",
    *("parameter-server-frankfurt-0", "awaited", "not registered since this master started", "2/4"),
)

HEARD = [  # of one cluster no loss was told
    {"tokens": 100, "loss": 0.5, "base": {"version": 1201}},
    {"tokens": 900, "loss": None, "base": {"version": 1202}},
    {"tokens": 300, "loss": 0.3, "base": {"version": 1200}},
]
SCORE = "its score 7.31 is above 3.00 after 40 rounds"
UNDONE = "rolled back to v1202@r1249: no slave but parameter-server-frankfurt-0 offers v1203@r1250"


def outcome(cluster: str, kind: str = "accepted", reason: str = "", ranges: tuple[int, ...] = ()) -> dict[str, Any]:
    return {"push": {"cluster": cluster, "inc": 1, "seq": 4}, "kind": kind, "reason": reason, "ranges": ranges}


def round_(number: int, kind: str, **others: Any) -> dict[str, Any]:
    blank = {"version": None, "parent": None, "tokens": 0, "delta_norm": 0.0, "clipped": False, "reason": ""}
    return {"round": number, "kind": kind, **blank, "undone": "", "durable": True, "outcomes": [], **others}


MADE = {"version": "v1203@r1250", "parent": "v1202@r1249", "tokens": 812_000_000, "delta_norm": 0.01234}
ROUNDS = [
    round_(
        1250,
        "applied",
        **MADE,
        clipped=True,
        outcomes=[
            outcome("berlin-h100-west", ranges=(60_001, 60_002, 60_007, 60_013, 60_019)),
            outcome("tokyo-a100-campus", "gated", SCORE, (60_005,)),
        ],
    ),
    round_(1251, "skipped", reason=NO_SPACE, outcomes=[outcome("berlin-h100-west", "skipped", NO_SPACE)]),
    round_(1252, "unchanged", reason="all contributions were gated", outcomes=[outcome("tokyo", "gated", SCORE)]),
    round_(1253, "applied", **MADE, undone=UNDONE, durable=False, outcomes=[outcome("berlin-h100-west")]),
    round_(1254, "applied", **MADE, durable=False, outcomes=[outcome("berlin-h100-west")]),
    round_(1255, "unfinished"),
    round_(1256, "applied", **MADE, folds=HEARD, ended=1100.0),
    round_(1257, "applied", **MADE, folds=HEARD[1:2], ended=1109.0),
    round_(1258, "recovered", version="v1204@r1258", parent="v1203@r1250", recovered="from saved.safetensors"),
]
ROUNDS_WORDS = (
    *("r1250", "applied", "v1203@r1250", "parent: v1202@r1249", "812.00M", "0.0123 clipped", "unchanged", "unfinished"),
    *("berlin-h100-west, tokyo-a100-campus (gated: " + SCORE + ")", "60001–60002 60005 60007 60013 60019"),
    *("skipped: " + NO_SPACE, "undone: " + UNDONE, "applied: not durable", "unchanged: all contributions were gated"),
)


def drawn(what: RenderableType, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue()


@pytest.mark.parametrize("width", [72, 80, 100, 160])
@pytest.mark.parametrize(
    ("what", "words"),
    [(render_status(STATUS), STATUS_WORDS), (draw_rounds(ROUNDS), ROUNDS_WORDS)],
    ids=["status", "history"],
)
def test_nothing_is_cut_off(what: RenderableType, words: tuple[str, ...], width: int) -> None:
    """Every name, state, number and reason is there in full; reasons may go over several lines."""
    text = drawn(what, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    if width == 160:
        words = tuple(word for word in words if "wider terminal" not in word)
    flat = " ".join(text.split())
    assert [word for word in words if word not in flat] == []


def test_a_round_is_told_by_its_pushes() -> None:
    """The loss is the mean by tokens of those that told one, staleness the oldest base's; seconds from the row above,
    if both ended. A version of a file says where it came from, and what has no parent above it names its own.
    """
    rows = draw_rounds(ROUNDS)._rows[-3:]
    assert [row.cells[3:7] for row in rows] == [
        ("0.350", "812.00M", NONE, "2"), (NONE, "812.00M", "9", "0"), (NONE, "0", NONE, NONE)
    ]  # fmt: skip
    notes = [[note for note in row.notes if note] for row in rows]
    assert notes == [["parent: v1202@r1249"], ["parent: v1202@r1249"], ["recovered: from saved.safetensors"]]
    tuned = {"kind": "tuned", "key": "outer.lr", "value": 0.5}
    apart = draw_rounds([ROUNDS[-3], tuned, ROUNDS[-2]])._rows
    assert apart[2].cells[5] == "9" and apart[1].notes == ("outer.lr = 0.5",), "what was set ends no round"
    (open_round,) = draw_rounds([round_(1259, "unfinished", durable=False)])._rows
    assert not any(open_round.notes), "it has no version that a disk could lack"


def test_what_has_no_room_stands_under_its_row() -> None:
    """The first columns stay beside each other, the last go under the row by their names."""
    columns = (Column("who", left=True), Column("first"), Column("second"))
    table = Listing("things", columns, [ListingRow(("ps1", "123456", "7"), ("why it is so",))])
    assert drawn(table, 30).splitlines() == ["things", "who   first  second", "ps1  123456       7", "  why it is so"]
    assert [line.rstrip() for line in drawn(table, 14).splitlines()] == [
        "things", "who   first", "ps1  123456", "  why it is so", "  second 7"
    ]  # fmt: skip


def test_a_table_says_what_a_wider_terminal_has_where_one_would_show_it() -> None:
    """And no sentence that ends in nothing; of a table without rows it has no more."""
    columns = (Column("who", left=True), Column("first"), Column("second"))
    table = Listing("things", columns, [ListingRow(("ps1", "123456", "7"))], strict=True)
    assert " ".join(drawn(table, 18).split()).endswith("123456 in a wider terminal, or with --json: second")
    assert drawn(table, 19).splitlines() == ["things", "who   first  second", "ps1  123456       7"]
    assert drawn(Listing("things", columns, [], strict=True), 14) == "things\n"


def test_columns_that_just_fit_stand_beside_each_other() -> None:
    """19 columns of a terminal are enough for them; in 18 the last goes under its row."""
    columns = (Column("who", left=True), Column("first"), Column("second"))
    table = Listing("things", columns, [ListingRow(("ps1", "123456", "7"))])
    assert [drawn(table, width).splitlines()[1] for width in (19, 18)] == ["who   first  second", "who   first"]


def test_no_line_ends_in_blanks() -> None:
    """What is copied from a terminal is the words alone, also where a last column of words is longer elsewhere."""
    rows = [ListingRow(("ps1", "serves")), ListingRow(("ps2", "restoring v3@r3"))]
    assert drawn(Listing("things", (Column("who", left=True), Column("state", left=True)), rows), 80).splitlines() == [
        "things", "who  state", "ps1  serves", "ps2  restoring v3@r3"
    ]  # fmt: skip


def test_a_name_longer_than_the_terminal_is_folded() -> None:
    """Not a letter of it is lost."""
    name = "parameter-server-" * 4
    assert name in drawn(Listing("slaves", (Column("slave", left=True),), [ListingRow((name,))]), 40).replace("\n", "")


def test_ranges_are_short() -> None:
    """Neighbours are named by their first and last; of very many the rest is counted."""
    assert shorten_ranges([5, 3, 4, 9]) == "3–5 9"
    assert shorten_ranges(range(0, 50, 2)).endswith("36 38 and 5 more")
    assert shorten_ranges(range(0, 40, 2)).endswith("36 38")

"""What the master shows beside its state: how long phases take, how old the newest version is."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from dips.ids import GENESIS, PushId, VersionId
from dips.master.meters import MOST_PUSHES, RoundMeters, find_newest, follow_newest
from dips.protocol.records import FoldRow, VersionCommitted, VersionDurable
from dips.protocol.view import NewestView
from dips.view.points import RoundHistory

V1, V2 = VersionId(1, 1), VersionId(2, 2)


def played(*notes: tuple[float, str, dict[str, str]]) -> RoundMeters:
    meters = RoundMeters()
    for now, kind, words in notes:
        meters.on_note(kind, words, now)
    return meters


def test_a_round_is_measured_by_phase() -> None:
    """Each phase lasts until the note that ends it; a round that breaks, or makes nothing, leaves no trace."""
    meters = played(
        (0.0, "round_opened", {}), (2.0, "round_applying", {}), (2.5, "round_persisting", {}),
        (6.5, "version_committed", {}),
        (10.0, "round_opened", {}), (11.0, "round_applying", {}), (99.0, "round_skipped", {}),
        (100.0, "round_opened", {}), (200.0, "round_unchanged", {}),
    )  # fmt: skip
    assert {name: phase.total for name, phase in meters.phases.items()} == {"window": 3.0, "apply": 0.5, "persist": 4.0}
    assert meters.phases["window"].list_buckets()[-1][1] == 2


def test_a_round_whose_row_comes_first_is_applied_and_not_persisted() -> None:
    """With `durability: async` the version is committed as soon as it is applied."""
    meters = played((0.0, "round_opened", {}), (2.0, "round_applying", {}), (2.5, "version_committed", {}))
    assert {name: phase.total for name, phase in meters.phases.items()} == {"window": 2.0, "apply": 0.5, "persist": 0.0}


def test_a_push_is_measured_from_its_grant_to_its_commit() -> None:
    """One that is dropped is not; what is granted and never heard of again is forgotten at last."""
    meters = played(
        (0.0, "push_granted", {"push": "a/1#1"}), (1.0, "push_granted", {"push": "b/1#1"}),
        (3.0, "push_committed", {"push": "a/1#1"}), (4.0, "push_dropped", {"push": "b/1#1"}),
        (5.0, "push_committed", {"push": "b/1#1"}),
    )  # fmt: skip
    assert meters.push.total == 3.0 and meters.push.list_buckets()[-1][1] == 1
    for number in range(MOST_PUSHES + 1):
        meters.on_note("push_granted", {"push": f"c/1#{number}"}, 6.0)
    meters.on_note("push_committed", {"push": "c/1#0"}, 7.0)
    assert meters.push.total == 3.0
    meters.on_note("push_committed", {"push": "c/1#1"}, 8.0)
    assert meters.push.total == 5.0


def committed(version: VersionId, durable: bool, *clusters: str) -> VersionCommitted:
    folds = tuple(FoldRow(PushId(c, 1, 1), V1, 10, 1, 1.0, 1.0, 0.0, 2.0, ()) for c in clusters)
    values: dict[str, Any] = dict.fromkeys((f.name for f in fields(VersionCommitted)), None)
    return VersionCommitted(**{**values, "version": version, "durable": durable, "folds": folds})


def test_the_newest_version_is_found_in_the_ledger() -> None:
    """One that was rolled back is none, nor is a round without one; the newest durable one may be older."""
    first, second = (committed(V1, True, "west"), committed(V2, False, "west", "east"))
    rounds = [
        RoundHistory(1, "applied", "", 0.0, 10.0, V1, GENESIS, 10, folds=first.folds, durable=True),
        RoundHistory(2, "applied", "", 10.0, 20.0, V2, V1, 20, folds=second.folds),
        RoundHistory(3, "applied", "", 20.0, 30.0, VersionId(3, 3), V2, 20, durable=True, undone="a disk was lost"),
        RoundHistory(4, "skipped", "", 30.0, 40.0, None, None, 0),
    ]
    assert find_newest(rounds) == NewestView(20.0, 10.0, 2, 2.0)
    assert find_newest([]) == NewestView()


def test_times_are_of_the_newest_version_and_of_the_newest_durable_one() -> None:
    """With snapshots that come later the two differ, until the newest is on the disks as well."""
    newest = follow_newest(NewestView(), [committed(V1, True, "west", "east", "west")], 100.0)
    assert newest == NewestView(100.0, 100.0, 2, 2.0)
    newest = follow_newest(newest, [committed(V2, False, "west")], 120.0)
    assert newest == NewestView(120.0, 100.0, 1, 2.0)
    assert follow_newest(newest, [VersionDurable(V2, (), 0.0)], 140.0).durable == 120.0

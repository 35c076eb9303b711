"""Who may still take part: the guard finds those that may no longer, each once, and tells whom it refused."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from dips.errors import Denied
from dips.identity.names import PeerRole
from dips.transport import gate
from dips.wire.generated import operator_pb2
from tests.guarded_master import GuardedMaster

DRAIN = "/dips.v1.OperatorService/Drain"


@pytest.fixture(name="story")
def made_story(tmp_path: Path) -> GuardedMaster:
    return GuardedMaster(tmp_path)


def test_a_cluster_that_is_taken_from_the_list_is_found_once(story: GuardedMaster) -> None:
    west, east = story.context("west"), story.context("east")
    story.join("west", west)
    story.join("east", east)
    assert story.guard.take_expelled() == []
    story.guard.change_clusters(("west",))
    ((name, reason),) = story.guard.take_expelled()
    assert name == "east" and "a name of the run file's list" in reason
    assert story.guard.take_expelled() == []
    with pytest.raises(Denied):
        story.join("east", east)
    story.guard.change_clusters(None)
    story.join("east", east)
    assert story.guard.take_expelled() == []


def test_a_revoked_certificate_is_found_and_a_new_one_counts(story: GuardedMaster) -> None:
    old = story.context("west")
    story.join("west", old)
    story.enrolled.authority.revoke("west.cluster")
    story.seconds = 2.0
    ((name, reason),) = story.guard.take_expelled()
    assert (name, "is revoked" in reason) == ("west", True)
    story.join("west", story.context("west"))
    assert story.guard.take_expelled() == [], "enrolled again"


def test_an_expired_certificate_is_found(story: GuardedMaster) -> None:
    story.join("west", story.context("west", days=1))
    story.wall += timedelta(days=2)
    assert "expired at" in story.guard.take_expelled()[0][1]


def test_a_certificate_is_valid_to_the_end_of_its_last_moment(story: GuardedMaster) -> None:
    """RFC 5280, 4.1.2.5: notAfter is included."""
    west = story.context("west", days=1)
    story.join("west", west)
    story.wall = story.guard.read_caller(west).until
    assert story.guard.take_expelled() == []
    story.wall += timedelta(microseconds=1)
    assert [name for name, _ in story.guard.take_expelled()] == ["west"]


def test_who_is_refused_is_told_with_the_reason(story: GuardedMaster) -> None:
    eve = story.context("eve", PeerRole.VIEWER)
    with pytest.raises(Denied):
        story.guard.check_call(DRAIN, operator_pb2.DrainAsked(slave="ps0"), eve)
    with pytest.raises(Denied):
        story.guard.check_call(DRAIN, operator_pb2.DrainAsked(slave="ps0"), {})
    assert [(who, method) for who, method, _ in story.refused] == [("eve.viewer", DRAIN), ("", DRAIN)]
    assert "got that of viewer 'eve'" in story.refused[0][2]
    assert story.guard.name_caller(eve) == "eve.viewer"
    assert story.guard.refused[DRAIN] == 2


def test_certificates_that_come_and_go_do_not_fill_the_memory(
    story: GuardedMaster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest is forgotten, and read again when it comes back."""
    monkeypatch.setattr(gate, "KEPT_CALLERS", 2)
    contexts = [story.context(name) for name in ("west", "east", "north")]
    for _ in range(2):
        for name, context in zip(("west", "east", "north"), contexts, strict=True):
            assert story.guard.name_caller(context) == f"{name}.cluster"
            assert len(story.guard._callers) <= 2

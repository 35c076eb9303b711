"""What a serving master looks at again: who may take part."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import structlog

from dips.config import RunFile
from dips.master.app import MasterReload
from dips.protocol.events import ClusterExpelled, Event, OperatorReported
from dips.wire.generated import operator_pb2
from tests.guarded_master import JOIN, GuardedMaster


class Inbox:
    """Of a runtime, all that hears of it."""

    def __init__(self) -> None:
        self.events = asyncio.Queue[Event]()

    def put_event(self, event: Event) -> None:
        self.events.put_nowait(event)


def reloading(story: GuardedMaster) -> tuple[MasterReload, Inbox]:
    """What a master looks at again, and the inbox of its runtime."""
    runtime: Any = Inbox()
    return MasterReload(story.guard, runtime, structlog.get_logger(), wall=lambda: 7.0), runtime


async def test_a_list_of_clusters_that_changes_expels_at_once_and_is_in_the_audit(tmp_path: Path) -> None:
    """Who is not on it any more goes, who is stays; another key that changes expels nobody."""
    story = GuardedMaster(tmp_path)
    for name in ("west", "east"):
        story.join(name, story.context(name))
    reload, runtime = reloading(story)
    config = RunFile.model_construct(clusters=("east",))
    reload.apply_changes(config, ["log_level"], "log_level: debug")
    reload.apply_changes(config, ["clusters"], "clusters: east")
    audit = [OperatorReported("run file", "reload", told, "done", False, 7.0)
             for told in ("log_level: debug", "clusters: east")]  # fmt: skip
    heard = [runtime.events.get_nowait() for _ in range(3)]
    assert [heard[0], heard[2]] == audit and runtime.events.empty()
    assert isinstance(heard[1], ClusterExpelled) and heard[1].cluster == "west"


def test_only_an_operators_refused_request_is_in_the_audit(tmp_path: Path) -> None:
    """With what was asked, and by whom as far as a certificate says."""
    reload, runtime = reloading(story := GuardedMaster(tmp_path))
    asked = operator_pb2.DrainAsked(slave="s0")
    assert story.guard.on_refused == reload.report_refusal
    reload.report_refusal("west (cluster)", JOIN, None, "revoked")
    reload.report_refusal("west (cluster)", "/dips.v1.OperatorService/Drain", asked, "no right")
    reload.report_refusal("", "/dips.v1.OperatorService/Drain", asked, "no certificate")
    heard = [runtime.events.get_nowait() for _ in range(2)]
    assert [event.caller for event in heard] == ["west (cluster)", "no certificate"] and runtime.events.empty()
    assert {(event.action, event.refused) for event in heard} == {("drain", True)}
    assert all("s0" in event.arguments for event in heard)


async def test_whose_certificate_is_revoked_is_expelled_without_a_call_or_a_file_that_changes(tmp_path: Path) -> None:
    """It may be waiting for a pull: it asks nothing that could be refused."""
    story, runtime = GuardedMaster(tmp_path), Inbox()
    story.join("west", story.context("west"))
    story.enrolled.authority.revoke("west.cluster")
    story.seconds = 2.0  # files are looked at once a second
    reload = MasterReload(story.guard, runtime, structlog.get_logger())
    looking = asyncio.create_task(reload.keep_expelling())
    try:
        event = await asyncio.wait_for(runtime.events.get(), 10)
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    assert isinstance(event, ClusterExpelled) and event.cluster == "west" and "is revoked" in event.reason

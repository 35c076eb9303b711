"""What a serving master looks at again: who may take part."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from dips.master.app import MasterReload
from dips.protocol.events import ClusterExpelled, Event
from tests.guarded_master import GuardedMaster


class Inbox:
    """Of a runtime, all that hears of it."""

    def __init__(self) -> None:
        self.events = asyncio.Queue[Event]()

    def put_event(self, event: Event) -> None:
        self.events.put_nowait(event)


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

"""The loop of `dips seed`: what it does with each answer of the master."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from dips.commands import operator
from dips.commands.seed_lanes import SeedTransfer, SeedWatch, _Moving
from dips.errors import ConfigError
from dips.ids import PushId, VersionId
from dips.protocol.effects import Grant, Refused, Result, SeedGranted
from dips.protocol.events import SeedAsked
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.transport.endpoints import Endpoint

LAYERS = Manifest((Layer("l", (Parameter("w", (4,)),)),))
BEGUN = Refused(0.0, "the run has begun")


def make_transfer(monkeypatch: pytest.MonkeyPatch, *answers: Result) -> SeedTransfer:
    """A transfer whose questions get these answers."""
    left: Iterator[Result] = iter(answers)

    async def ask_master(*_: object) -> Result:
        return next(left)

    monkeypatch.setattr(operator, "ask_master", ask_master)
    watch = SeedWatch(lambda rate: None, lambda reason: None)
    return SeedTransfer(Endpoint("the master", "127.0.0.1:1"), "r", LAYERS, {"w": np.zeros(4, np.float32)}, watch, 9.0)


def test_a_run_that_has_begun_without_us_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours has moved: whoever called learns that this model was not taken."""
    with pytest.raises(ConfigError, match="the run has begun"):
        asyncio.run(make_transfer(monkeypatch, BEGUN).bring_model(SeedAsked(0, "", ("0" * 32,))))


def test_a_run_that_begins_with_what_we_moved_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slaves had all bytes and began before the next question."""

    async def bring() -> None:
        transfer = make_transfer(monkeypatch, BEGUN)
        transfer._moving = moving = _Moving(SeedGranted(PushId("seed", 1, 1), Grant(VersionId(0, 0), (), 1.0)))
        moving.task = asyncio.create_task(asyncio.sleep(0))
        await moving.task
        await transfer.bring_model(SeedAsked(0, "", ("0" * 32,)))

    asyncio.run(bring())

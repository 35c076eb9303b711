"""The section `master` of the run file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from dips.config.section import HttpKey, Section
from dips.protocol.enums import DurabilityMode, PersistFailurePolicy, RequeuePolicy, WindowRule
from dips.protocol.options import MOST_ROLLBACK, TimingOptions

ORDER_HEARTBEATS = 5  # deadline of orders that move no model, in heartbeats: as long as a lease
HANG_HEARTBEATS = 60  # without an inner step: building and compiling a model takes minutes; then five of its own steps
LEAST_TRANSFER_HEARTBEATS = 15  # least deadline of a transfer: a broken stream needs time to reconnect


class OnVersionSection(Section):
    """A command that the master runs for every n-th version, in a separate process
    (master/hooks.py).
    """

    every: Annotated[int, Field(ge=1)]  # versions
    command: Annotated[
        tuple[str, ...], Field(min_length=1)
    ]  # run in the run file's directory, with DIPS_MODEL and DIPS_VERSION


class TrackSection(Section):
    """Trackers that show the run's losses, versions and gates, each in a separate process."""

    tensorboard: Path | None = None  # directory of the event files; null: none
    wandb: str | None = None  # project of Weights & Biases, with WANDB_MODE and WANDB_API_KEY; null: none

    @model_validator(mode="after")
    def _require_place(self) -> TrackSection:
        if self.tensorboard is None and not self.wandb:
            raise ValueError("expected tensorboard: DIRECTORY or wandb: PROJECT, or both; or track: null")
        return self


class TimingSection(Section):
    """How long a round takes commits. All other deadlines are multiples of `shared.heartbeat_s`, or constants that
    `dips set` changes.
    """

    window_s: float | None = None  # longer where clusters of equal pace miss each other; None: as TimingOptions has it
    window: WindowRule = WindowRule.FIXED  # adaptive where clusters push as they please

    @model_validator(mode="after")
    def _require_bounds(self) -> TimingSection:
        self.make_options(TimingOptions.heartbeat_s)
        return self

    def make_options(self, heartbeat_s: float) -> TimingOptions:
        """Return all deadlines, including the multiples of heartbeats."""
        return TimingOptions(
            **self.model_dump(),
            heartbeat_s=heartbeat_s,
            hang_s=HANG_HEARTBEATS * heartbeat_s,
            order_s=ORDER_HEARTBEATS * heartbeat_s,
            least_transfer_s=LEAST_TRANSFER_HEARTBEATS * heartbeat_s,
            busy_retry_s=heartbeat_s,
        )


class MasterSection(HttpKey):
    """The section of the master."""

    listen: str = "127.0.0.1:7800"  # host:port of the control server
    directory: Path  # ledger, journal, logs, timeline
    timing: TimingSection = TimingSection()
    keep_every: Annotated[int, Field(ge=0)] = 0  # every n-th older version is kept; 0: none
    keep_most: Annotated[int, Field(ge=0)] = 0  # at most the newest n of these are kept; 0: all, until disks are full
    most_rollback: Annotated[int, Field(ge=0)] = MOST_ROLLBACK  # outer steps undone without `dips rollback`
    on_version: OnVersionSection | None = None  # run for every n-th version; null: nothing
    track: TrackSection | None = None  # TensorBoard and W&B; null: neither
    durability: DurabilityMode = DurabilityMode.COMMIT  # async: a crash may cost the outer steps not yet on every disk
    on_persist_failure: PersistFailurePolicy = PersistFailurePolicy.DEGRADE  # after two failed snapshots in a row
    mirror: str | None = None  # URL to which the ledger is copied, before its contents are announced; null: none
    requeue: RequeuePolicy = RequeuePolicy.NONE  # whether data of rolled-back versions is trained again

    @model_validator(mode="after")
    def _require_kept(self) -> MasterSection:
        if self.on_version and (not self.keep_every or self.on_version.every % self.keep_every):
            raise ValueError(
                f"keep_every: expected {self.on_version.every}, or what divides it, since on_version needs every "
                f"{self.on_version.every}th version's snapshot until its process has begun; got {self.keep_every}"
            )
        return self

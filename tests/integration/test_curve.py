"""Lanes with a key: a push and a pull by CURVE, who is refused, and what a wrong key file says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import zmq.auth

from dips.client.rank.transfer import Piece, TransferIdentity, pull_pieces, push_pieces
from dips.errors import ConfigError, UnavailableSlave
from dips.ids import PullId, PushId, VersionId
from dips.protocol.effects import Grant, SlaveAddress
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.slave.flow import ZmqFlow
from dips.transport import curve

RUN, SINC, V, NUMEL = "r", 3, VersionId(2, 7), 300_000
MANIFEST = Manifest(tuple(Layer(f"l{i}", (Parameter(f"l{i}.w", (NUMEL,)),)) for i in range(2)))


class CurveEvents:
    """Takes what the flow reports."""

    def __init__(self) -> None:
        self.all: list[str] = []

    def on_push_staged(self, push: PushId, nbytes: int) -> None:
        self.all.append("staged")

    def on_push_refused(self, push: PushId, reason: str) -> None:
        self.all.append(reason)

    def on_pull_released(self, pull: PullId, reason: str) -> None:
        self.all.append("released")

    def on_source_moved(self, pull: PullId) -> None:
        self.all.append("moved")


@contextmanager
def running_flow(key: curve.KeyPair | None, lanes: int = 1) -> Iterator[ZmqFlow]:
    """A slave's data flow."""
    flow = ZmqFlow(RUN, "s0", ("127.0.0.1:0",) * lanes, 1 << 18, 64 << 20, 2, 10.0, key=key)
    flow.set_layers(MANIFEST, (0, 1))
    flow.start(SINC, CurveEvents())
    try:
        yield flow
    finally:
        flow.close()


def grant(flow: ZmqFlow, key: str, deadline_s: float = 20.0) -> Grant:
    return Grant(V, (SlaveAddress("s0", SINC, flow.lane_addresses(), (0, 1), key),), deadline_s)


def pieces(value: float) -> list[Piece]:
    return [Piece(i, 0, 0, NUMEL, np.full(NUMEL, value, np.float32)) for i in range(2)]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_push_and_a_pull_go_by_curve(lanes: int) -> None:
    """Bit for bit as without, on every lane."""
    with running_flow(curve.new_keys(), lanes) as flow:
        slot = {i: np.zeros(NUMEL, np.float32) for i in range(2)}
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0)
        stats = push_pieces(grant(flow, flow.public_key), TransferIdentity(RUN, "a", 1, 1, 0), pieces(2.5))
        assert stats.connections == lanes and not flow.refused_frames
        assert all((array == 2.5).all() for array in slot.values())
        flow.open_pull(PullId("a", 1, 2), V, slot)
        wanted = pieces(0.0)
        pull_pieces(grant(flow, flow.public_key), TransferIdentity(RUN, "a", 1, 2, 0), wanted)
        assert all((piece.array == 2.5).all() for piece in wanted)


@pytest.mark.parametrize("known", ["", "another's"])
def test_who_does_not_know_the_key_moves_nothing(known: str) -> None:
    """A plain rank, and one that takes us for another slave, never get past the handshake."""
    with running_flow(curve.new_keys()) as flow:
        key = known and curve.new_keys().public
        slot = {i: np.zeros(NUMEL, np.float32) for i in range(2)}
        flow.open_push(PushId("a", 1, 1), (0,), slot, 20.0)
        with pytest.raises(UnavailableSlave, match="not connected"):
            push_pieces(grant(flow, key, 1.0), TransferIdentity(RUN, "a", 1, 1, 0), pieces(2.5))
        assert not any(array.any() for array in slot.values()) and flow.bytes_in == 0


def test_a_plain_lane_takes_no_rank_that_expects_a_key() -> None:
    """A rank that was given a key never speaks plain text."""
    with running_flow(None) as flow, pytest.raises(UnavailableSlave, match="not connected"):
        push_pieces(grant(flow, curve.new_keys().public, 1.0), TransferIdentity(RUN, "a", 1, 1, 0), pieces(2.5))
    assert flow.public_key == ""


def test_the_key_of_lanes_is_a_zeromq_certificate(tmp_path: Path) -> None:
    """Its secret file is read; what is none says so, with its name."""
    public, secret = zmq.auth.create_certificates(tmp_path, "s0")
    pair = curve.load_keys(Path(secret))
    assert len(pair.public) == len(pair.secret) == 40
    with pytest.raises(ConfigError, match="no secret key"):
        curve.load_keys(Path(public))
    with pytest.raises(ConfigError, match=r"absent.*expected a ZeroMQ certificate"):
        curve.load_keys(tmp_path / "absent")
    mixed = tmp_path / "mixed.key_secret"
    mixed.write_text(Path(secret).read_text().replace(pair.public, curve.new_keys().public))
    with pytest.raises(ConfigError, match="does not belong"):
        curve.load_keys(mixed)

"""What was written stays readable, and today's writers write the same: formats, and the bits of θ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dips.codecs import Codec
from dips.ids import PushId
from dips.master.ledger import Ledger
from dips.wire.chunks import decode_body
from dips.wire.frame import Kind, Welcome, check_body, decode_hello, decode_want, decode_welcome, unpack_header
from tests.codec_bounds import error_bound
from tests.golden import frames, history, ledger, snapshot
from tests.golden.files import DATA, MAKERS, different


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_written_today_is_what_was_written(name: str) -> None:
    """A difference is a new format or other numbers: meant, then `python -m tests.golden --write`, and a reason."""
    assert different(MAKERS[name]()) == []


def test_the_frames_are_read() -> None:
    """Headers name what was sent, bodies pass their checksums and decode to their numbers."""
    found = frames.read((DATA / frames.FILE).read_text())
    for codec in Codec:
        header, body = found[f"CHUNK {codec}"]
        read = unpack_header(header, frames.RUN, len(body), 1 << 20)
        check_body(read, body)
        assert (read.kind, read.stream, read.layer, read.param, read.offset) == (Kind.CHUNK, frames.STREAM, 5, 2, 64)
        assert read.dtype is codec.dtype
        assert (np.abs(decode_body(codec, body, 6) - frames.VALUES) <= error_bound(codec, frames.VALUES)).all()
    assert decode_hello(found["HELLO"][1]) == (frames.NAME, frames.RANGES, len(frames.RANGES))
    assert decode_want(found["WANT"][1]) == frames.RANGES
    assert decode_welcome(found["WELCOME"][1]) == Welcome(4096, 1 << 20)
    for name in ("HELLO", "WELCOME", "WANT", "DONE"):
        header, body = found[name]
        read = unpack_header(header, frames.RUN, len(body), 1 << 20)
        check_body(read, body)
        assert read.kind is Kind[name]


def test_the_snapshot_is_read(tmp_path: Path) -> None:
    """It is offered, and gives θ and m bit for bit."""
    shutil.copytree(DATA / "snapshot" / str(snapshot.VERSION), tmp_path / str(snapshot.VERSION))
    snapshots = snapshot.opened(tmp_path)
    assert snapshots.complete_versions() == (snapshot.VERSION,)
    theta, momentum = snapshot.arrays(0.0), snapshot.arrays(0.0)
    snapshots.read_snapshot(snapshot.VERSION, theta, momentum)
    snapshots.close()
    for got, meant in ((theta, snapshot.arrays(1.0)), (momentum, snapshot.arrays(-2.0))):
        assert {i: a.tobytes() for i, a in got.items()} == {i: a.tobytes() for i, a in meant.items()}


def test_the_ledger_is_read(tmp_path: Path) -> None:
    """A master takes it up: head, tokens, what was gated, whose incarnation ended, and the next round's number."""
    path = tmp_path / "ledger.sqlite"
    ledger.restore((DATA / ledger.FILE).read_text(), path)
    opened = Ledger.open(path)
    state, tokens, rounds = opened.read_state(), opened.read_tokens(), opened.read_history()
    opened.close()
    assert str(state.versions[-1].version) == "v8@r8" and state.next_round == 9
    assert [len(r.folds) for r in rounds] == [2, 2, 1, 2, 1, 1, 2, 2]
    assert tokens["b"]["gated"] == 100 + 50 * 4 + ord("b")
    assert sum(v.tokens for v in state.versions) == sum(t["accepted"] for t in tokens.values())
    assert {peer.name: peer.ended for peer in state.clusters} == {"a": False, "b": True}
    assert PushId("b", 1, 5) not in {f.push for r in rounds for f in r.folds}


def test_the_history_is_one_of_a_run_that_moves() -> None:
    """It has what it is to guard: folds of two, one clipped step at least, a θ that is another in each version."""
    rows = json.loads((DATA / history.FILE).read_text())
    assert len(rows) == 8
    assert {len(row["folds"]) for row in rows} == {1, 2}
    assert any(row["clipped"] for row in rows) and not all(row["clipped"] for row in rows)
    assert len({row["theta"] for row in rows}) == len({row["momentum"] for row in rows}) == 8

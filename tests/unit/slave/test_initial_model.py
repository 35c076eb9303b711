"""v0@r0 on a slave's disk: what `dips seed` brought, or what `initial_model` names; believed by its digests."""

from __future__ import annotations

import shutil
import threading
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import structlog
import xxhash
from structlog.testing import capture_logs

from dips.errors import CorruptSnapshot
from dips.ids import GENESIS
from dips.protocol.manifest import Manifest
from dips.slave import snapshots as snapshots_module
from dips.slave.snapshots import Snapshots
from dips.store.files import delete_version
from dips.store.version import VersionManifest
from tests.damage import flip_bit
from tests.unit.slave.test_snapshots import MANIFEST, Arrays, arrays, same, write_initial
from tests.waiting import until

EVERY = (0, 1, 2, 3)


def of_layers(path: Path, layers: tuple[int, ...] = EVERY, given: Path | None = None) -> Snapshots:
    snapshots = Snapshots(path, "r", "s", given, structlog.get_logger())
    bind(snapshots, layers)
    return snapshots


def bind(snapshots: Snapshots, layers: tuple[int, ...], model: Manifest = MANIFEST) -> None:
    """The master names layers of a model to it, with their digests at v0@r0."""
    genesis = arrays(EVERY, 0)
    snapshots.bind_layers(model, layers, [xxhash.xxh3_128_hexdigest(genesis[i].tobytes()) for i in layers], 1)


def empty(layers: tuple[int, ...]) -> Arrays:
    return {i: np.full(MANIFEST.layers[i].numel, 9.0, np.float32) for i in layers}


def read(snapshots: Snapshots, layers: tuple[int, ...] = EVERY) -> tuple[Arrays, Arrays]:
    theta, momentum = empty(layers), empty(layers)
    snapshots.read_snapshot(GENESIS, theta, momentum)
    return theta, momentum


def test_what_was_brought_is_read_by_the_next_process(tmp_path: Path) -> None:
    """Bit for bit, with momentum 0; before, there is nothing to read. It is no snapshot: the master is not told it."""
    layers, genesis = (0, 2), arrays(EVERY, 0)
    with closing(of_layers(tmp_path, layers)) as first:
        assert not first.holds_initial()
        with pytest.raises(FileNotFoundError, match="run `dips seed`"):
            read(first, layers)
        first.keep_initial({i: genesis[i] for i in layers})
        assert first.holds_initial()

    with closing(of_layers(tmp_path, layers)) as again:
        theta, momentum = read(again, layers)
        assert same(theta, {i: genesis[i] for i in layers}) and not any(m.any() for m in momentum.values())
        mapped = again.map_theta(GENESIS)
        assert mapped is not None and same(mapped, {i: genesis[i] for i in layers})
        assert again.complete_versions() == ()
        again.delete_snapshots((GENESIS,))
        assert again.holds_initial(), "a run may roll back to it"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", str(GENESIS)]


def test_another_model_is_not_kept(tmp_path: Path) -> None:
    """Whatever came, the version that was there before stays (guards invariant 7)."""
    genesis, other = arrays(EVERY, 0), arrays(EVERY, 0)
    other[1] = other[1] + np.float32(1)
    with closing(of_layers(tmp_path)) as snapshots:
        with pytest.raises(CorruptSnapshot, match=f"layer {MANIFEST.layers[1].name} is not this run's first model"):
            snapshots.keep_initial(other)
        assert not snapshots.holds_initial() and not list(tmp_path.glob("*v0*"))
        snapshots.keep_initial(genesis)
        with pytest.raises(CorruptSnapshot):
            snapshots.keep_initial(other)
        assert same(read(snapshots)[0], genesis)


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    """It is found when it is read, and then the slave waits for the model again."""
    genesis = arrays(EVERY, 0)
    with closing(of_layers(tmp_path)) as snapshots:
        snapshots.keep_initial(genesis)
        flip_bit(tmp_path / str(GENESIS), "theta.")
        assert snapshots.holds_initial(), "its manifest and sizes are right"
        with pytest.raises(CorruptSnapshot):
            read(snapshots)
        assert not snapshots.holds_initial()
        snapshots.keep_initial(genesis)
        assert snapshots.holds_initial()


def test_what_is_known_to_fit_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its manifest is parsed once, however often it is mapped; another directory in its place, and a file of it that is
    gone, are noticed.
    """
    seen, read_manifest = list[Path](), snapshots_module.read_manifest

    def count(folder: Path) -> VersionManifest:
        seen.append(folder)
        return read_manifest(folder)

    monkeypatch.setattr(snapshots_module, "read_manifest", count)
    write_initial(tmp_path / "initial", arrays(EVERY, 0))
    with closing(of_layers(tmp_path / "s", given=tmp_path / "initial")) as snapshots:
        assert all(snapshots.holds_initial() and snapshots.map_theta(GENESIS) for _ in range(5))
        assert len(seen) == 1
        shutil.move(tmp_path / "initial", tmp_path / "former")
        assert not snapshots.holds_initial()
        write_initial(tmp_path / "initial", arrays(EVERY, 1))
        assert not snapshots.holds_initial(), "it is another model"
        shutil.rmtree(tmp_path / "initial")
        shutil.move(tmp_path / "former", tmp_path / "initial")
        assert snapshots.holds_initial()
        (tmp_path / "initial" / str(GENESIS) / "00001.safetensors").unlink()
        with pytest.raises(FileNotFoundError):
            read(snapshots)
        assert not snapshots.holds_initial()


def test_other_layers_are_lacking(tmp_path: Path) -> None:
    """After a rebalance the version of the former layers does not do; the one that initial_model names has all."""
    with closing(of_layers(tmp_path / "s", (0, 2))) as before:
        before.keep_initial({i: arrays(EVERY, 0)[i] for i in (0, 2)})
    with closing(of_layers(tmp_path / "s")) as lacking:
        assert not lacking.holds_initial()
    write_initial(tmp_path / "initial", arrays(EVERY, 0))
    with closing(of_layers(tmp_path / "s", EVERY, tmp_path / "initial")) as snapshots:
        assert snapshots.holds_initial() and same(read(snapshots)[0], arrays(EVERY, 0))


def test_each_binding_asks_anew_whether_it_fits(tmp_path: Path) -> None:
    """For other layers, or another model of the same bytes; for the same ones what was found damaged stays so."""
    reshaped = Manifest.from_shapes([("a.0.10.w", (3, 2)), ("a.0.2.b", (2,)), ("b.w", (4, 1)), ("scale", ())])
    layers = (0, 2)
    with closing(of_layers(tmp_path, layers)) as snapshots:
        snapshots.keep_initial({i: arrays(EVERY, 0)[i] for i in layers})
        assert snapshots.holds_initial()
        bind(snapshots, EVERY)
        assert not snapshots.holds_initial()
        bind(snapshots, layers)
        assert snapshots.holds_initial()
        bind(snapshots, layers, reshaped)
        assert not snapshots.holds_initial()
        bind(snapshots, layers)
        assert snapshots.holds_initial()
        flip_bit(tmp_path / str(GENESIS), "theta.")
        with pytest.raises(CorruptSnapshot):
            read(snapshots, layers)
        bind(snapshots, layers)
        assert not snapshots.holds_initial()


def test_a_first_model_that_is_here_is_not_missed(tmp_path: Path) -> None:
    """Nothing is logged while it is held, nor if `dips seed` is to bring it; once, if what was named is gone."""
    write_initial(tmp_path / "initial", arrays(EVERY, 0))
    with capture_logs() as logs:
        with closing(of_layers(tmp_path / "waiting")) as waiting:
            assert not waiting.holds_initial() and waiting.map_theta(GENESIS) is None
        with closing(of_layers(tmp_path / "s", given=tmp_path / "initial")) as snapshots:
            assert snapshots.holds_initial()
            assert not logs
            shutil.rmtree(tmp_path / "initial")
            assert not snapshots.holds_initial() and not snapshots.holds_initial()
    assert [entry["event"] for entry in logs] == ["initial_model_missing"]


def test_a_first_model_is_not_mapped_before_the_layers_are_known(tmp_path: Path) -> None:
    """Any v0@r0 counts as held until then, and none is served."""
    write_initial(tmp_path / "initial", arrays(EVERY, 0))
    with closing(Snapshots(tmp_path / "s", "r", "s", tmp_path / "initial", structlog.get_logger())) as unbound:
        assert unbound.holds_initial() and unbound.map_theta(GENESIS) is None


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    """Not that there is none: its layer, and the digests; the file of an older layout, with what to do."""
    other = arrays(EVERY, 0)
    other[1] = other[1] + np.float32(1)
    write_initial(tmp_path / "initial", other)
    with closing(of_layers(tmp_path / "s", EVERY, tmp_path / "initial")) as snapshots:
        with pytest.raises(FileNotFoundError, match=r"does not fit: .*initial/v0@r0: layer b .*expected xxh3-128"):
            read(snapshots)
        with capture_logs() as logs:
            assert not snapshots.holds_initial() and not snapshots.holds_initial()
    assert [entry["event"] for entry in logs] == ["initial_model_unfit"] and "layer b" in logs[0]["found"]
    delete_version(tmp_path / "initial" / str(GENESIS))
    (tmp_path / "initial" / "model.safetensors").write_bytes(b"")
    with (
        closing(of_layers(tmp_path / "s", EVERY, tmp_path / "initial")) as snapshots,
        pytest.raises(FileNotFoundError, match=r"does not fit: .*: expected a directory with v0@r0/ of `dips init`"),
    ):
        read(snapshots)


def test_a_silent_disk_under_it_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the disk of a master whose machine is lost: slaves that hold the head would not register with the
    standby before that disk is back.
    """
    monkeypatch.setattr(snapshots_module, "LOOK_S", 0.01)
    write_initial(tmp_path / "initial", arrays(EVERY, 0))
    over, looks, held = threading.Event(), list[snapshots_module.InitialModel](), snapshots_module.InitialModel.is_held

    def hang(model: snapshots_module.InitialModel) -> bool:
        looks.append(model)
        assert over.wait(10)
        return held(model)

    monkeypatch.setattr(snapshots_module.InitialModel, "is_held", hang)
    with closing(of_layers(tmp_path / "s", given=tmp_path / "initial")) as snapshots:
        assert not snapshots.holds_initial() and not snapshots.holds_initial()
        assert len(looks) == 1
        over.set()
        until(snapshots.holds_initial)

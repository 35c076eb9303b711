"""v0@r0 on a slave's disk: what `dips seed` brought, or what `initial_model` names; believed by its digests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xxhash
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from dips.errors import CorruptSnapshot
from dips.slave.initial_model import OWN_FILE, InitialModel
from tests.unit.slave.test_snapshots import MANIFEST, Arrays, arrays, opened, tensors

EVERY = (0, 1, 2, 3)


def of_layers(path: Path, layers: tuple[int, ...] = EVERY, given: Path | None = None) -> InitialModel:
    path.mkdir(exist_ok=True)
    model = InitialModel(path, "r", given, lambda nbytes: None)
    genesis = arrays(EVERY, 0)
    model.bind_layers(MANIFEST, {i: xxhash.xxh3_128_hexdigest(genesis[i].tobytes()) for i in layers})
    return model


def empty(layers: tuple[int, ...]) -> Arrays:
    return {i: np.full(MANIFEST.layers[i].numel, 9.0, np.float32) for i in layers}


def test_what_was_brought_is_read_by_the_next_process(tmp_path: Path) -> None:
    """Bit for bit, with momentum 0; before, there is nothing to read."""
    model, layers, genesis = of_layers(tmp_path, (0, 2)), (0, 2), arrays(EVERY, 0)
    assert not model.is_held()
    with pytest.raises(FileNotFoundError, match="run `dips seed`"):
        model.read_layers(empty(layers), empty(layers))
    model.keep_layers({i: genesis[i] for i in layers})
    assert model.is_held()

    again, theta, momentum = of_layers(tmp_path, (0, 2)), empty(layers), empty(layers)
    again.read_layers(theta, momentum)
    assert all(theta[i].tobytes() == genesis[i].tobytes() and not momentum[i].any() for i in layers)
    mapped = again.map_layers()
    assert mapped is not None and all(mapped[i].tobytes() == genesis[i].tobytes() for i in layers)
    assert [path.name for path in tmp_path.iterdir()] == [OWN_FILE]


def test_another_model_is_not_kept(tmp_path: Path) -> None:
    """Whatever came, the file that was there before stays (guards invariant 7)."""
    model, genesis, other = of_layers(tmp_path), arrays(EVERY, 0), arrays(EVERY, 0)
    other[1] = other[1] + np.float32(1)
    with pytest.raises(CorruptSnapshot, match=f"layer {MANIFEST.layers[1].name} is not this run's first model"):
        model.keep_layers(other)
    assert not model.is_held() and not list(tmp_path.iterdir())
    model.keep_layers(genesis)
    with pytest.raises(CorruptSnapshot):
        model.keep_layers(other)
    model.read_layers(empty(EVERY), empty(EVERY))


def test_a_damaged_file_is_as_good_as_none(tmp_path: Path) -> None:
    """It is found when it is read, and then the slave waits for the model again."""
    model, genesis = of_layers(tmp_path), arrays(EVERY, 0)
    model.keep_layers(genesis)
    raw = bytearray((tmp_path / OWN_FILE).read_bytes())
    raw[-1] ^= 1
    (tmp_path / OWN_FILE).write_bytes(raw)
    assert model.is_held(), "names and shapes are there"
    with pytest.raises(CorruptSnapshot):
        model.read_layers(empty(EVERY), empty(EVERY))
    assert not model.is_held()
    model.keep_layers(genesis)
    assert model.is_held()


def test_other_layers_are_lacking(tmp_path: Path) -> None:
    """After a rebalance the file of the former layers does not do; the one that initial_model names has all."""
    of_layers(tmp_path / "s", (0, 2)).keep_layers(arrays((0, 2), 0))
    assert not of_layers(tmp_path / "s", EVERY).is_held()
    save_file(tensors(arrays(EVERY, 0)), tmp_path / "all.safetensors")
    model = of_layers(tmp_path / "s", EVERY, tmp_path / "all.safetensors")
    assert model.is_held()
    model.read_layers(empty(EVERY), empty(EVERY))


def test_a_file_that_does_not_fit_is_said_with_what_does_not(tmp_path: Path) -> None:
    """Not that there is none: its tensor, the shape that was expected and the one that is there."""
    wrong = tensors(arrays(EVERY, 0))
    name = MANIFEST.layers[0].parameters[0].name
    wrong[name] = wrong[name].reshape(-1, 1)
    save_file(wrong, tmp_path / "all.safetensors")
    model = of_layers(tmp_path / "s", EVERY, tmp_path / "all.safetensors")
    assert not model.is_held()
    with pytest.raises(
        FileNotFoundError, match=rf"does not fit: .*all.safetensors: tensor '{name}': expected .*, got "
    ):
        model.read_layers(empty(EVERY), empty(EVERY))
    (tmp_path / "initial.safetensors").write_bytes((tmp_path / "all.safetensors").read_bytes())
    snapshots = opened(tmp_path / "t")
    with capture_logs() as logs:
        assert not snapshots.holds_initial() and not snapshots.holds_initial()
    snapshots.close()
    assert [entry["event"] for entry in logs] == ["initial_model_unfit"] and name in logs[0]["found"]

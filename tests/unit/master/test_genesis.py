"""`dips init` defines version 0 once, from finite fp32 parameters, and says what is wrong with anything else."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from dips.config import MasterSection, RunFile, Shared, SlaveSection
from dips.errors import ConfigError
from dips.master import genesis
from dips.master.genesis import INITIAL, INITIAL_VERSION, ledger_path, make_run
from dips.master.ledger import Ledger
from dips.protocol.enums import LayerUnit
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import MAX_JSON_BYTES, Manifest
from dips.slave.snapshots import InitialModel
from dips.store.files import read_parameters
from dips.store.mirror import SEEN
from tests.disk_calls import DiskCalls


def run_file(directory: Path, slaves: int = 2, share_buffers: tuple[str, ...] = ()) -> RunFile:
    sections = tuple(
        SlaveSection(name=f"s{i}", master="127.0.0.1:1", directory=directory / f"s{i}", initial_model=directory / "x")
        for i in range(slaves)
    )
    shared = Shared(run="toy", share_buffers=share_buffers)
    return RunFile(shared=shared, master=MasterSection(directory=directory), slaves=sections, tls=False)


def model() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    shapes = {
        "embed.weight": (8, 4),
        "layers.0.w": (4, 4),
        "layers.0.b": (4,),
        "layers.1.w": (4, 4),
        "head.weight": (8, 4),
    }
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def test_shared_buffers_are_a_layer_of_their_own(tmp_path: Path) -> None:
    """The last one, placed like any other; a pattern that names nothing is refused before anything is written."""
    tensors = {**model(), "layers.0.expert_bias": np.ones(4, np.float32)}
    row = make_run(run_file(tmp_path, share_buffers=("*.expert_bias",)), tensors)
    last = Manifest.from_json(row.manifest).layers[-1]
    assert last.averaged and [p.name for p in last.parameters] == ["layers.0.expert_bias"]
    assert row.genesis_norms[-1] == 2.0
    with pytest.raises(ConfigError, match=r"share_buffers: no tensor of the model has a name like \*\.bais"):
        make_run(run_file(tmp_path / "other", share_buffers=("*.bais",)), tensors)
    assert not (tmp_path / "other").exists()


def test_a_parameter_of_no_dimensions_stays_one(tmp_path: Path) -> None:
    """A learned temperature: the file has the manifest's shape, or the slave would refuse it for ever."""
    tensors, config = {**model(), "head.scale": np.array(1.5, np.float32)}, run_file(tmp_path)
    row = make_run(config, tensors)
    held = InitialModel(tmp_path / "s0", "toy", tmp_path / INITIAL, lambda nbytes: None)
    held.bind_layers(Manifest.from_json(row.manifest), dict(enumerate(row.genesis)))
    assert held.is_held(), held.describe_unfit()


def test_version_0_is_what_was_given(tmp_path: Path) -> None:
    """The files hold the model, the ledger its manifest, placement, digests and norms, all in the order of names."""
    tensors, config = model(), run_file(tmp_path)
    row = make_run(config, tensors)
    manifest = Manifest.from_json(row.manifest)
    assert [layer.name for layer in manifest.layers] == ["embed", "head", "layers.0", "layers.1"]
    stored = read_parameters(tmp_path / INITIAL_VERSION)
    assert all(np.array_equal(stored[name], t) for name, t in tensors.items()) and len(stored) == len(tensors)
    flat = np.concatenate([tensors["layers.0.b"].ravel(), tensors["layers.0.w"].ravel()])
    assert row.genesis[2] == xxhash.xxh3_128_hexdigest(flat.tobytes())
    assert row.genesis_norms[2] == pytest.approx(float(np.linalg.norm(flat.astype(np.float64))), rel=1e-12)
    assert sorted(layer for _, layers in row.placement for layer in layers) == [0, 1, 2, 3]
    ledger = Ledger.open(ledger_path(config))
    assert ledger.read_state().row == row
    assert row.config_digest == config.shared.digest
    ledger.close()


def test_a_view_with_strides_is_its_values(tmp_path: Path) -> None:
    """A transposed parameter is stored and hashed by its elements, not by the memory behind it."""
    tensors = model()
    tensors["head.weight"] = np.asfortranarray(tensors["head.weight"])
    assert make_run(run_file(tmp_path / "a"), tensors).genesis == make_run(run_file(tmp_path / "b"), model()).genesis


def test_a_run_is_made_once(tmp_path: Path) -> None:
    """A second init refuses; with force the old run is gone."""
    config = run_file(tmp_path)
    first = make_run(config, model())
    with pytest.raises(ConfigError, match="--force"):
        make_run(config, model())
    other = {name: t + 1 for name, t in model().items()}
    unfinished = tmp_path / INITIAL / ".unfinished-v0@r0"
    unfinished.mkdir()
    (unfinished / "00009.safetensors").touch()  # of a `dips init` that was killed
    second = make_run(config, other, force=True)
    assert [path.name for path in (tmp_path / INITIAL).iterdir() if path.is_dir()] == ["v0@r0"]
    assert second.genesis != first.genesis
    ledger = Ledger.open(ledger_path(config))
    assert ledger.read_state().row == second
    ledger.close()


def test_a_run_whose_creation_was_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a ledger was one that is there already, and a master that waited for it ended with 65."""
    config = run_file(tmp_path)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dips.master.ledger.write_run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_run(config, model())
    assert not ledger_path(config).exists()
    row = make_run(config, model())
    with closing(Ledger.open(ledger_path(config))) as ledger:
        assert ledger.read_state().row == row


def test_of_two_that_make_a_run_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dips init` in two terminals: the second one's model replaced the first one's beside that one's ledger, and no
    slave read it any more.
    """
    config, first, other = run_file(tmp_path), model(), {name: t + 1 for name, t in model().items()}
    write = genesis.write_initial

    def write_behind(*args: Any) -> None:
        monkeypatch.setattr(genesis, "write_initial", write)
        with pytest.raises(ConfigError, match=r"in use by another master \(pid "):
            make_run(config, other)
        write(*args)

    monkeypatch.setattr(genesis, "write_initial", write_behind)
    make_run(config, first)
    assert read_parameters(tmp_path / INITIAL_VERSION)["head.weight"].tolist() == first["head.weight"].tolist()


def test_force_spares_a_run_that_is_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no ledger yet, but has noted its mirror, which was forgotten before the lock was asked for."""
    (tmp_path / "mirror").mkdir()
    config, write = with_mirrors(run_file(tmp_path / "m"), tmp_path / "mirror", None), genesis.write_ledger

    def write_behind(*args: Any) -> None:
        with pytest.raises(ConfigError, match=r"in use by another master \(pid "):
            make_run(config, model(), force=True)
        assert (tmp_path / "m" / SEEN).exists()
        write(*args)

    monkeypatch.setattr(genesis, "write_ledger", write_behind)
    make_run(config, model())


def test_force_spares_a_living_run(tmp_path: Path) -> None:
    """A ledger that a master holds is not thrown away, even by force."""
    config = run_file(tmp_path)
    row = make_run(config, model())
    ledger = Ledger.open(ledger_path(config))
    with pytest.raises(ConfigError, match="in use by another master"):
        make_run(config, model(), force=True)
    assert ledger.read_state().row == row
    ledger.close()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("layers.0.w", np.zeros((4, 4)), "layers.0.w is float64"),
        ("head.weight", np.zeros((8, 4), np.float16), "head.weight is float16"),
        ("layers.1.w", np.full((4, 4), np.nan, np.float32), "not finite: layers.1.w"),
        ("layers.0.b", np.zeros((0,), np.float32), "empty: layers.0.b"),
    ],
)
def test_what_is_no_parameter_is_named(tmp_path: Path, name: str, value: Any, said: str) -> None:
    """A wrong dtype, a NaN and an empty tensor are refused by name, and nothing is written."""
    config = run_file(tmp_path)
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        make_run(config, {**model(), name: value})
    assert list(tmp_path.iterdir()) == []


def test_more_slaves_than_layers(tmp_path: Path) -> None:
    """A slave without a layer has no part in the run: refused before anything is written."""
    with pytest.raises(ConfigError, match="expected at most 4"):
        make_run(run_file(tmp_path, slaves=5), model())
    assert list(tmp_path.iterdir()) == []


def test_of_many_wrong_parameters_some_are_named(tmp_path: Path) -> None:
    """The first five, and how many more there are."""
    for count, more in ((5, "p4 is float64;"), (7, "p4 is float64 and 2 more;")):
        with pytest.raises(ConfigError, match=more):
            make_run(run_file(tmp_path), {f"p{i}": np.zeros(2) for i in range(count)})


def with_mirrors(config: RunFile, master: Path | None, slave: Path | None) -> RunFile:
    """The same run file with a mirror of the ledger and one of its first slave."""
    first, *others = config.slaves
    sections = (first.model_copy(update={"mirror": slave and str(slave)}), *others)
    section = config.master.model_copy(update={"mirror": master and str(master)})
    return config.model_copy(update={"master": section, "slaves": sections})


def test_a_mirror_that_is_away_is_told_if_it_is_the_masters(tmp_path: Path) -> None:
    """A slave's may be reached from its own machine only."""
    with pytest.raises(ConfigError, match=r"master\.mirror: .* is not there: mount it"):
        make_run(with_mirrors(run_file(tmp_path / "m"), tmp_path / "gone", None), model())
    assert not (tmp_path / "m").exists()
    make_run(with_mirrors(run_file(tmp_path / "m"), None, tmp_path / "gone"), model())


@pytest.mark.parametrize("step", ["copy_out", "write_ledger"])
def test_a_run_that_is_interrupted_when_it_is_mirrored_is_made_again(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it left there was a run of this name, which a master was to restore, and only --force helped: also where the
    copy was whole, and the disk too full for the ledger.
    """
    (tmp_path / "mirror").mkdir()
    config = with_mirrors(run_file(tmp_path / "m"), tmp_path / "mirror", None)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(genesis, step, interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_run(config, model())
    make_run(config, model())


def test_the_copy_of_a_run_that_has_its_ledger_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends `dips init` after the rename: the run is there, and is restored from its mirror when it is lost."""
    (tmp_path / "mirror").mkdir()
    config, put = with_mirrors(run_file(tmp_path / "m"), tmp_path / "mirror", None), genesis.put_in_place

    def interrupt(built: Path, path: Path) -> None:
        put(built, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(genesis, "put_in_place", interrupt)
    with pytest.raises(KeyboardInterrupt):
        make_run(config, model())
    assert ledger_path(config).exists() and list((tmp_path / "mirror").rglob("shared.json"))


def test_a_run_thrown_away_is_gone_from_its_mirrors(tmp_path: Path) -> None:
    """A slave that begins with an empty directory would restore from there; without force nothing is touched."""
    (tmp_path / "mirror").mkdir()
    config = with_mirrors(run_file(tmp_path / "m"), tmp_path / "mirror", None)
    make_run(config, model())
    shared = next((tmp_path / "mirror").rglob("shared.json"))
    old = shared.parent / "old"
    old.touch()
    other = with_mirrors(run_file(tmp_path / "other"), tmp_path / "mirror", None)
    with pytest.raises(ConfigError, match="a run of the name 'toy' lies in"):
        make_run(other, model())
    assert old.exists() and not (tmp_path / "other").exists()
    make_run(config, model(), force=True)
    assert not old.exists() and shared.exists()


@pytest.mark.parametrize("limit", ["MAX_JSON_BYTES", "MOST_LAYERS"])
def test_a_model_as_large_as_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    """The limit itself is a run; one less is none."""
    manifest = genesis.manifest_of(model(), Grouping(LayerUnit.BLOCK, ()))
    most = len(manifest.to_json()) if limit == "MAX_JSON_BYTES" else len(manifest.layers)
    monkeypatch.setattr(genesis, limit, most - 1)
    with pytest.raises(ConfigError, match=f"at most {most - 1} .*, got {most}"):
        make_run(run_file(tmp_path), model())
    monkeypatch.setattr(genesis, limit, most)
    make_run(run_file(tmp_path), model())


def test_a_model_without_parameters(tmp_path: Path) -> None:
    """Nothing to train is an error, not an empty run."""
    with pytest.raises(ConfigError, match="no parameters"):
        make_run(run_file(tmp_path), {})


def test_version_0_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and manifest are synced before the rename, and its directory after: a crash leaves all or nothing."""
    config = run_file(tmp_path)
    calls = DiskCalls(tmp_path, monkeypatch)
    make_run(config, model())
    aside = f"{INITIAL}/.unfinished-v0@r0"
    layers = [f"fsync {aside}/{index:05d}.safetensors" for index in range(4)]
    begin = min(map(calls.calls.index, layers))
    assert sorted(calls.calls[begin:][: len(layers)]) == layers, "side by side"
    assert calls.calls[begin + len(layers) :][:4] == [
        f"fsync {aside}/manifest.json", f"fsync {aside}", f"rename {aside} {INITIAL_VERSION}",
        f"fsync {INITIAL}",
    ]  # fmt: skip


def test_a_manifest_that_no_message_could_carry_is_refused(tmp_path: Path) -> None:
    """Before anything is written: the master could not tell it to a slave."""
    tensors = {f"{'n' * (MAX_JSON_BYTES // 4)}{i}": np.ones(1, np.float32) for i in range(4)}
    with pytest.raises(ConfigError, match="take at most"):
        make_run(run_file(tmp_path), tensors)
    assert not ledger_path(run_file(tmp_path)).exists()


def test_a_model_that_is_moved_in_has_its_name_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of the one before."""
    for directory, content in (("aside", "new"), (".", "old")):
        (tmp_path / directory / INITIAL).mkdir(parents=True)
        (tmp_path / directory / INITIAL / "model").write_text(content)
    disk = DiskCalls(tmp_path, monkeypatch)
    genesis.put_initial(tmp_path / "aside", tmp_path)
    assert disk.calls == [f"remove {INITIAL}", f"rename aside/{INITIAL} {INITIAL}", "fsync ."]
    assert (tmp_path / INITIAL / "model").read_text() == "new"

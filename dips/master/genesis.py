"""Creates a run: from a model's parameters to the ledger's first rows and the files of version 0 (`dips init`).

Only this, or a verified snapshot, defines θ (docs/architecture.md#invariant-7). The ledger is written last, so a run
whose creation was interrupted does not exist.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from dips.config import RunFile
from dips.differences import differing_options
from dips.errors import ConfigError, FailedMirror
from dips.files import make_directory, sync_path, write_durably
from dips.ids import GENESIS
from dips.master.ledger import Ledger, hold_ledger, put_in_place
from dips.printable import join_some
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import MAX_JSON_BYTES, MOST_LAYERS, Layer, Manifest, unmatched_patterns
from dips.protocol.placement import place_layers
from dips.protocol.records import RunRow
from dips.store.files import ASIDE, put_version, write_version
from dips.store.mirror import SEEN, MirrorStore, bring_back, copy_out, insist, list_versions

Tensor = npt.NDArray[np.float32]

LEDGER = "ledger.sqlite"
BEGINNING = ".beginning"  # a directory beside it, in which it is built
BOUND = "lease.bound"  # a file beside it: a standby may have been told that it may claim (standby.py)
INITIAL = Path("initial")  # the root of v0@r0, which a slave's initial_model names
INITIAL_VERSION = INITIAL / str(GENESIS)
INITIAL_SHARED = INITIAL / "shared.json"  # the ledger has only their digest; this file has the options
MOST_SHARED_BYTES = 1 << 20


def ledger_path(config: RunFile) -> Path:
    return config.master.directory / LEDGER


def mirror_of(config: RunFile) -> MirrorStore | None:
    """Return the mirror of this run's ledger; None if it has none."""
    url, directory = config.master.mirror, config.master.directory
    return None if url is None else MirrorStore(url, config.shared.run, "master", of=directory)


def check_is_of_run(config: RunFile, row: RunRow) -> None:
    """Raise ConfigError, naming both, unless run file and ledger are of one run with the same shared options."""
    path = ledger_path(config)
    if row.run != config.shared.run:
        raise ConfigError(
            f"{path} is the ledger of run {row.run!r}, the run file's shared.run is {config.shared.run!r}"
        )
    if row.config_digest != config.shared.digest:
        raise ConfigError(
            f"{_describe_differences(config, row)}: put the options back as they were, or make a new run "
            "with `dips init`"
        )


def check_placement(config: RunFile, row: RunRow) -> None:
    """Raise ConfigError unless the ledger's layers are on the run file's slaves."""
    placed, named = sorted(name for name, _ in row.placement), sorted(slave.name for slave in config.slaves)
    if placed != named:
        raise ConfigError(
            f"{ledger_path(config)} places layers on {', '.join(placed)}, the run file's slaves are "
            f"{', '.join(named)}: `dips rebalance` moves layers to other slaves"
        )


def _describe_differences(config: RunFile, row: RunRow) -> str:
    """Describe which shared options differ, by key if the copy of `dips init` beside the model exists."""
    try:
        made_with = json.loads((config.master.directory / INITIAL_SHARED).read_text())
        lines = differing_options(config.shared.agreed, made_with)
    except (OSError, ValueError, AttributeError):  # lost, or damaged: the digests still differ
        lines = []
    digests = f"digest {row.config_digest[:12]}, this file's have {config.shared.digest[:12]}"
    return "; ".join(lines) or f"shared: {ledger_path(config)} was made with options of {digests}"


def make_run(
    config: RunFile, tensors: Mapping[str, Tensor], *, force: bool = False, wall: Callable[[], float] = lambda: 0.0
) -> RunRow:
    """Write `<master.directory>/initial/` and the ledger of a new run; return its first row.

    config   names the run, the slaves and the directory
    tensors  full fp32 parameters by name, in any order; without frozen parameters, and of buffers only those that
             shared.share_buffers names
    force    delete an existing ledger, and its run with it
    wall     Unix seconds, for the ledger's rows

    Errors   ConfigError: a ledger exists, or a mirror with a run of this name; a dtype is not float32, an element is
             not finite, more slaves than layers
    """
    ledger = ledger_path(config)
    if ledger.exists() and not force:
        raise ConfigError(
            f"{ledger}: a ledger is here already; take another master.directory, or throw this run away with --force"
        )
    mirrors = find_mirrors(config, force)
    manifest = manifest_of(tensors, config.shared.grouping)
    row = row_of_model(config, manifest, tensors)
    with hold_beginning(ledger, force):
        for mirror in mirrors:
            mirror.remove_path("")
        write_initial(config, manifest, tensors, config.master.directory)
        with _unmirrored_if_failed(config):
            mirror_initial(config)
            write_ledger(config, row, wall)
    return row


def row_of_model(config: RunFile, manifest: Manifest, tensors: Mapping[str, Tensor]) -> RunRow:
    """Return the first row of the ledger of a run with this model, without writing; ConfigError as for `make_row`."""
    digests = tuple(layer_digest(layer, tensors) for layer in manifest.layers)
    return make_row(config, manifest, digests, tuple(layer_norm(layer, tensors) for layer in manifest.layers))


def make_row(config: RunFile, manifest: Manifest, digests: tuple[str, ...], norms: tuple[float, ...]) -> RunRow:
    """Return the first row of the ledger of a new run; raise ConfigError if there are more slaves than layers."""
    return RunRow(
        run=config.shared.run,
        config_digest=config.shared.digest,
        manifest=manifest.to_json(),
        placement=place_layers(manifest, [slave.name for slave in config.slaves]),
        genesis=digests,
        genesis_norms=norms,
        targets=config.make_options().targets,
    )


def fetch_initial(store: MirrorStore, run: str, directory: Path, *, model: bool = True) -> None:
    """Restore what is missing of the root of v0@r0 from the mirror; without `model` the shared options alone."""
    root, shared = directory / INITIAL, directory / INITIAL_SHARED
    make_directory(root)
    if (
        not shared.exists()
        and (content := insist(lambda: store.read_file(str(INITIAL_SHARED), MOST_SHARED_BYTES))) is not None
    ):
        write_durably(shared, content, shared.with_suffix(".tmp"))
    initial = store.subfolder(str(INITIAL))
    if model and not (directory / INITIAL_VERSION).exists() and GENESIS in list_versions(initial):
        bring_back(initial, root, run, "", GENESIS)


def mirror_initial(config: RunFile) -> None:
    """Copy the root of v0@r0 to the mirror; the model is not there if `dips seed` brings it."""
    store, directory = mirror_of(config), config.master.directory
    if store is None:
        return
    store.write_file(str(INITIAL_SHARED), (directory / INITIAL_SHARED).read_bytes())
    if (directory / INITIAL_VERSION).exists():
        copy_out(store.subfolder(str(INITIAL)), directory / INITIAL, GENESIS)


@contextmanager
def _unmirrored_if_failed(config: RunFile) -> Iterator[None]:
    """Remove that copy if an exception ends the context before the ledger is there: the next `dips init` would take it
    for a run.
    """
    try:
        yield
    except BaseException:
        if not ledger_path(config).exists():
            with suppress(FailedMirror):  # it fails already
                if (store := mirror_of(config)) is not None:
                    store.remove_path(str(INITIAL))
        raise


def find_mirrors(config: RunFile, force: bool) -> list[MirrorStore]:
    """Return the mirrors that hold anything of a run of this name; raise ConfigError if there are any, unless `force`.

    A slave that starts with an empty directory would restore from there. A slave's mirror that cannot be reached from
    here is skipped.
    """
    urls = [("master", config.master.mirror), *((slave.name, slave.mirror) for slave in config.slaves)]
    found = []
    for owner, store in ((o, MirrorStore(url, config.shared.run, o)) for o, url in urls if url is not None):
        try:
            if store.list_names():
                found.append(store)
        except FailedMirror as error:
            if owner == "master":
                raise ConfigError(f"master.mirror: {error}") from error
    if found and not force:
        places = ", ".join(store.url for store in found)
        raise ConfigError(
            f"mirror: a run of the name {config.shared.run!r} lies in {places} already. If it is this run, and its "
            "ledger was lost, start dips-master, which restores it; else take another shared.run, or throw it away "
            "with --force"
        )
    return found


def manifest_of(tensors: Mapping[str, Tensor], grouping: Grouping) -> Manifest:
    if not tensors:
        raise ConfigError("the model has no parameters")
    wrong = [f"{name} is {t.dtype}" for name, t in tensors.items() if t.dtype != np.float32]
    if wrong:
        raise ConfigError(f"expected parameters in float32, got: {join_some(wrong)}; convert the model first")
    broken = [name for name, t in tensors.items() if not np.isfinite(t).all()]
    if broken:
        raise ConfigError(f"expected finite parameters; not finite: {join_some(broken)}")
    empty = [name for name, t in tensors.items() if t.size == 0]
    if empty:
        raise ConfigError(f"expected parameters with elements; empty: {join_some(empty)}")
    manifest = Manifest.from_shapes(((name, t.shape) for name, t in tensors.items()), grouping)
    if unmatched := unmatched_patterns(manifest, grouping.share_buffers):
        raise ConfigError(
            f"shared.share_buffers: no tensor of the model has a name like {join_some(unmatched)}: --factory adds "
            "the buffers of its module, a file must hold them"
        )
    if (length := len(manifest.to_json())) > MAX_JSON_BYTES:
        raise ConfigError(
            f"expected names and shapes that take at most {MAX_JSON_BYTES} bytes as JSON, got {length} for "
            f"{len(tensors)} parameters: some 300,000 fit; fuse the experts of each block into one tensor"
        )
    if len(manifest.layers) > MOST_LAYERS:
        raise ConfigError(
            f"shared.layers: expected at most {MOST_LAYERS} layers, got {len(manifest.layers)}: `block` makes fewer "
            "than `module`"
        )
    return manifest


def layer_digest(layer: Layer, tensors: Mapping[str, Tensor]) -> str:
    """Return xxh3-128 of the layer's flat little-endian bytes, in manifest order, as a slave loads it for v0@r0."""
    digest = xxhash.xxh3_128()
    for parameter in layer.parameters:
        digest.update(np.ascontiguousarray(tensors[parameter.name], dtype="<f4").reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def layer_norm(layer: Layer, tensors: Mapping[str, Tensor]) -> float:
    return float(np.sqrt(sum(np.sum(np.square(tensors[p.name], dtype=np.float64)) for p in layer.parameters)))


def write_initial(config: RunFile, model: Manifest, tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write the root of version 0 with the run's options, replacing an existing one."""
    root = directory / INITIAL
    path, aside = root / str(GENESIS), root / f"{ASIDE}{GENESIS}"
    make_directory(root)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    flat = (_flatten_layer(layer, tensors) for layer in model.layers)
    layers = range(len(model.layers))
    write_version(aside, (config.shared.run, "", 0), GENESIS, model, layers, flat, momentum=False)
    put_version(aside, path)
    write_shared(config, directory)


def _flatten_layer(layer: Layer, tensors: Mapping[str, Tensor]) -> Tensor:
    return np.concatenate([np.ascontiguousarray(tensors[p.name], np.float32).reshape(-1) for p in layer.parameters])


@contextmanager
def hold_beginning(ledger: Path, force: bool = False) -> Iterator[None]:
    """Hold the lock of a ledger that is not there yet; raise ConfigError if it is. With `force` it is deleted instead,
    as is what its master noted of the mirror: that is thrown away, too.
    """
    with hold_ledger(ledger):
        for path in (ledger, ledger.parent / SEEN, ledger.parent / BOUND) if force else ():
            path.unlink(missing_ok=True)
        if ledger.exists():
            raise ConfigError(f"{ledger}: a ledger is here already; a run begins once")
        yield


def write_ledger(config: RunFile, row: RunRow, wall: Callable[[], float]) -> None:
    """Build the ledger aside and rename it: whatever ends this, there is none, or a complete one. The caller holds its
    lock.
    """
    path = ledger_path(config)
    aside = path.parent / BEGINNING
    shutil.rmtree(aside, ignore_errors=True)
    try:
        built = aside / path.name
        Ledger.create(built, row, wall).close()  # the last connection moves the WAL into the file
        put_in_place(built, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def put_initial(aside: Path, directory: Path) -> None:
    """Move the root of version 0 from another directory of this disk to its place, durably."""
    shutil.rmtree(directory / INITIAL, ignore_errors=True)
    (aside / INITIAL).rename(directory / INITIAL)
    sync_path(directory)


def write_shared(config: RunFile, directory: Path) -> None:
    """Write the shared options as a file, to name differences later."""
    path = directory / INITIAL_SHARED
    make_directory(path.parent)
    write_durably(path, json.dumps(config.shared.agreed, indent=1).encode(), path.with_suffix(".tmp"))

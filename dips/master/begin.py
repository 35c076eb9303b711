"""Creates the ledger of a run whose first model comes by `dips seed`: like `dips init`, without the model's bytes.

The ledger's file is built aside and renamed, so after a crash of the master there is none, or a complete one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from math import isfinite

from dips.config import RunFile
from dips.errors import ConfigError, RemoteProtocolError
from dips.fsync import make_directory
from dips.master import genesis
from dips.master.ledger import Ledger, hold_ledger, put_in_place
from dips.protocol.events import RunProposed
from dips.protocol.grouping import Grouping
from dips.protocol.manifest import Manifest
from dips.protocol.records import RunRow
from dips.protocol.seeding import describe_other_model
from dips.wire.packed_manifest import MOST_PACKED, pack_manifest, unpack_manifest

ASIDE = ".beginning"
BYTES_PER_LAYER = 42  # of a RunProposed: a digest of 32 digits with its head, and a norm
_DIGEST = re.compile("[0-9a-f]{32}")


def propose_run(tensors: Mapping[str, genesis.Tensor], grouping: Grouping) -> RunProposed:
    """Measure a model; raise ConfigError if it cannot be a run's: see `genesis.make_run`."""
    manifest = genesis.manifest_of(tensors, grouping)
    digests = tuple(genesis.layer_digest(layer, tensors) for layer in manifest.layers)
    norms = tuple(genesis.layer_norm(layer, tensors) for layer in manifest.layers)
    packed = pack_manifest(manifest)
    nbytes = len(packed) + BYTES_PER_LAYER * len(manifest.layers)
    if not packed or nbytes > MOST_PACKED:
        raise ConfigError(
            f"the names and shapes of this model, and what is measured of its {len(manifest.layers)} layers, take more "
            f"than {MOST_PACKED} bytes packed, which is all that one message brings: make the run by `dips init` "
            "where the master is, then `dips seed` brings the parameters"
        )
    return RunProposed(packed, manifest.digest, digests, norms)


def begin_run(config: RunFile, proposed: RunProposed, wall: Callable[[], float]) -> RunRow:
    """Write the ledger of a new run; return its first row.

    Errors  RemoteProtocolError, CorruptManifest: the proposal is no model; ConfigError: a ledger exists, a mirror holds
            a run of this name, more slaves than layers
    """
    path = genesis.ledger_path(config)
    genesis.find_mirrors(config, force=False)
    manifest = _check_proposed(config, proposed)
    row = genesis.make_row(config, manifest, proposed.genesis, proposed.genesis_norms)
    make_directory(config.master.directory)
    with hold_ledger(path):
        if path.exists():
            raise ConfigError(f"{path}: a ledger is here already; a run begins once")
        genesis.write_listings(config, manifest, config.master.directory)
        genesis.mirror_initial(config)
        _write_ledger(config, row, wall)
    return row


def check_repeated(row: RunRow, proposed: RunProposed) -> None:
    """Raise ConfigError unless the run, which has begun, began with this model."""
    if problem := describe_other_model(Manifest.from_json(row.manifest), row.genesis, proposed.genesis):
        raise ConfigError(f"{problem}; a new run takes another shared.run and empty directories")


def _check_proposed(config: RunFile, proposed: RunProposed) -> Manifest:
    manifest = Manifest.from_json(unpack_manifest(proposed.packed, proposed.digest))
    shapes = ((p.name, p.shape) for layer in manifest.layers for p in layer.parameters)
    ours = Manifest.from_shapes(shapes, config.shared.grouping)
    if not manifest.numel or ours.digest != manifest.digest:
        raise RemoteProtocolError("manifest: expected layers as this version of Di-PS groups parameters, got others")
    count, digests, norms = len(manifest.layers), proposed.genesis, proposed.genesis_norms
    if len(digests) != count or len(norms) != count:
        raise RemoteProtocolError(f"expected {count} digests and norms, got {len(digests)} and {len(norms)}")
    if not all(map(_DIGEST.fullmatch, digests)):
        raise RemoteProtocolError("genesis: expected digests of 32 hexadecimal digits")
    if not all(map(isfinite, norms)):
        raise RemoteProtocolError("genesis_norms: expected finite numbers")
    return manifest


def _write_ledger(config: RunFile, row: RunRow, wall: Callable[[], float]) -> None:
    path = genesis.ledger_path(config)
    aside = path.parent / ASIDE
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        built = aside / path.name
        Ledger.create(built, row, wall).close()  # the last connection moves the WAL into the file
        put_in_place(built, path)
    finally:
        shutil.rmtree(aside, ignore_errors=True)

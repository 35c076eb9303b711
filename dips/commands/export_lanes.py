"""`dips export --master`: pulls a version over the lanes, from any host, directly into the file."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

from dips.client.version_pull import pull_version
from dips.errors import ConfigError
from dips.files import sync_path, write_aside
from dips.ids import VersionId
from dips.protocol.manifest import Manifest
from dips.store import tensorfile
from dips.transport.endpoints import Endpoint

NAME = "export"  # cluster name of the puller; two pullers with one name would fence each other


def export_over_lanes(master: Endpoint, version: VersionId | None, output: Path, name: str = NAME) -> VersionId:
    """Write a version of the run of `master`, None: the head. Raises ConfigError if it is no longer kept."""

    def make_room(aside: Path, run: str, granted: VersionId, manifest: Manifest) -> tensorfile.F32:
        shapes = [(p.name, p.shape) for layer in manifest.layers for p in layer.parameters]
        return tensorfile.map_new(aside, {"format": "pt", "run": run, "version": str(granted)}, shapes)

    if master.tls is not None:
        name = master.tls.read_current().identity.cluster_name
    try:
        with write_aside(output) as aside:
            pulled = asyncio.run(pull_version(master, name, partial(make_room, aside), version))
            sync_path(aside)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written: {error}") from error
    return pulled.version

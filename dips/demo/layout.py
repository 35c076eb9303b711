"""The files of a demo: its directories, and the YAML files that an operator would write by hand."""

from __future__ import annotations

import shutil
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dips.config.reading import load_file, read_yaml
from dips.config.shared import Shared
from dips.errors import ConfigError
from dips.files import explain_unwritable
from dips.identity.names import MASTER_NAME, PeerRole
from dips.identity.paths import REVOCATIONS, ROOT
from dips.local import run as local
from dips.local.run import LOGS

RUN, MIRROR = "demo", "mirror"
SLAVES = ("slave-0", "slave-1")
CLUSTERS = ("fast", "slow")
TLS = "certs/{name}.{role}.crt"  # as in docs/guides/certificates.md
FULL_S = 150.0  # shorter demos have fewer checks and shorter rounds
INNER_STEPS = 16  # H: about three seconds on two cores, so that a run of minutes has many outer steps
INNER_STEPS_AT_A_GLANCE = 8  # for shorter demos; a busy machine takes a second per step

SHARED: dict[str, Any] = {
    # The paper's clip φ = 1 bounds an outer step to 3.5 at any model size. H steps of AdamW at 3e-3 move this model by
    # a norm of about twenty, so φ = 1 would starve it. Twice the running median only stops outliers.
    # A run of minutes has few outer steps, for which μ = 0.8 is long: docs/guides/choosing.md#tried-and-given-up.
    "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}},
}
OWN_KEYS = frozenset({"run", "stop", "data"})  # keys of `shared` that a preset does not override
EVALUATE_EVERY = 10  # versions, about half a minute
EVALUATE_S = "120"  # timeout of an evaluation, on cores that also train
HEARTBEAT_S = 1.0  # the display updates once a second; five missed heartbeats end a lease and an order
WINDOW_S = 1.0  # of a round of about three seconds


@dataclass(frozen=True, slots=True)
class DemoLayout:
    """The paths of all files of a demo."""

    directory: Path

    @property
    def run_file(self) -> Path:
        return self.directory / "dips.yaml"

    @property
    def master_directory(self) -> Path:
        return self.directory / "master"

    @property
    def initial_model(self) -> Path:
        return self.master_directory / "initial" / "v0@r0"

    @property
    def exported_file(self) -> Path:
        return self.directory / "model.safetensors"

    @property
    def exported_directory(self) -> Path:
        return self.directory / "model-hf"

    @property
    def saved_file(self) -> Path:
        return self.directory / "saved.safetensors"

    def slave_directory(self, name: str) -> Path:
        return self.directory / name

    def slave_mirror(self, name: str) -> Path:
        return self.directory / MIRROR / RUN / name

    def cluster_file(self, name: str) -> Path:
        return self.directory / f"{name}.yaml"

    def timeline_file(self, name: str) -> Path:
        return self.directory / name / "timeline.jsonl"


def make_layout(out: Path | None) -> DemoLayout:
    """Make the directories of a demo. Raises ConfigError if `out` exists and is not empty, or cannot be made."""
    directory = (out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    with explain_unwritable(f"--out {directory}"):
        if directory.exists() and any(directory.iterdir()):
            raise ConfigError(f"--out: {directory} is not empty: name a new directory")
        (directory / LOGS).mkdir(parents=True)
    return DemoLayout(directory)


def read_preset(path: Path | None) -> dict[str, Any]:
    """Return the keys of a `shared` section except for name, end and data of the run; None: the demo's own."""
    if path is None:
        return SHARED
    load_file(path, Shared)  # raises the errors that the daemons would
    return {key: value for key, value in read_yaml(path).items() if key not in OWN_KEYS}


def write_configs(
    layout: DemoLayout,
    ranges: int,
    tokens: int,
    wall_s: float,
    mirror: bool = False,
    seed: int = 0,
    secure: bool = False,
    preset: Path | None = None,
) -> str:
    """Write dips.yaml and a cluster file for each cluster; return the master's address.

    ranges  number of ranges of the data set
    seed    of the corpus, for the evaluation of versions
    secure  use certificates instead of plain text
    preset  a `shared` section whose rules replace the demo's
    mirror  master and slaves copy their state into `mirror/`, which represents another disk
    tokens  target of the run and of the learning-rate schedule; the run ends there, or after `wall_s` of one master
    """
    address = f"127.0.0.1:{_free_port()}"
    spoken = {"tls": TLS if secure else False}
    shared = {
        "run": RUN,
        **read_preset(preset),
        "heartbeat_s": HEARTBEAT_S,
        "stop": {"tokens": tokens, "wall_s": wall_s},
        "data": {"ranges": ranges},
    }
    _dump_yaml(layout.directory / "shared.yaml", shared)
    mirrored = {"mirror": MIRROR} if mirror else {}
    if mirror:
        (layout.directory / MIRROR).mkdir()
    slaves = [
        {
            **mirrored,
            "name": name,
            "master": address,
            "directory": name,
            "initial_model": "master/initial",
        }
        for name in SLAVES
    ]
    evaluate = {
        "every": EVALUATE_EVERY,
        "command": ["timeout", EVALUATE_S, sys.executable, "-m", "dips.demo.evaluate", str(seed)],
    }
    master = {
        "listen": address,
        "directory": "master",
        "timing": {"window_s": WINDOW_S},
        "keep_every": EVALUATE_EVERY,
        "on_version": evaluate,
        **mirrored,
    }
    run_file = {"shared": "shared.yaml", "master": master, "slaves": slaves, **spoken}
    _dump_yaml(layout.run_file, run_file)
    for name in CLUSTERS:
        cluster = {
            "shared": "shared.yaml",
            "cluster": name,
            "master": address,
            "pace": {"aligned": INNER_STEPS if wall_s >= FULL_S else INNER_STEPS_AT_A_GLANCE},
            "directory": name,
            **spoken,
        }
        _dump_yaml(layout.cluster_file(name), cluster)
    return address


def _dump_yaml(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def _free_port() -> int:
    """Ask the kernel for a free port; master and clusters must know it before the master opens it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# ---- certificates ---------------------------------------------------------------------------------------------------
# Made for `--secure` by the commands of docs/guides/certificates.md. One directory represents all machines: really the
# authority's `ca/` is elsewhere, and each machine has its own key.


AUTHORITY, CERTIFICATES = "ca", "certs"  # directories
VIEWER = "watch"  # name in the certificate by which the demo reads the status
_ENROLLED = (
    (MASTER_NAME, PeerRole.MASTER),
    *((name, PeerRole.SLAVE) for name in SLAVES),
    *((name, PeerRole.CLUSTER) for name in CLUSTERS),
    (PeerRole.OPERATOR.value, PeerRole.OPERATOR),
    (VIEWER, PeerRole.VIEWER),
)


def make_certificates(files: DemoLayout) -> int:
    """Make an authority and a certificate for each process and for the viewer; return their number."""
    authority, directory = files.directory / AUTHORITY, files.directory / CERTIFICATES
    local.run_word("certs", "init", str(authority), "--run", RUN)
    for name, role in _ENROLLED:
        local.run_word("certs", "request", name, "--role", role, "--run", RUN, "--out", str(directory))
        request = str(directory / f"{name}.{role}.csr")
        local.run_word("certs", "issue", str(authority), request, "--as", f"{name}.{role}")
    for name in (ROOT, REVOCATIONS):
        shutil.copyfile(authority / name, directory / name)
    return len(_ENROLLED)


def viewer_file(files: DemoLayout) -> Path:
    """Return the certificate by which the demo itself asks the master."""
    return files.directory / CERTIFICATES / f"{VIEWER}.{PeerRole.VIEWER}.crt"

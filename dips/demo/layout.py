"""The files of one demo: its directories, and the same YAML that an operator would write by hand."""

from __future__ import annotations

import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dips.config.reading import load_file, read_yaml
from dips.config.shared import Shared
from dips.errors import ConfigError

RUN, MIRROR = "demo", "mirror"
SLAVES = ("slave-0", "slave-1")
CLUSTERS = ("fast", "slow")
TLS = {  # as docs/guides/certificates.md has it
    "ca": "certs/ca.crt",
    "cert": "certs/{name}.{role}.crt",
    "key": "certs/{name}.{role}.key",
    "crl": "certs/crl.pem",
}
FULL_S = 150.0  # what is shorter is a glance
INNER_STEPS = 16  # H: about three seconds on two cores, so that a run of minutes has many outer steps
INNER_STEPS_AT_A_GLANCE = 8  # a busy machine takes a second for each

SHARED: dict[str, Any] = {
    # The paper's clip φ = 1 bounds an outer step to 3.5 at any model size. H steps of AdamW at 3e-3 move this model by
    # a norm of about twenty, so φ = 1 would starve it. Twice the running median only stops what is out of line.
    # A run of minutes has few outer steps, for which μ = 0.8 is long: docs/guides/choosing.md#tried-and-given-up.
    "outer": {"lr": 0.7, "momentum": 0.5, "clip": {"relative": 2.0}},
}
OWN_KEYS = frozenset({"run", "stop", "data"})  # of `shared`: the demo's, whatever the preset
EVALUATE_EVERY = 10  # versions: half a minute
EVALUATE_S = 120.0  # at most, on cores that train meanwhile
TIMING = {
    "window_s": 1.0,  # of a round of about three seconds
    "heartbeat_s": 1.0,  # the picture moves once a second; five of silence end a lease and an order
    "hang_s": 30.0,
    "compute_s": 20.0,
    "transfer_s": 30.0,
}


@dataclass(frozen=True, slots=True)
class DemoLayout:
    """Where everything of one demo is."""

    directory: Path
    sockets: Path  # a short path: a Unix socket's is limited to about a hundred bytes

    @property
    def run_file(self) -> Path:
        return self.directory / "dips.yaml"

    @property
    def master_directory(self) -> Path:
        return self.directory / "master"

    @property
    def initial_model(self) -> Path:
        return self.master_directory / "initial" / "model.safetensors"

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

    def cluster_directory(self, name: str) -> Path:
        return self.directory / name

    def cluster_file(self, name: str) -> Path:
        return self.directory / f"{name}.yaml"

    def timeline_file(self, name: str) -> Path:
        return self.directory / name / "timeline.jsonl"

    def log_file(self, name: str) -> Path:
        return self.directory / "logs" / f"{name}.log"


def make_layout(out: Path | None) -> DemoLayout:
    """Make the directories of a demo; raise ConfigError if `out` is there already and not empty."""
    directory = (out or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"--out: {directory} is not empty: name a new directory")
    (directory / "logs").mkdir(parents=True)
    return DemoLayout(directory, Path(tempfile.mkdtemp(prefix="dips-")))


def read_preset(path: Path | None) -> dict[str, Any]:
    """What a run with this `shared` section agrees on, but for its name, its end and its data; None: the demo's own."""
    if path is None:
        return SHARED
    load_file(path, Shared)  # refuses by name what the daemons would
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

    ranges  of the data set
    seed    of the corpus, for those who evaluate versions
    secure  with certificates, in place of plain text
    preset  a `shared` section whose rules take the place of the demo's
    mirror  master and slaves copy what they have into `mirror/`, which stands for another disk
    tokens  target of the learning-rate schedule; the run ends there or after `wall_s` of the master's incarnation
    """
    address = f"127.0.0.1:{_free_port()}"
    spoken: dict[str, Any] = {"tls": TLS} if secure else {"insecure": True}
    shared = {
        "run": RUN,
        **read_preset(preset),
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
            "initial_model": "master/initial/model.safetensors",
            "threads": 1,  # the cores belong to the trainers
        }
        for name in SLAVES
    ]
    evaluate = {"every": EVALUATE_EVERY, "command": [sys.executable, "-m", "dips.demo.evaluate", str(seed)]}
    master = {
        "listen": address,
        "directory": "master",
        "timing": TIMING,
        "keep_every": EVALUATE_EVERY,
        "on_version": {**evaluate, "timeout_s": EVALUATE_S},
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
            "socket": str(layout.sockets / f"{name}.sock"),
            "heartbeat_s": TIMING["heartbeat_s"],
            "retry_s": 5.0,
            **spoken,
        }
        _dump_yaml(layout.cluster_file(name), cluster)
    return address


def _dump_yaml(path: Path, content: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def _free_port() -> int:
    """Ask the kernel for a port that nobody has; master and clusters must know it before the master has it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port

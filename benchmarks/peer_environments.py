"""Environments of peers: each is installed by pip into one of its own, since they want other versions of everything.

They lie in a cache folder and are made once. One that cannot be had is a sentence, which its benchmarks print as a row.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dips-bench" / "peers"
INSTALL_S = 20 * 60.0
DONE = "installed"  # the file that says so


@dataclass(frozen=True, slots=True)
class PeerPackages:
    """What pip installs, and what must be importable then; `reason`: why it is not even tried."""

    packages: tuple[str, ...] = ()
    module: str = ""
    reason: str = ""


PEERS = {
    "torchft": PeerPackages(("torch==2.13.0", "torchft==0.2.0", "numpy"), "torchft"),
    "hivemind": PeerPackages(("torch==2.13.0", "hivemind==1.1.12"), "hivemind"),
    "flower": PeerPackages(("flwr==1.42.0", "numpy"), "flwr"),
    "forgather": PeerPackages(
        reason="not run: it is on no package index, and the newest state that could be had (f92f8b8, 2026-02) "
        "has no DiLoCo and asks for Python 3.12"
    ),
}


def make_environment(peer: str, cache: Path, say: Callable[[str], None]) -> tuple[Path | None, str]:
    """Return the interpreter of a peer's environment, made if there is none; or None and why there is none."""
    wanted = PEERS[peer]
    if wanted.reason:
        return None, wanted.reason
    directory = cache / peer
    python = directory / "bin" / "python"
    if (directory / DONE).exists() and (directory / DONE).read_text() == " ".join(wanted.packages):
        return python, ""
    say(f"{peer}: pip installs {' '.join(wanted.packages)} into {directory}")
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(directory)],
        [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check", *wanted.packages],
        [str(python), "-c", f"import {wanted.module}"],
    )
    try:
        for command in commands:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        return None, f"does not install within {INSTALL_S:g} s"
    except subprocess.CalledProcessError as error:
        lines = (error.stderr or error.stdout or "").strip().splitlines()
        return None, f"does not install: {lines[-1] if lines else f'exit code {error.returncode}'}"
    (directory / DONE).write_text(" ".join(wanted.packages))
    return python, ""

"""podman on this machine: its root may lack rights that podman takes for granted, and that containers here do not need.

* no CAP_SYS_RESOURCE: limits of processes are left as they are (crun would raise them and fail)
* cgroups of both versions at once: crun refuses that, so it sees those of version 1 alone, in a mount namespace
"""

from __future__ import annotations

import os
import shutil
import subprocess
import textwrap
from collections.abc import Iterable
from pathlib import Path

CACHE = Path(
    os.environ.get("DIPS_DEPLOY_CACHE", Path.home() / ".cache" / "dips" / "deploy")
)  # base, wheels: no tree of ours
TOOLS = ("podman", "crun", "nft", "ip", "unshare", "mmdebstrap")
HYBRID = Path("/sys/fs/cgroup/unified")
COMMAND_S = 600.0

_CRUN = """\
#!/usr/bin/env python3
import json, os, sys

def edit(path, find):
    with open(path) as file:
        content = json.load(file)
    find(content).pop("rlimits", None)
    with open(path, "w") as file:
        json.dump(content, file)

words = sys.argv[1:]
after = dict(zip(words, words[1:]))
if "create" in words or "run" in words:
    bundle = after.get("--bundle") or after.get("-b") or "."
    edit(os.path.join(bundle, "config.json"), lambda config: config["process"])
elif "exec" in words and ("--process" in after or "-p" in after):
    edit(after.get("--process") or after["-p"], lambda process: process)
os.execv("{crun}", ["crun", *words])
"""


def find_missing() -> str | None:
    """What this machine lacks to run containers, or None."""
    if os.geteuid() != 0:
        return "only root may make network namespaces and containers"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    return f"{', '.join(missing)} not found: apt install podman crun nftables iproute2 mmdebstrap" if missing else None


def run_podman(*words: str, within_s: float = COMMAND_S, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run podman; raise RuntimeError with what it said."""
    hide = f"umount {HYBRID} 2>/dev/null; " if HYBRID.exists() else ""
    command = ["unshare", "--mount", "sh", "-c", hide + 'exec podman "$@"', "podman", *words]
    environment = {**os.environ, "CONTAINERS_CONF": str(_write_configuration())}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=within_s,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise RuntimeError(f"podman {' '.join(words[:3])}…: {(done.stdout + done.stderr)[-2000:]}")
    return done


def has_image(name: str) -> bool:
    return run_podman("image", "exists", name, check=False).returncode == 0


def remove_containers(names: Iterable[str]) -> None:
    if names := list(names):
        run_podman("rm", "--force", "--time", "5", "--ignore", *names, check=False)


def _write_configuration() -> Path:
    directory = CACHE / "podman"
    directory.mkdir(parents=True, exist_ok=True)
    crun = directory / "crun"
    aside = directory / f"crun.{os.getpid()}"
    aside.write_text(_CRUN.replace("{crun}", shutil.which("crun") or "/usr/bin/crun"))
    aside.chmod(0o755)
    aside.replace(crun)
    configuration = directory / "containers.conf"
    configuration.write_text(
        textwrap.dedent(f'''\
            [containers]
            log_size_max = 16777216
            [engine]
            runtime = "crun"
            cgroup_manager = "cgroupfs"
            events_logger = "file"
            [engine.runtimes]
            crun = ["{crun}"]
        ''')
    )
    return configuration

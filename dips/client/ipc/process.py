"""Process names that are unique across hosts, containers and reboots; an agent passes its own on by the environment."""

from __future__ import annotations

import os
from pathlib import Path

AGENT_PID, AGENT_HOME = "DIPS_AGENT_PID", "DIPS_AGENT_HOME"


def process_home() -> str:
    """Return the scope in which this process's id is valid: this boot of this machine, this PID namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def process_name() -> str:
    """Return a unique name of this process: ids alone are reused, in containers soon."""
    began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # ticks since boot
    return f"{process_home()}/{os.getpid()}/{began}"

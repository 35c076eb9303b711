"""All options of the daemons: reads YAML, rejects unknown keys, hashes the options on which all must agree.

There are two files. The *run file* (`dips.yaml`) is read by master and slaves; `dips init` makes the run from it. The
*cluster file* (`cluster.yaml`) is read by one training cluster. Both hold the section `shared`, inline or as the path
of a third file: the options on which all must agree, compared by digest at Join.
"""

from dips.config.cluster import ClusterFile, load_cluster
from dips.config.run import AUTO_LANES, MasterSection, OnVersionSection, RunFile, SlaveSection, TrackSection, load_run
from dips.config.section import STALL_HEARTBEATS, host_port, is_loopback
from dips.config.shared import Shared

__all__ = [
    "AUTO_LANES",
    "STALL_HEARTBEATS",
    "ClusterFile",
    "MasterSection",
    "OnVersionSection",
    "RunFile",
    "Shared",
    "SlaveSection",
    "TrackSection",
    "host_port",
    "is_loopback",
    "load_cluster",
    "load_run",
]

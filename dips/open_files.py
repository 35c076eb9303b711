"""How many files and connections this process may have open: raised at its start, and held against what it is to do.

A connection is an open file. Shells and systemd start processes with a soft limit of 1,024 and a hard limit far above
it; libzmq aborts the process when it meets the limit. Children inherit what is raised.
"""

from __future__ import annotations

import resource

from dips.errors import ConfigError

OWN_FILES = 128  # of a daemon without any peer: libraries, logs, ledger or snapshots, listening ports, event loops
HOW = "raise the hard limit: LimitNOFILE= of its systemd unit, `ulimit -Hn` as root, --ulimit nofile of a container"


def raise_open_files(connections: int, peers: str) -> str:
    """Raise the soft limit to the hard one; return a warning if it does not suffice, "" if it does.

    connections  that may be open at once
    peers        what they are, for the message: "256 ranks on each of 4 lanes"
    Errors       ConfigError: it does not even suffice without any connection
    """
    limit, needed = _raise_soft_limit(), OWN_FILES + connections
    if limit >= needed:
        return ""
    text = f"expected a limit of at least {needed} open files, for {peers}, got {limit}: {HOW}"
    if limit < OWN_FILES:
        raise ConfigError(f"open files: {text}")
    return text


def _raise_soft_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return _as_count(soft)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # unlimited by name, and not by the kernel (fs.nr_open)
        return _as_count(soft)
    return _as_count(hard)


def _as_count(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit

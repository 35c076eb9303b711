"""Common parts of the daemons: certificates, open files, signals, systemd, HTTP port, and watching their file.

`dips-master`, `dips-slave` and `dips-client` are each built in their own app.py and call these functions in the order
of a process's life. Each function returns its own undoing, or registers it on the caller's exit stack.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from dips.config.watching import ConfigWatch, File, describe_keys, keep_watching
from dips.errors import ConfigError
from dips.http import HttpSubject
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.tasks import Fail, start_task
from dips.telemetry import logs
from dips.transport.tls import TlsSource

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

OWN_FILES = 128  # open files of a daemon without peers: libraries, logs, ledger or snapshots, ports, event loops
HOW = "raise the hard limit: LimitNOFILE= of its systemd unit, `ulimit -Hn` as root, --ulimit nofile of a container"
END_SIGNALS = (signal.SIGTERM, signal.SIGINT)


# ---- certificates ---------------------------------------------------------------------------------------------------


def open_certificates(files: TlsFiles | None, name: str, role: PeerRole, run: str, log: logs.Log) -> TlsSource | None:
    """Return this process's certificate, read again when its files change; None if the configuration has no `tls`."""
    if files is None:
        return None
    return TlsSource(files, name, role, run, lambda problem: log.warning("certificate", problem=problem))


# ---- open files -----------------------------------------------------------------------------------------------------


def raise_open_files(connections: int, peers: str, log: logs.Log) -> None:
    """Raise the soft limit of open files to the hard limit, and warn if it is too low for the peers.

    Shells and systemd start processes with a soft limit of 1,024 and a hard limit far above it; libzmq aborts the
    process when it meets the limit. Child processes inherit the raised limit.

    connections  that may be open at once; each is an open file
    peers        description of the peers for the message: "256 ranks on each of 4 lanes"
    Errors       ConfigError: the limit is too low even without connections
    """
    limit, needed = _raise_soft_limit(), OWN_FILES + connections
    if limit >= needed:
        return
    text = f"expected a limit of at least {needed} open files, for {peers}, got {limit}: {HOW}"
    if limit < OWN_FILES:
        raise ConfigError(f"open files: {text}")
    log.warning("open_files", problem=text)


def _raise_soft_limit() -> int:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (ValueError, OSError):  # "unlimited", which the kernel refuses (fs.nr_open)
        return _as_count(soft)
    return _as_count(hard)


def _as_count(limit: int) -> int:
    return 1 << 62 if limit == resource.RLIM_INFINITY else limit


# ---- signals --------------------------------------------------------------------------------------------------------


def handle_end_signals(on_end: Callable[[], object]) -> None:
    """Call `on_end` on the running loop at SIGTERM and SIGINT until the process ends: a second signal must not cut an
    orderly end short.
    """
    for number in END_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, on_end)


@contextmanager
def end_signals(on_end: Callable[[], object]) -> Iterator[None]:
    """Call `on_end` likewise, as long as the context lasts."""
    handle_end_signals(on_end)
    try:
        yield
    finally:
        for number in END_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


def ignore_hangups() -> None:
    """Let SIGHUP end nothing until `watch_file` hears it: it asks to look at a file that is read later anyway."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, lambda: None)


# ---- systemd --------------------------------------------------------------------------------------------------------


class SystemdLink:
    """Messages to systemd from a unit of `Type=notify` (sd_notify(3)): it serves, its event loop runs, it stops. A
    process that systemd has not started so sends nothing.

    With `WatchdogSec=` a daemon whose loop stands still is killed and started again: a supervisor that looks at exit
    codes alone would never know.
    """

    def __init__(self) -> None:
        address = os.environ.pop("NOTIFY_SOCKET", "")  # what this process starts must not speak for it
        self._beat_s = int(os.environ.pop("WATCHDOG_USEC", "0")) / 2e6
        self._beating: asyncio.Task[None] | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        if self._socket:
            self._socket.connect(f"\0{address[1:]}" if address.startswith("@") else address)

    def __enter__(self) -> SystemdLink:
        return self

    def __exit__(self, *_: object) -> None:
        self._send("STOPPING=1")  # the watchdog goes on: an end that hangs is a hang
        if self._socket:
            self._socket.close()
            self._socket = None

    def say_ready(self) -> None:
        """Say that this daemon does its work, and from now on, as often as the watchdog asks, that its loop runs."""
        self._send("READY=1")
        if self._socket and self._beat_s and self._beating is None:
            self._beating = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while self._socket:
            self._send("WATCHDOG=1")
            await asyncio.sleep(self._beat_s)

    def _send(self, state: str) -> None:
        if self._socket:
            with suppress(OSError):  # systemd is starting anew, or has not read for a while: the next one counts
                self._socket.send(state.encode())


# ---- the HTTP port --------------------------------------------------------------------------------------------------


async def open_http(
    address: str | None,
    token: Path | None,
    tls: TlsSource | None,
    subject: HttpSubject,
    log: logs.Log,
    stack: AsyncExitStack,
    routes: Sequence[BaseRoute] = (),
) -> None:
    """Open the HTTP port if there is an address; the stack closes it. The server is imported only if needed (0.1 s).

    Raises ConfigError if the port or the token is not usable.
    """
    if address is None:
        return
    from dips.http.daemon import serve_http

    stack.push_async_callback(await serve_http(address, token, tls, subject, log, routes))


def list_disks(directory: Path, mirror: str | None) -> dict[str, Path]:
    """Return the directories whose disks the metrics show; a mirror given as a URL has none."""
    local = {} if mirror is None or "://" in mirror else {"mirror": Path(mirror)}
    return {"directory": directory, **local}


# ---- watching the daemon's file -----------------------------------------------------------------------------


def watch_file(
    kind: str,
    path: Path,
    config: File,
    load: Callable[[Path], File],
    log: logs.Log,
    fail: Fail,
    *,
    fixed_level: bool,
    changeable: Collection[str] = (),
    ignored: Collection[str] = (),
    apply: Callable[[File, list[str], str], None] = lambda config, keys, told: None,
    on_hangup: bool = True,
) -> asyncio.Task[None]:
    """Take over changed keys while the daemon runs, and log why other changes are not used; runs until cancelled.

    kind         "run file" or "cluster file", for the log
    fail         called with the exception that ends the task, which is a bug
    fixed_level  the command line set the log level, so the file does not change it
    changeable   top-level keys that `apply` takes over, besides `log_level`
    ignored      patterns of keys that belong to other processes
    apply        called with the new file, the keys to take over, and a description of them for a log
    on_hangup    check at once on SIGHUP; false if SIGHUP must end the process, as when a job's terminal is closed
    """

    def take_over(new: File, keys: list[str]) -> None:
        if "log_level" in keys and not fixed_level:
            logs.set_level(getattr(new, "log_level"))  # noqa: B009 (every daemon's file has it; Section does not)
        told = describe_keys(new, keys)
        log.info(f"{kind} taken over", changed=told)
        apply(new, keys, told)

    hurry = asyncio.Event()
    if on_hangup:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, hurry.set)
    report = lambda problem: log.warning(kind, problem=problem)  # noqa: E731
    watch = ConfigWatch(path, config, load, ("log_level", *changeable), report, ignored)
    return start_task(keep_watching(watch, take_over, hurry), fail)

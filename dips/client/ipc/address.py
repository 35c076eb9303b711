"""The address of a job's agent: a Unix socket on its own host, TCP with a token from the job's other hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dips.config import ClusterFile, host_port
from dips.dataclass import dataclass
from dips.errors import ConfigError
from dips.files import require_private

# ---- process --------------------------------------------------------------------------------------------------------


AGENT_PID, AGENT_HOME = "DIPS_AGENT_PID", "DIPS_AGENT_HOME"


def process_home() -> str:
    """Return the scope in which this process's id is valid: this boot of this machine, this PID namespace."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"


def process_name() -> str:
    """Return a unique name of this process: ids alone are reused, in containers soon."""
    began = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]  # ticks since boot
    return f"{process_home()}/{os.getpid()}/{began}"


# ---- address --------------------------------------------------------------------------------------------------------
# The address of a job's agent: a Unix socket on its own host, TCP with a token from the job's other hosts.
#
#     DIPS_AGENT=unix:/path/agent.sock     set by the agent for the command that it starts, or
#     DIPS_AGENT=tcp://HOST:PORT           set by the launcher of ranks on other hosts; the agent reads it, too
#     DIPS_AGENT_TOKEN=…                   the job's token, at least LEAST_TOKEN characters; or the file `token`
#
# Without DIPS_AGENT: the cluster file's `agent`, else the Unix socket in its directory. Opens no socket.


AGENT, TOKEN = "DIPS_AGENT", "DIPS_AGENT_TOKEN"
PID_FILE = "agent.pid"  # in the agent's directory, held while it runs
MOST_PATH = 107  # bytes in a Unix socket's path, a limit of Linux
LEAST_TOKEN = 16  # characters; `openssl rand -hex 32` makes 64


@dataclass(frozen=True, slots=True)
class OnThisHost:
    """The address of an agent by its Unix socket."""

    path: Path
    named_by: str  # the key or variable that gives it, for error messages

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True, slots=True)
class OnAnyHost:
    """The address of an agent by its TCP port; a rank that connects must know the token."""

    host: str
    port: int
    token: bytes
    named_by: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    def __repr__(self) -> str:
        return f"OnAnyHost({self})"  # without the token


Address = OnThisHost | OnAnyHost


def find_address(config: ClusterFile, environment: Mapping[str, str] = os.environ) -> Address:
    """Return the address on which a rank connects to its agent. Raises ConfigError if the given one cannot be used."""
    remote = over_network(config, environment)
    if remote is not None:
        token = token_of(config, environment)
        if token is None:
            raise ConfigError(
                f"{remote[2]}: ranks that dial the agent need the job's token: set {TOKEN}, as the agent has it, or "
                "name its file under the key `token`"
            )
        return OnAnyHost(remote[0], remote[1], token, remote[2])
    named = environment.get(AGENT, "")
    return (
        OnThisHost(Path(named.removeprefix("unix:")), AGENT) if named else OnThisHost(socket_path(config), "directory")
    )


def over_network(config: ClusterFile, environment: Mapping[str, str] = os.environ) -> tuple[str, int, str] | None:
    """Return host and port of the agent for ranks of other hosts, and the key or variable that gives them; None for one
    host.
    """
    named = environment.get(AGENT, "")
    if named.startswith("unix:") or not (named or config.agent):
        return None
    named_by, address = (AGENT, named.removeprefix("tcp://")) if named else ("agent", _filled_in(config, environment))
    if named and address == named:
        raise ConfigError(f"{AGENT}: expected tcp://HOST:PORT or unix:/PATH, got {named!r}")
    try:
        return (*host_port(address), named_by)
    except ConfigError as error:
        raise ConfigError(f"{named_by}: {error}") from error


def token_of(config: ClusterFile, environment: Mapping[str, str] = os.environ) -> bytes | None:
    """Return the job's token, None if none is given. Raises ConfigError if it is too short or its file cannot
    be read.
    """
    text, named_by = environment.get(TOKEN, ""), TOKEN
    if not text and config.token:
        named_by = f"token: {config.token}"
        try:
            require_private(config.token, "token")
            text = config.token.read_text().strip()
        except OSError as error:
            raise ConfigError(f"{named_by}: cannot be read: {error.strerror}") from error
    elif not text:
        return None
    if len(text) < LEAST_TOKEN:
        raise ConfigError(f"{named_by}: expected at least {LEAST_TOKEN} characters, got {len(text)}")
    return text.encode()


def socket_path(config: ClusterFile) -> Path:
    """Return the path of the Unix socket."""
    return (config.directory / "agent.sock").absolute()


@contextmanager
def reach_socket(path: Path) -> Iterator[str]:
    """Yield a name of the socket that the kernel accepts: the path, or a short one by its open directory."""
    if len(str(path).encode()) <= MOST_PATH:
        yield str(path)
        return
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


def _filled_in(config: ClusterFile, environment: Mapping[str, str]) -> str:
    """Fill in the host of `$MASTER_ADDR:29410` from the variable, which torchrun and its launchers set."""
    assert config.agent is not None
    host, colon, port = config.agent.rpartition(":")
    if not host.startswith("$"):
        return config.agent
    value = environment.get(host.strip("${}"), "")
    if not value:
        raise ConfigError(f"agent: {config.agent} names the variable {host.strip('${}')}, which is not set here")
    return f"[{value}]{colon}{port}" if ":" in value else f"{value}{colon}{port}"

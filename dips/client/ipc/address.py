"""The address of a job's agent, a Unix socket or TCP, and the seal of messages between hosts."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from dips.config import ClusterFile, host_port
from dips.dataclass import dataclass
from dips.errors import ConfigError, Denied, RemoteProtocolError
from dips.files import read_boot_id, require_private

# ---- process --------------------------------------------------------------------------------------------------------


AGENT_PID, AGENT_HOME = "DIPS_AGENT_PID", "DIPS_AGENT_HOME"


def process_home() -> str:
    """Return the scope in which this process's id is valid: this boot of this machine, this PID namespace."""
    return f"{read_boot_id()}/{os.readlink('/proc/self/ns/pid')}"


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
RESOLVE_S = 60.0  # the name of a pod is resolvable only some seconds after its start
AGAIN_S = 1.0  # between two looks for it


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
    text, named_by = environment.get(TOKEN, "").strip(), TOKEN
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


# ---- seal ------------------------------------------------------------------------------------------------------------
# Each end sends a nonce and proves the token over both nonces; then every message has a tag made with a key of this
# connection alone, its direction and its number, so that messages cannot be altered, dropped, repeated or inserted.
# Messages are signed but not encrypted: progress, addresses and public keys. Pure except for the nonces.
#
#     agent → rank   MAGIC, nonce              GREETING bytes
#     rank → agent   nonce, proof              ANSWER bytes
#     agent → rank   proof                     PROOF bytes
#     both           message, tag              TAG bytes after each message


MAGIC = b"dips-agent/1"
NONCE = 32
PROOF = TAG = hashlib.sha256().digest_size
GREETING, ANSWER = len(MAGIC) + NONCE, NONCE + PROOF


class Seal:
    """Signs the frames that this end sends and checks those that it receives."""

    def __init__(self, key: bytes, sends: bytes, receives: bytes) -> None:
        self._key, self._names = key, (sends, receives)
        self._sent = self._received = 0

    def tag_frame(self, frame: bytes) -> bytes:
        """Return the tag to be sent after the next frame."""
        self._sent += 1
        return _compute_mac(self._key, self._names[0], self._sent.to_bytes(8, "big"), frame)

    def check_frame(self, frame: bytes, tag: bytes) -> None:
        """Raise RemoteProtocolError unless this is the next frame of the other end."""
        self._received += 1
        if not hmac.compare_digest(
            tag, _compute_mac(self._key, self._names[1], self._received.to_bytes(8, "big"), frame)
        ):
            raise RemoteProtocolError("a message on the line between rank and agent bears a wrong tag: it was altered")


class TokenServer:
    """The agent's side of the handshake."""

    def __init__(self, token: bytes) -> None:
        self._token, self._nonce = token, secrets.token_bytes(NONCE)
        self.greeting = MAGIC + self._nonce

    def admit_rank(self, answer: bytes) -> tuple[bytes, Seal]:
        """Return the last message of the handshake, and the seal. Raises Denied if the rank does not know the token."""
        both = self._nonce + answer[:NONCE]
        if not hmac.compare_digest(answer[NONCE:], _compute_mac(self._token, b"rank", both)):
            raise Denied("whoever dialled the agent does not know the job's token")
        return _compute_mac(self._token, b"agent", both), Seal(
            _compute_mac(self._token, b"key", both), b"agent", b"rank"
        )


class TokenClient:
    """The rank's side of the handshake."""

    def __init__(self, token: bytes, greeting: bytes) -> None:
        """Answer the agent's greeting. Raises RemoteProtocolError if it is not an agent's greeting of this version."""
        if not greeting.startswith(MAGIC):
            raise RemoteProtocolError(f"expected a greeting that begins with {MAGIC!r}, got {greeting[:16]!r}")
        nonce = secrets.token_bytes(NONCE)
        self._token, self._both = token, greeting[len(MAGIC) :] + nonce
        self.answer = nonce + _compute_mac(token, b"rank", self._both)

    def accept_proof(self, proof: bytes) -> Seal:
        """Return the seal. Raises Denied if the peer is not our agent."""
        if not hmac.compare_digest(proof, _compute_mac(self._token, b"agent", self._both)):
            raise Denied("whoever answers does not know the job's token: it is not this job's agent")
        return Seal(_compute_mac(self._token, b"key", self._both), b"rank", b"agent")


def _compute_mac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC over parts of fixed lengths, except for the last."""
    return hmac.digest(key, b"\0".join(parts), "sha256")


def keep_alive(connection: socket.socket) -> None:
    """Make the kernel detect within half a minute that the other host is gone, also when nothing is sent."""
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),  # s
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),  # s
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),  # ms, of what was sent and not acknowledged
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    ):
        connection.setsockopt(level, option, value)

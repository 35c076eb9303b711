"""The sockets on which ranks reach the agent: a Unix socket for its own user, and a TCP port for a job on several
hosts.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from dips.client.agent.rank_server import RankServer
from dips.client.ipc.address import AGENT, TOKEN, over_network, socket_path, token_of
from dips.config import ClusterFile
from dips.errors import ConfigError
from dips.telemetry.logs import Log

RESOLVE_S = 60.0  # the name of a pod is resolvable only some seconds after its start
AGAIN_S = 1.0


@asynccontextmanager
async def listen_for_ranks(config: ClusterFile, ranks: RankServer, log: Log) -> AsyncIterator[dict[str, str]]:
    """Serve ranks; yields the environment variables through which a rank finds the agent."""
    path, remote = socket_path(config), over_network(config)
    servers = [await _on_this_host(path, ranks)]
    environment = {AGENT: f"unix:{path}"}
    try:
        if remote is not None:
            token = token_of(config) or secrets.token_hex(32).encode()
            server, host = await _on_any_host(remote, ranks, token)
            servers.append(server)
            address, port = server.sockets[0].getsockname()[:2]
            environment = {AGENT: f"tcp://{host}:{port}", TOKEN: token.decode()}
            log.info("agent_line", address=f"{host}:{port}", bound=address)
        yield environment
    finally:
        for server in servers:
            server.close()
        path.unlink(missing_ok=True)


async def _on_this_host(path: Path, ranks: RankServer) -> asyncio.Server:
    """Listen on the Unix socket for rank 0, which only this user can open."""
    path.unlink(missing_ok=True)  # left by an agent that was killed; the pid file's lock shows that none runs
    mask = os.umask(0o177)
    try:
        return await asyncio.start_unix_server(ranks.serve_local, path)
    except OSError as error:
        raise ConfigError(f"socket: cannot listen on {path}: {error.strerror or error}") from error
    finally:
        os.umask(mask)


async def _on_any_host(remote: tuple[str, int, str], ranks: RankServer, token: bytes) -> tuple[asyncio.Server, str]:
    """Listen on the one address that `remote` names; return the server and the host as ranks write it."""
    host, port, named_by = remote
    try:
        family, *_, address = await _resolve_host(host, port)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            return await asyncio.start_server(ranks.serve_with(token), sock=listener), _bracket_host(host)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"{named_by}: cannot listen on {host}:{port}: {error.strerror or error}; it must be an address of the host "
            "on which the agent runs"
        ) from error


async def _resolve_host(host: str, port: int) -> tuple[int, int, int, str, tuple[object, ...]]:
    loop, until = asyncio.get_running_loop(), asyncio.get_running_loop().time() + RESOLVE_S
    while True:
        try:
            return (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        except socket.gaierror:
            if loop.time() >= until:
                raise
            await asyncio.sleep(AGAIN_S)


def _bracket_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host

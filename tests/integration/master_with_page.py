"""`dips-master` with its page on a port of its own, until the daemons' HTTP server has it.

master_with_page.py PORT --config dips.yaml
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette

from dips.config import RunFile
from dips.master import app
from dips.master.page import MasterPage
from dips.master.runtime import Runtime

pages: list[MasterPage] = []


class KeptPage(MasterPage):
    """The page that the master made, to be served here."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        pages.append(self)


def serve_page(config: RunFile, runtime: Runtime, log: Any) -> Callable[[], None]:
    """In the place of the master's metrics."""
    site = Starlette(routes=pages[-1].make_routes(runtime))
    server = uvicorn.Server(
        uvicorn.Config(site, "127.0.0.1", PORT, log_level="warning", server_header=False, lifespan="off")
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]  # the master has its own
    thread = threading.Thread(target=lambda: asyncio.run(server._serve()), name="page")
    thread.start()

    def end() -> None:
        server.should_exit = True
        server.force_exit = True
        thread.join(10)

    return end


if __name__ == "__main__":
    PORT = int(sys.argv.pop(1))
    app.MasterPage = KeptPage  # type: ignore[misc]
    app._serve_metrics = serve_page
    app.main()

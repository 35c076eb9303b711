"""Commands that tests of this directory start are forked from a server, but for those marked `real_commands`."""

from __future__ import annotations

from tests.forkserver.fixtures import end_of_servers, forked_commands, python_of_scripts, real_commands

__all__ = ["end_of_servers", "forked_commands", "python_of_scripts", "real_commands"]

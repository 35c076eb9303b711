"""All mutants: a table for each part of the package."""

from __future__ import annotations

from tests.mutants.tables import client, lanes, master, protocol, silence, slave, transport

MUTANTS = (
    *protocol.MUTANTS, *slave.MUTANTS, *transport.MUTANTS, *master.MUTANTS, *client.MUTANTS, *silence.MUTANTS,
    *lanes.MUTANTS,
)  # fmt: skip

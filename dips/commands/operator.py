"""One question to the master's OperatorService, as the operators' commands ask it."""

from __future__ import annotations

from typing import Any

from dips.errors import UnavailableMaster
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.wire import messages
from dips.wire.generated.operator_pb2_grpc import OperatorServiceStub

DEADLINE_S = 15.0  # the master holds a question open for 10 s


async def ask_master(master: Endpoint, method: str, question: object) -> Any:
    """Ask once and return the answer. Raises UnavailableMaster if none comes, and the errors of the master."""
    channel = control.open_channel(master)
    try:
        reply = await control.call_method(
            getattr(OperatorServiceStub(channel), method),
            messages.to_proto(question),
            deadline_s=DEADLINE_S,
            peer=master,
            unavailable=UnavailableMaster,
            explain=True,
        )
        return messages.unwrap_oneof(reply)
    finally:
        await channel.close()

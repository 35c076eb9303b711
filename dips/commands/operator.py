"""One question to the master's OperatorService, as the operators' commands ask it."""

from __future__ import annotations

from typing import Any

from dips.errors import UnavailableMaster
from dips.transport import control
from dips.transport.endpoints import Endpoint
from dips.wire import messages
from dips.wire.generated import operator_pb2
from dips.wire.generated.operator_pb2_grpc import OperatorServiceStub

DEADLINE_S = 15.0  # the master holds a question open for 10 s


async def ask_master(master: Endpoint, question: object) -> Any:
    """Ask once and return the answer. Raises UnavailableMaster if none comes, and the errors of the master."""
    channel, request = control.open_channel(master), messages.to_proto(question)
    service = operator_pb2.DESCRIPTOR.services_by_name["OperatorService"]
    method = next(method.name for method in service.methods if method.input_type.name == request.DESCRIPTOR.name)
    try:
        reply = await control.call_method(
            getattr(OperatorServiceStub(channel), method),
            request,
            deadline_s=DEADLINE_S,
            peer=master,
            unavailable=UnavailableMaster,
            explain=True,
        )
        return messages.unwrap_oneof(reply)
    finally:
        await channel.close()

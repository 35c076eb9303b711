"""A lane's answers to PROBEs, by which `dips-client check` measures the way to a slave before it joins.

A probe touches no push, pull or version. Answers share one buffer, and few of them leave at a time, so that probes cost
a known amount of memory and take turns with transfers; who asks for more is refused. One lane's thread owns it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dips.transport.lane import Outgoing
from dips.wire.frame import MESSAGE_LIMIT, BadFrame, Header, Kind, pack_header

if TYPE_CHECKING:
    import zmq

MOST_ANSWERS = 32  # of one lane, not yet handed to the network: 32 MiB on their way at most

_PADDING = memoryview(os.urandom(MESSAGE_LIMIT))  # links that compress must not flatter themselves


class Probes:
    """Answers for one lane; also what the lane tells of their fate (`lane.Sent`)."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._posted = 0  # answers that the lane has not sent yet
        self._leaving: list[zmq.MessageTracker] = []

    def make_answer(self, peer: bytes, stream: int, nbytes: int) -> Outgoing:
        """Make the answer of `nbytes` bytes; raise BadFrame if too many are on their way."""
        self._leaving = [tracker for tracker in self._leaving if not tracker.done]
        if self._posted + len(self._leaving) >= MOST_ANSWERS:
            raise BadFrame("credit", f"more than {MOST_ANSWERS} probes are being answered")
        self._posted += 1
        # No checksum of the body: its bytes mean nothing, and what is measured is the way.
        return Outgoing(
            peer, pack_header(Header(Kind.PROBE, self._run, stream, nbytes, 0)), _PADDING[:nbytes], watch=self
        )

    def still_wanted(self) -> bool:
        return True

    def on_sent(self, tracker: zmq.MessageTracker) -> None:
        self._posted -= 1
        self._leaving.append(tracker)

    def on_not_sent(self) -> None:
        self._posted -= 1

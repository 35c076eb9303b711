"""A lane's answers to PROBEs, with which `dips check` measures the path to a slave before it joins.

A probe touches no push, pull or version. All answers share one buffer, and few are sent at a time, so that probes use a
known amount of memory and alternate with transfers; further ones are refused. Owned by one lane's thread.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from dips.transport.lane import Outgoing
from dips.wire.frame import MESSAGE_LIMIT, BadFrame, Header, Kind, pack_header

if TYPE_CHECKING:
    import zmq

MOST_ANSWERS = 32  # of one lane, not yet handed to the network: at most 32 MiB in flight

_PADDING = memoryview(os.urandom(MESSAGE_LIMIT))  # random, so that links that compress do not look faster


class Probes:
    """Makes a lane's answers to probes and counts those that are not sent yet (`lane.Sent`)."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._posted = 0  # answers that the lane has not sent yet
        self._leaving: list[zmq.MessageTracker] = []

    def make_answer(self, peer: bytes, stream: int, nbytes: int) -> Outgoing:
        """Return the answer of `nbytes` bytes; raise BadFrame if too many are being sent."""
        self._leaving = [tracker for tracker in self._leaving if not tracker.done]
        if self._posted + len(self._leaving) >= MOST_ANSWERS:
            raise BadFrame("credit", f"more than {MOST_ANSWERS} probes are being answered")
        self._posted += 1
        # No checksum of the body: its bytes have no meaning, only the path is measured.
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

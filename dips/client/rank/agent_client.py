"""Requests of a training job to its agent: rank 0 sends them, and every answer is broadcast to all ranks
(docs/rationale.md#25).

`ask_agent` and `ask_until_answered` are collective. Each AskAgain reaches all ranks: no collective outlasts a poll.
Inner steps may be held back briefly (step_batch.py); no other message overtakes them. If a script pauses, a thread of
rank 0 sends the steps that are held.
"""

from __future__ import annotations

import threading
import time
from math import inf
from typing import cast

from dips.client.ipc import encoding
from dips.client.ipc.address import Address
from dips.client.ipc.messages import (
    Answer,
    AskAgain,
    ErrorReply,
    Noted,
    Notice,
    Question,
    Stepped,
    TransferProgress,
)
from dips.client.rank.agent_connection import AgentConnection
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.step_batch import LATEST_S, StepBatch
from dips.errors import DipsError, class_named


class AgentClient:
    """All ranks' access to their agent; rank 0 connects at the first question."""

    def __init__(self, collectives: JobCollectives, agent: Address, poll_s: float) -> None:
        self._collectives, self._agent, self._poll_s = collectives, agent, poll_s
        self._connection: AgentConnection | None = None
        self._step_batch = StepBatch()
        self._sending = threading.Lock()  # guards the batch and the socket, so that messages are not interleaved
        self._holding, self._closed = threading.Event(), threading.Event()
        self._flusher: threading.Thread | None = None

    def ask_until_answered(self, question: Question) -> Answer:
        """Repeat the question until the agent's answer is not AskAgain; return it on all ranks. Collective."""
        while isinstance(answer := self.ask_agent(question), AskAgain):
            pass
        return answer

    def ask_agent(self, question: Question) -> Answer:
        """Return the agent's answer to rank 0's question on all ranks; an error is raised on all ranks alike.
        Collective.
        """
        message = encoding.encode_message(self._ask_agent(question)) if self._collectives.rank == 0 else None
        answer = cast(Answer, encoding.decode_message(self._collectives.broadcast(message)[encoding.LENGTH.size :]))
        if isinstance(answer, ErrorReply):
            raise (class_named(answer.error) or DipsError)(answer.message)
        return answer

    def notify_agent(self, notice: Notice) -> None:
        """Send a message that has no answer; does nothing on ranks other than 0."""
        if self._connection:
            self._send_message(self._connection, notice)

    def report_step(self, step: Stepped, ended_s: float) -> None:
        """Send an inner step, batched or alone; `ended_s` is on the monotonic clock. Does nothing on ranks other than
        0.
        """
        if not self._connection:
            return
        with self._sending:
            if self._step_batch.is_apart(ended_s):
                self._send_steps(self._connection)
            if self._step_batch.add_step(step, ended_s):
                self._send_steps(self._connection)
                return
        if not self._holding.is_set():
            self._holding.set()
            self._start_flusher(self._connection)

    def report_progress(self, attempt: int, moved: int, total: int, idle_s: float) -> str:
        """Report a transfer's progress to the agent; return why to end it, or "" to continue. Returns "" on ranks other
        than 0.

        idle_s  seconds since this rank has moved all its bytes
        """
        if not self._connection:
            return ""
        try:
            answer = self._exchange(self._connection, TransferProgress(attempt, moved, total, idle_s))
        except DipsError as error:  # the other ranks wait in a collective: the transfer must fail there, on all ranks
            return str(error)
        return "" if isinstance(answer, Noted) else getattr(answer, "reason", str(answer))

    def disconnect(self) -> None:
        """Close the connection without a message: the agent then ends the attempt."""
        self._closed.set()
        self._holding.set()
        if self._connection:
            self._connection.close()

    def _ask_agent(self, question: Question) -> Answer:
        try:
            if self._connection is None:
                self._connection = AgentConnection(self._agent, self._poll_s)
            return self._exchange(self._connection, question)
        except DipsError as error:
            return ErrorReply(type(error).__name__, str(error))

    def _exchange(self, connection: AgentConnection, question: Question) -> Answer:
        self._send_message(connection, question)
        return connection.receive_answer(type(question).__name__)

    def _send_message(self, connection: AgentConnection, message: Question | Notice) -> None:
        with self._sending:
            self._send_steps(connection)
            connection.send_message(message)

    def _send_steps(self, connection: AgentConnection) -> None:
        steps = self._step_batch.take_steps(time.monotonic())
        if steps is not None:
            connection.send_message(steps)

    # ---- a script that pauses ----------------------------------------------------------------------------------------

    def _start_flusher(self, connection: AgentConnection) -> None:
        if self._flusher is None:
            self._flusher = threading.Thread(target=self._flush_steps, args=(connection,), name="steps", daemon=True)
            self._flusher.start()

    def _flush_steps(self, connection: AgentConnection) -> None:
        """Send held steps that no further step sends, LATEST_S after they were due; runs in a thread of rank 0."""
        while self._holding.wait() and not self._closed.wait(LATEST_S):
            with self._sending:
                now = time.monotonic()
                try:
                    if self._step_batch.due_s() <= now:
                        self._send_steps(connection)
                except DipsError:  # the agent is gone: the script's next message raises this where it can be handled
                    return
                if self._step_batch.due_s() == inf:  # nothing is held
                    self._holding.clear()

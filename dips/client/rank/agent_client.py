"""What a rank says and hears: one mouth, rank 0's line to the agent, and one verdict for all ranks (why.md 25).

Every method but `tell` and `share` is collective. Each Wait reaches all ranks: no collective lasts longer than a poll.
"""

from __future__ import annotations

from typing import cast

from dips import errors
from dips.client.ipc import encoding
from dips.client.ipc.address import Address
from dips.client.ipc.messages import Answer, AskAgain, ErrorReply, Noted, Notice, Question, TransferProgress
from dips.client.rank.collectives import JobCollectives
from dips.client.rank.line import Line
from dips.errors import DipsError


class AgentClient:
    """The talk of all ranks with their agent."""

    def __init__(self, voice: JobCollectives, agent: Address, poll_s: float) -> None:
        self._voice, self._agent, self._poll_s = voice, agent, poll_s
        self._line: Line | None = None

    def persist(self, question: Question) -> Answer:
        """Ask until there is an answer."""
        while isinstance(answer := self.hear(question), AskAgain):
            pass
        return answer

    def hear(self, question: Question) -> Answer:
        """Rank 0 asks the agent; all ranks hear the answer, and raise the same error if it is one."""
        words = encoding.encode(self._speak(question)) if self._voice.rank == 0 else None
        answer = cast(Answer, encoding.decode(self._voice.share(words)[encoding.LENGTH.size :]))
        if isinstance(answer, ErrorReply):
            raised = getattr(errors, answer.error, DipsError)
            raise raised(answer.message)
        return answer

    def tell(self, notice: Notice) -> None:
        """Say something without an answer; only rank 0 has a line."""
        if self._line:
            self._line.tell(notice)

    def share(self, attempt: int, moved: int, total: int) -> str:
        """Tell the agent how far a transfer is; return why it is to be ended, "" to go on. Only rank 0 has a line."""
        if not self._line:
            return ""
        try:
            answer = self._line.ask(TransferProgress(attempt, moved, total))
        except DipsError as error:  # the other ranks are waiting in a collective: they must hear of it there
            return str(error)
        return "" if isinstance(answer, Noted) else getattr(answer, "reason", str(answer))

    def hang_up(self) -> None:
        """End the line without a word: the agent ends what is open."""
        if self._line:
            self._line.close()

    def _speak(self, question: Question) -> Answer:
        try:
            if self._line is None:
                self._line = Line(self._agent, self._poll_s)
            return self._line.ask(question)
        except DipsError as error:
            return ErrorReply(type(error).__name__, str(error))

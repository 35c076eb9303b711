"""What a person should know of this cluster: said once in the log, and in `dips status` as long as it holds.

There is one for each subject, so nothing grows; a remark that is made again with the same text is silent.
"""

from __future__ import annotations

from dips.client.agent.state import AgentState
from dips.printable import make_printable
from dips.protocol.enums import RemarkSubject
from dips.protocol.heartbeats import REMARK_CHARS, Remark

WAIT_TOLD_S = 5.0  # what holds everything up for so long is logged


def make_remark(s: AgentState, subject: RemarkSubject, text: str) -> None:
    """Say it, with its remedy; it holds until it is dropped."""
    if s.remarks.get(subject) != text:
        s.remarks[subject] = text
        s.record_mark("remark", subject=subject, text=text)


def drop_remark(s: AgentState, subject: RemarkSubject) -> None:
    """It holds no more."""
    s.remarks.pop(subject, None)


def list_remarks(s: AgentState) -> tuple[Remark, ...]:
    """All that hold, for a heartbeat."""
    return tuple(Remark(subject, make_printable(text)[:REMARK_CHARS]) for subject, text in s.remarks.items())


def tell_certificate(s: AgentState, problem: str) -> None:
    """Say why a renewed certificate is not used, while the former one still is; empty: nothing is wrong."""
    if problem:
        make_remark(s, RemarkSubject.CERTIFICATE, f"certificate: {problem}")
    else:
        drop_remark(s, RemarkSubject.CERTIFICATE)


def tell_wait(s: AgentState) -> None:
    """Log what a trainer that stands still, or that has not joined, has been waiting for; each reason once."""
    stands = s.trainer.alive and (s.sync.waiting or not s.joined)
    reason = s.sync.reason if stands else ""
    told, since, is_told = s.waits_for
    if reason != told:
        s.waits_for = (reason, s.now, False)
    elif reason and not is_told and s.now - since >= WAIT_TOLD_S:
        s.waits_for = (reason, since, True)
        s.record_mark("waits", reason=reason)

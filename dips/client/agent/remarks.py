"""Remarks on this cluster for its operator: logged once, and shown in `dips status` as long as they hold.

Subjects are few and fixed, so nothing grows; a remark that is repeated with the same text is not logged again.
"""

from __future__ import annotations

from dips.client.agent.state import AgentState
from dips.printable import make_printable
from dips.protocol.enums import RemarkSubject
from dips.protocol.heartbeats import REMARK_CHARS, Remark

WAIT_TOLD_S = 5.0  # a wait of this length is logged


def make_remark(s: AgentState, subject: RemarkSubject, text: str) -> None:
    """Log a remark that names its remedy; it holds until it is dropped."""
    if s.remarks.get(subject) != text:
        s.remarks[subject] = text
        s.record_mark("remark", subject=subject, text=text)


def drop_remark(s: AgentState, subject: RemarkSubject) -> None:
    """Drop the remark on a subject, since it no longer holds."""
    s.remarks.pop(subject, None)


def list_remarks(s: AgentState) -> tuple[Remark, ...]:
    """Return all remarks that hold, for a heartbeat."""
    return tuple(Remark(subject, make_printable(text)[:REMARK_CHARS]) for subject, text in s.remarks.items())


def tell_certificate(s: AgentState, problem: str) -> None:
    """Remark why a renewed certificate is not used while the former one still is; drop the remark if `problem` is
    empty.
    """
    if problem:
        make_remark(s, RemarkSubject.CERTIFICATE, f"certificate: {problem}")
    else:
        drop_remark(s, RemarkSubject.CERTIFICATE)


def tell_wait(s: AgentState) -> None:
    """Log once for each reason what a waiting trainer, or one that has not joined, is waiting for."""
    stands = s.trainer.alive and (s.sync.waiting or not s.joined)
    reason = s.sync.reason if stands else ""
    told, since, is_told = s.waits_for
    if reason != told:
        s.waits_for = (reason, s.now, False)
    elif reason and not is_told and s.now - since >= WAIT_TOLD_S:
        s.waits_for = (reason, since, True)
        s.record_mark("waits", reason=reason)

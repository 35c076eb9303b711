"""The steps of a pull: asked for, granted, moved, closed. Between two transfers the cluster rests; a due pull comes
first.
"""

from __future__ import annotations

from dips.client.agent.actions import Channel
from dips.client.agent.divergence import judge_divergence
from dips.client.agent.phases import SyncPhase
from dips.client.agent.questions import ask_master
from dips.client.agent.recalls import lose_work
from dips.client.agent.state import AgentState
from dips.client.agent.transfers import begin_transfer, record_moved
from dips.client.agent.verdicts import conclude_question
from dips.client.ipc.messages import PullMoved, PullWanted
from dips.dataclass import replace
from dips.protocol.effects import Acknowledged, Dropped, Finished, Grant, Refused
from dips.protocol.events import PullFinished, PullRequested

PULL_TRIES = 3  # failures in a row after which a pull is given up, unless the trainer cannot train without it
RETRY_S = 0.5  # pause before a failed pull is asked for again


def end_transfer(s: AgentState, reason: str, again: bool = False, delay_s: float = 0.0) -> None:
    """End the present transfer: ask for the pull that a waiting trainer needs, or answer the trainer."""
    sync = s.sync
    sync.phase, sync.reason, sync.grant = SyncPhase.RESTING, reason, None
    want_final_pull(s)
    if sync.waiting and sync.pull_due:
        ask_pull(s, delay_s)
    elif sync.waiting:
        conclude_question(s, reason, again)


def want_final_pull(s: AgentState) -> None:
    """Schedule one pull of a finished run's last version."""
    finished = s.membership.progress.finished
    if finished and s.trainer.base != finished and not s.sync.final_pull_tried:
        s.sync.pull_due = s.sync.final_pull_tried = True


def want_pull(s: AgentState, _: PullWanted) -> None:
    """Schedule the first pull of a trainer that begins without the run's parameters."""
    s.sync.pull_due = True
    end_transfer(s, "a pull is wanted")


def ask_pull(s: AgentState, delay_s: float = 0.0) -> None:
    sync = s.sync
    sync.seq, sync.moved = sync.seq + 1, (0, 0)
    sync.phase, sync.reason = SyncPhase.ASKING_PULL, sync.reason or "it asks for a pull"
    ranks = s.trainer.pull_ranks
    ask_master(s, Channel.SYNC, PullRequested(0, s.pull_id, ranks, keys=s.trainer.keys[:ranks]), delay_s)


def on_pull_granted(s: AgentState, grant: Grant, after_push: bool = False) -> None:
    """Let the ranks move the pull if they still wait, else close it."""
    sync = s.sync
    if not sync.waiting:  # the trainer trains on, or has died
        close_pull(s, False)
        return
    sync.phase, sync.reason, sync.grant = SyncPhase.PULLING, f"pulls {grant.version}", grant
    finished = s.membership.progress.finished
    sync.merge = s.settings.overlap and after_push and not s.trainer.must_pull and not finished
    begin_transfer(s)
    s.record_mark("pull_begin", seq=sync.seq, version=str(grant.version))


def on_pull_moved(s: AgentState, moved: PullMoved) -> None:
    """Process the end of a pull: all ranks have installed the version, or none has, or the model is torn (some layers
    only).
    """
    sync, trainer = s.sync, s.trainer
    assert sync.grant
    version = sync.grant.version
    s.record_mark(
        "pull_end", seq=moved.seq, version=str(version), installed=moved.installed, nbytes=moved.nbytes,
        reason=moved.reason,
    )  # fmt: skip
    if moved.installed:
        _record_install(s, moved)
        trainer.base, trainer.must_pull, sync.pull_due, sync.pull_failures = version, False, False, 0
        sync.reason = f"trains on {version}"
    else:
        if moved.torn:
            trainer.base = None  # the trainer has no parameters of the run until a pull succeeds
            s.record_mark("torn", seq=moved.seq)
        record_pull_failure(s, f"its pull failed: {moved.reason}")
    close_pull(s, moved.installed)
    want_final_pull(s)
    if moved.installed and sync.merge and not moved.merged:
        judge_divergence(s, moved.seq, "what it trained beside its pull was not finite")
    if sync.waiting and not sync.pull_due:  # the trainer need not wait while the pull is being closed
        conclude_question(s, sync.reason)


def _record_install(s: AgentState, moved: PullMoved) -> None:
    record_moved(s, moved.nbytes, moved.nbytes)
    s.tally.moved["pull"] += moved.nbytes
    if not moved.merged:
        lose_work(s)  # the pull has overwritten the work since the last freeze


def record_pull_failure(s: AgentState, reason: str) -> None:
    """Schedule another try; without limit only if the trainer cannot train with its present parameters."""
    sync = s.sync
    sync.pull_failures, sync.reason = sync.pull_failures + 1, reason
    sync.pull_due = s.trainer.must_pull or s.trainer.base is None or sync.pull_failures < PULL_TRIES
    if not sync.pull_due:
        sync.pull_failures = 0


def close_pull(s: AgentState, installed: bool) -> None:
    """Tell the master that the slaves need not keep the version for this cluster any longer."""
    s.sync.phase, s.sync.grant = SyncPhase.CLOSING, None
    ask_master(s, Channel.SYNC, PullFinished(0, s.pull_id, installed))


def on_pull_refused(s: AgentState, result: Refused) -> None:
    record_pull_failure(s, f"its pull was refused: {result.reason}")
    end_transfer(s, s.sync.reason, delay_s=result.retry_after_s)


def on_pull_dropped(s: AgentState, result: Dropped) -> None:
    record_pull_failure(s, f"its pull was dropped: {result.reason}")
    end_transfer(s, result.reason, delay_s=RETRY_S)


def on_pull_after_end(s: AgentState, result: Finished) -> None:
    """End the pull: the run is finished, and its last version cannot be pulled any more."""
    s.membership.progress = replace(s.membership.progress, finished=result.version)
    s.sync.pull_due, s.sync.final_pull_tried = False, True
    end_transfer(s, "the run is finished")


def on_closed(s: AgentState, _: Acknowledged | Dropped) -> None:
    """Rest again after the master has closed the pull or the aborted push."""
    end_transfer(s, s.sync.reason, delay_s=RETRY_S)

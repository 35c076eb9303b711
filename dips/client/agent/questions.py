"""Questions to the master: one at a time in each channel, repeated until it answers.

A master that does not answer is asked again after a pause that doubles up to `retry_s`; a heartbeat that reaches it
ends the pause. A reply to a question that is no longer open is ignored.
"""

from __future__ import annotations

from dips.client.agent.actions import AskMaster, Channel
from dips.client.agent.state import AgentState, OpenQuestion
from dips.transport.backoff import Backoff

ASK_AGAIN_S = 0.05  # pause after Pending; the master itself holds the question open
FIRST_PAUSE_S = 0.2  # pause before the second try to reach the master
MOST_PAUSE_S = 5.0  # longest such pause: a thousand agents then ask a master that comes back 200 times a second


def ask_master(s: AgentState, channel: Channel, event: object, delay_s: float = 0.0) -> None:
    """Ask a new question; it replaces the open question of the channel."""
    s.questions_asked += 1
    backoff = Backoff(FIRST_PAUSE_S, s.settings.retry_s, s.rng)
    s.questions[channel] = OpenQuestion(s.questions_asked, event, backoff)
    _send_question(s, channel, delay_s)


def repeat_question(s: AgentState, channel: Channel, delay_s: float = ASK_AGAIN_S) -> None:
    """Repeat a question that the master answered with Pending or a refusal to be retried."""
    s.questions[channel].backoff.reset()
    _send_question(s, channel, delay_s)


def repeat_after_pause(s: AgentState, channel: Channel) -> None:
    """Repeat a question after a pause, since the master did not answer."""
    question = s.questions[channel]
    question.pausing = True
    s.out.append(AskMaster(channel, question.number, question.event, question.backoff.next_pause_s()))


def end_pauses(s: AgentState) -> None:
    """Repeat at once all questions that pause, since the master can be reached."""
    for channel, question in s.questions.items():
        if question.pausing:
            _send_question(s, channel, 0.0)


def is_open(s: AgentState, ask: AskMaster) -> bool:
    """Return whether the answer to this question is still awaited."""
    question = s.questions.get(ask.channel)
    return question is not None and question.number == ask.number


def close_channel(s: AgentState, channel: Channel) -> None:
    """Ignore replies in this channel until the next question."""
    s.questions.pop(channel, None)


def _send_question(s: AgentState, channel: Channel, delay_s: float) -> None:
    question = s.questions[channel]
    question.pausing = False
    s.out.append(AskMaster(channel, question.number, question.event, delay_s))

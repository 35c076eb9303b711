"""Replays a story: carries out its commands, and writes under each what the Coordinator answers today."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.transcripts.story import Teller
from tests.transcripts.words import Words, parse

COMMANDS: dict[str, Callable[[Teller, str, Words], list[str]]] = {
    "registers": Teller.registers,
    "answers": Teller.answers,
    "fails": Teller.fails,
    "staged": Teller.staged,
    "refuses": Teller.refuses_push,
    "lost": Teller.slave_silent,
    "joins": Teller.joins,
    "asks-push": Teller.asks_push,
    "finishes-push": Teller.finishes_push,
    "aborts": Teller.aborts_push,
    "awaits": Teller.awaits,
    "asks-pull": Teller.asks_pull,
    "finishes-pull": Teller.finishes_pull,
    "leases": Teller.leases,
    "silent": Teller.cluster_silent,
    "told": Teller.told,
    "leaves": Teller.leaves,
    "trainer": Teller.trainer,
    "measures": Teller.measures,
    "comes": Teller.comes,
    "heartbeats": Teller.heartbeat,
    "readmitted": Teller.readmit,
    "drained": Teller.drain,
    "finalises": Teller.finalise,
    "seeds": Teller.seed,
    "extended": Teller.extend,
    "tunes": Teller.tune,
    "quarantines": Teller.quarantine,
    "asks-drain": Teller.asks_drain,
    "asks-rollback": Teller.asks_rollback,
    "is-denied": Teller.denied,
    "expelled": Teller.expelled,
    "ready": Teller.ready,
    "trains": Teller.trains,
    "pushes": Teller.pushes,
    "passes": Teller.later,
    "sleeps": Teller.sleep,
    "blind": Teller.blind,
    "restarts": Teller.restart,
    "tells": Teller.status,
}


def replay(text: str) -> str:
    """Carry out every command of a story; return the text with what the machine answers today."""
    told, teller = [], None
    for line, is_command in _lines(text):
        told.append(line)
        if not is_command:
            continue
        subject, verb, words = parse(line[2:])
        if (subject, verb) == ("run", "begins"):
            teller = Teller(words)
            told += teller.status("", {})
        elif teller is None:
            raise ValueError(f"a story begins with `> run begins`, not with {line!r}")
        elif verb not in COMMANDS:
            raise ValueError(f"{line!r}: no command {verb!r}; there are {', '.join(COMMANDS)}")
        else:
            told += COMMANDS[verb](teller, subject, words) or ["nothing"]
        told.append("")
    return "\n".join(told).rstrip("\n") + "\n"


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Comments, blank lines before them, and commands; the answers of yesterday are left out."""
    for line in text.splitlines():
        if line.startswith("> "):
            yield line, True
        elif line.startswith("#"):
            yield line, False

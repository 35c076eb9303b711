"""The words of a command: `subject verb key=value ...`, the options of a run, and names of pushes and pulls."""

from __future__ import annotations

import re

from dips.protocol.enums import WindowRule
from dips.protocol.options import DataOptions, Options, PenaltyOptions, StopOptions, TimingOptions

Words = dict[str, str]  # the `key=value` words of a command


def parse(command: str) -> tuple[str, str, Words]:
    """`s0 fails error=UnresponsiveSlave why="no answer"` → subject, verb, words."""
    subject, verb, *rest = re.findall(r'(?:[^\s"]|"[^"]*")+', command)
    pairs = [word.partition("=") for word in rest]
    return subject, verb, {key: value.strip('"') for key, _, value in pairs}


def transfer(text: str, sign: str) -> tuple[str, int, int]:
    incarnation, _, seq = text.partition(sign)
    name, _, inc = incarnation.partition("/")
    return name, int(inc), int(seq)


def options(words: Words) -> Options:
    timing = TimingOptions(
        window_s=float(words.get("window", "10")), busy_retry_s=2.0, min_push_bps=float(words.get("min_push_bps", "0")),
        window=WindowRule(words.get("extends", "fixed")),
    )  # fmt: skip
    penalty = PenaltyOptions(warmup_rounds=int(words.get("warmup", "1")), gate_patience=int(words.get("patience", "3")))
    stop = StopOptions(versions=int(words.get("stop", "0")))
    data = DataOptions(ranges=int(words.get("ranges", "0")))
    chosen = {k: words[k] for k in ("codec", "durability", "on_persist_failure", "requeue") if k in words}
    kept = {k: int(words[k]) for k in ("keep_every", "most_rollback") if k in words}
    return Options(penalty=penalty, timing=timing, stop=stop, data=data, **kept, **chosen)  # type: ignore[arg-type]

"""Spells effects as lines that a person reads: short, the same word for the same thing, nothing that is not decided."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from dips.protocol import effects as e
from dips.protocol import records as r
from dips.protocol.options import OuterOptions, Targets
from dips.protocol.tunable import describe_changes


def spell(effect: e.Effect, asked: Mapping[int, str]) -> str:
    """One effect, one line; `asked` says who asked which question."""
    match effect:
        case e.Order():
            return f"→ {effect.slave}/{effect.sinc} {effect.number} {spell_order(effect.body)}"
        case e.Reply():
            return f"{asked[effect.req]} ← {spell_result(effect.result)}"
        case e.Note():
            return f"· {effect.kind} {' '.join(f'{k}={v}' for k, v in effect.fields)}".rstrip()
        case e.Exit():
            return f"! exit {effect.code}: {effect.reason}"
        case _:
            return f"■ {spell_record(effect)}"


def spell_order(body: e.OrderBody) -> str:
    match body:
        case e.OpenPush():
            first = f", from worker {body.first}" if body.first else ""
            seed = ", to bring v0@r0" if body.seed else ""
            return f"OpenPush {body.push}, asking {_ranks(body.ranks)}{first}{_codec(body)}{seed}"
        case e.Reorder():
            return f"Reorder {body.push}, its ranks at places {_list(body.places)}"
        case e.KeepSeed():
            return f"KeepSeed {body.push}" + (f" as {body.version}" if body.version else "")
        case e.DropPush():
            return f"DropPush {body.push}: {body.reason}"
        case e.Measure():
            return f"Measure {body.push} against {body.version} in round {body.round}"
        case e.Fold():
            return f"Fold {body.push} × {body.weight:.4g} in round {body.round}"
        case e.Apply():
            tuned = "" if body.step.lr == OuterOptions().lr else f", lr {body.step.lr:g}"
            return f"Apply {body.version}, scale {body.step.scales[0]:.4g}{tuned}" + (
                "" if body.reserve else ", reserving nothing"
            )
        case e.Persist():
            return f"Persist {body.version}"
        case e.Commit():
            return f"Commit {body.version}, opening {_list(body.pulls)}"
        case e.Abort():
            return f"Abort round {body.round}: {body.reason}"
        case e.OpenPull():
            return f"OpenPull {body.pull} of {body.version}"
        case e.ClosePull():
            return f"ClosePull {body.pull}"
        case e.Retire():
            return f"Retire {_list(body.versions)}"
        case e.Ping():
            return "Ping"


def _codec(said: e.OpenPush | e.Grant) -> str:
    return "" if said.codec == "fp32" else f", in {said.codec} of differences to {said.base}"


def spell_result(result: e.Result) -> str:
    match result:
        case e.Registered():
            order = _slave_order(result.order)
            return f"Registered as incarnation {result.sinc} in term {result.term}, head {result.head}: {order}"
        case e.Joined():
            leased = _list(result.ranges)
            former = f", {result.accounted} tokens of its former incarnation accounted for" if result.accounted else ""
            told = f"Joined as incarnation {result.inc} in term {result.term}, head {result.head}"
            return f"{told}, still leased {leased}{former}"
        case e.Grant():
            return f"Grant {_grant(result)}{_codec(result)}"
        case e.Pending():
            return f"Pending: {result.reason}"
        case e.Refused():
            return f"Refused for {result.retry_after_s:g} s: {result.reason}"
        case e.Dropped():
            return f"Dropped: {result.reason}"
        case e.Committed():
            return "Committed"
        case e.Outcome():
            kind = f"{result.kind} {result.version}" if result.version else result.kind
            pull = f"pull granted of {_grant(result.pull)}" if result.pull else "no pull granted"
            return f"Outcome {kind}, {pull}, {result.progress.tokens} tokens accepted: {result.reason}"
        case e.Finished():
            return f"Finished at {result.version}"
        case e.Ranges():
            return f"Ranges {_list(result.ranges)}{', exhausted' if result.exhausted else ''}"
        case e.Failed():
            return f"Failed {result.error.__name__}: {result.message}"
        case e.Acknowledged():
            return "Acknowledged"
        case e.SeedGranted():
            return f"SeedGranted {result.push} of {_grant(result.grant)}"
        case e.Extended():
            again = f", and goes on from {result.resumed}" if result.resumed else ""
            return f"Extended: the run goes to {_targets(result.targets)}{again}"
        case e.Tuned():
            return f"Tuned: {describe_changes(result.changes) or 'nothing'}"


def spell_record(record: r.Record) -> str:
    match record:
        case r.IncarnationGiven():
            return f"IncarnationGiven {record.role} {record.name}/{record.inc} to process {record.nonce}"
        case r.RoundReserved():
            return f"RoundReserved {record.round}"
        case r.VersionCommitted():
            folds = ", ".join(f"{f.push} × {f.weight:.4g} ({f.tokens} tokens)" for f in record.folds)
            durable = "" if record.durable else ", not durable"
            durable += "" if record.step.lr in (OuterOptions().lr, 0.0) else f", lr {record.step.lr:g}"
            told = f"{folds}; {_outcomes(record.outcomes)}"
            return f"VersionCommitted {record.version} of {record.parent}{durable}: {told}"
        case r.VersionDurable():
            return f"VersionDurable {record.version}"
        case r.RolledBack():
            return f"RolledBack to {record.head}, undone {_list(record.undone)}: {record.reason}"
        case r.RoundEnded():
            return f"RoundEnded {record.round} {record.kind}: {record.reason}; {_outcomes(record.outcomes)}"
        case r.RangesLeased():
            return f"RangesLeased {record.cluster}/{record.inc} question {record.seq}: {_list(record.ranges)}"
        case r.ClusterEnded():
            out = f", {record.open_tokens} with push {record.open_seq}" if record.open_seq else ""
            return f"ClusterEnded {record.cluster}/{record.inc}, {record.tokens_lost} tokens lost{out}: {record.reason}"
        case r.ClusterReadmitted():
            return f"ClusterReadmitted {record.penalty.cluster}, warm-up of {record.penalty.warm_left} pushes"
        case r.ClusterDiverged():
            quarantined = ", quarantined" if record.penalty.quarantined else ""
            return f"ClusterDiverged {record.penalty.cluster}, {record.penalty.gated_in_a_row} in a row{quarantined}"
        case r.VersionsRetired():
            return f"VersionsRetired {_list(record.versions)}"
        case r.RunFinished():
            return f"RunFinished at {record.version}: {record.reason}"
        case r.RunExtended():
            return f"RunExtended to {_targets(record.targets)}, was finished at {record.resumed or 'nothing'}"
        case r.OptionsTuned():
            return f"OptionsTuned {describe_changes(record.changes)}"
        case r.ClusterQuarantined():
            return f"ClusterQuarantined {record.cluster}: {record.reason or 'released'}"
        case r.ProtocolRaised():
            return f"ProtocolRaised to {record.protocol}"
        case r.OperatorActed():
            passed = f", {record.passed_over} passed over" if record.passed_over else ""
            told = f"{record.caller} asked {record.action} {record.arguments}".rstrip()
            return f"OperatorActed: {told}: {record.outcome}{passed}"


def _targets(targets: Targets) -> str:
    return ", ".join(f"{key} {value:g}" for key, value in asdict(targets).items() if value)


def _outcomes(rows: tuple[r.OutcomeRow, ...]) -> str:
    return ", ".join(f"{row.push} {row.kind}" for row in rows) or "no outcomes"


def _slave_order(order: e.SlaveOrder) -> str:
    match order:
        case e.Hold():
            return "Hold"
        case e.RegisterLater():
            return f"Wait {order.retry_after_s:g} s: {order.reason}"
        case _:
            return f"{type(order).__name__} {order.version}"


def _grant(grant: e.Grant) -> str:
    return f"{grant.version} at {_list(tuple(f'{s.name}/{s.sinc}' for s in grant.slaves))}"


def _list(things: tuple[object, ...]) -> str:
    return ",".join(map(str, things)) or "none"


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"

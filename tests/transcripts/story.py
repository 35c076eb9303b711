"""Transcripts: stories of the Coordinator that an operator can read. Commands go in, its answers come out, as text.

A story is a text of blocks: a line `> command`, and under it what the Coordinator said, one effect a line; replay.py
carries out the commands. Records are written into
a real ledger in memory, so a master can crash before or after what it said last was durable.

Notation: `→` an order to a slave, `■` a record, `←` an answer to whoever asked, `·` a note for the log, `!` an exit.
"""

from __future__ import annotations

from dataclasses import replace
from math import isinf

from dips.errors import class_named
from dips.ids import GENESIS, PullId, PushId, VersionId
from dips.master.ledger import Ledger
from dips.protocol import events as ev
from dips.protocol.coordinator import Coordinator
from dips.protocol.effects import Apply, Fold, Measure, Order, OrderBody, Persist, Registered, Reply
from dips.protocol.manifest import Layer, Manifest, Parameter
from dips.protocol.options import TunedOption
from dips.protocol.placement import place_layers
from dips.protocol.records import Record, RunRow
from dips.protocol.releases import PROTOCOL
from dips.sim.disk import LedgerDisk
from tests.push_digest import digest_push
from tests.transcripts.spelling import spell
from tests.transcripts.words import Words, options, transfer

RUN, CONFIG = "story", "config"
BASE_NORM_SQ = 0.01  # Σ(θ − θ_j)² of a layer, unless a story says otherwise


class Teller:
    """One story as it goes: the Coordinator, its ledger, the clock, and what slaves have not answered yet."""

    def __init__(self, words: Words) -> None:
        names = [f"s{i}" for i in range(int(words.get("slaves", "2")))]
        layers = [Layer(f"l{i}", (Parameter(f"l{i}.w", (4,)),)) for i in range(len(names))]
        self.manifest, self.options = Manifest(tuple(layers)), options(words)
        placement = place_layers(self.manifest, names)
        genesis = tuple(f"{i:032x}" for i in range(len(layers)))
        row = RunRow(RUN, CONFIG, self.manifest.to_json(), placement, genesis, (2.0,) * len(layers))
        row = replace(row, protocol=int(words.get("protocol", str(PROTOCOL))))
        self.slots = int(words.get("slots", "2"))
        self.disk = LedgerDisk(row)
        self.now = 0.0
        self.unwritten: list[Record] = []
        self.orders: list[Order] = []
        self.asked: dict[int, str] = {}
        self.lives: dict[str, int] = {}
        self.start()

    # ---- the master ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A new incarnation of the master: what was durable is what it knows."""
        self.orders.clear()
        ledger: Ledger = self.disk.open_ledger()
        ledger.start_term()
        self.ledger, self.machine = ledger, Coordinator(ledger.read_state(), self.manifest, self.options, self.now)

    def settle(self) -> None:
        """What the last step recorded is durable now."""
        if self.unwritten:
            self.ledger.write_records(self.unwritten)
            self.unwritten = []

    def step(self, event: ev.Event, asker: str = "") -> list[str]:
        """Give the machine one event; return its effects, spelled."""
        self.settle()
        if asker:
            event = replace(event, req=len(self.asked) + 1)  # type: ignore[arg-type]  # every question has one
            self.asked[len(self.asked) + 1] = asker
        lines = []
        for effect in self.machine.step(event, self.now):
            if isinstance(effect, Record):
                self.unwritten.append(effect)
            elif isinstance(effect, Order):
                self.orders = [o for o in self.orders if o.number != effect.number] + [effect]
            elif isinstance(effect, Reply) and isinstance(effect.result, Registered):
                self.lives[self.asked[effect.req]] = effect.result.sinc
            elif isinstance(effect, Reply) and hasattr(effect.result, "inc"):
                self.lives[self.asked[effect.req]] = effect.result.inc
            lines.append(spell(effect, self.asked))
        return lines

    # ---- commands: slaves ------------------------------------------------------------------------------------------

    def registers(self, slave: str, words: Words) -> list[str]:
        held = words.get("holds", "")
        complete = tuple(VersionId.parse(v) for v in words["disk"].split(",")) if "disk" in words else ()
        event = ev.SlaveRegistered(
            req=0, slave=slave, nonce=words.get("process", "p1"), run=RUN, address=f"{slave}:1", lanes=(f"{slave}:2",),
            term_seen=int(words.get("term", "0")), memory=VersionId.parse(held) if held else None,
            prepared=VersionId.parse(words["prepared"]) if "prepared" in words else None, complete=complete,
            slots=self.slots, reason=words.get("reason", ""), rival_heard_s=float(words.get("heard_s", "inf")),
            unseeded="empty" in words, former_nonce=words.get("former", ""),
            unread=tuple(VersionId.parse(v) for v in words.get("unread", "").split(",") if v),
            newest_protocol=int(words.get("speaks", str(PROTOCOL))),
        )  # fmt: skip
        return self.step(event, slave)

    def answers(self, slave: str, words: Words) -> list[str]:
        """The slave carries out every order it has heard so far, or only those of one kind."""
        lines = []
        for order in [
            o for o in self.orders if slave in ("all", o.slave) and words.get("only") in (None, _kind(o.body))
        ]:
            self.orders.remove(order)
            lines += self.step(ev.OrderAnswered(order.slave, order.sinc, order.number, self._answer(order.body, words)))
        return lines

    def _answer(self, body: OrderBody, words: Words) -> ev.Answer:
        match body:
            case Measure():
                finite = "nan" not in words
                square = float(words.get("norm", "0.1" if finite else "nan")) ** 2
                return ev.Measured((square,), finite, digest=digest_push(body.push))
            case Fold():
                return ev.Folded((BASE_NORM_SQ,))
            case Apply():
                return ev.Prepared(body.version)
            case Persist():
                return ev.Persisted(body.version, "d1ge57")
            case _:
                return ev.Done()

    def fails(self, slave: str, words: Words) -> list[str]:
        """The oldest order (of one kind) that it has not answered fails with an error of dips.errors."""
        order = next(o for o in self.orders if o.slave == slave and words.get("only") in (None, _kind(o.body)))
        self.orders.remove(order)
        error = class_named(words["error"])
        assert error is not None, f"no class of dips.errors: {words['error']}"
        return self.step(ev.OrderFailed(slave, order.sinc, order.number, error, words.get("why", "")))

    def staged(self, slave: str, words: Words) -> list[str]:
        push = self._push(words["push"])
        names = [name for name, _ in self.ledger.read_state().row.placement] if slave == "all" else [slave]
        return [line for n in names for line in self.step(ev.PushStaged(n, self._incarnation(n, words), push, 16))]

    def refuses_push(self, slave: str, words: Words) -> list[str]:
        return self.step(
            ev.PushRefused(slave, self._incarnation(slave, words), self._push(words["push"]), words.get("why", ""))
        )

    def slave_silent(self, slave: str, words: Words) -> list[str]:
        return self.step(ev.SlaveSilent(slave, self._incarnation(slave, words), 10.0))

    # ---- commands: clusters ----------------------------------------------------------------------------------------

    def joins(self, cluster: str, words: Words) -> list[str]:
        # Another process of the same directory names the incarnation before it; one of another directory knows none.
        former = 0 if words.get("directory") == "another" else self.lives.get(cluster, 0)
        process, taking_over = words.get("process", "p1"), words.get("takes") == "over"
        event = ev.ClusterJoined(
            0,
            cluster,
            process,
            RUN,
            self.manifest.digest,
            CONFIG,
            former=former,
            take_over=taking_over,
            rival_heard_s=float(words.get("heard_s", "0")),
            newest_protocol=int(words.get("speaks", str(PROTOCOL))),
        )
        return self.step(event, cluster)

    def asks_push(self, cluster: str, words: Words) -> list[str]:
        base = VersionId.parse(words.get("base", str(GENESIS)))
        push, ranks = self._push(words["push"]), int(words.get("ranks", "1"))
        tokens, step_s = int(words.get("tokens", "0")), float(words.get("step_s", "0"))
        return self.step(ev.PushRequested(0, push, base, ranks, tokens, step_s), cluster)

    def finishes_push(self, cluster: str, words: Words) -> list[str]:
        tokens, steps = int(words.get("tokens", "100")), int(words.get("steps", "1"))
        ranges = tuple(int(r) for r in words["ranges"].split(",")) if "ranges" in words else ()
        return self.step(ev.PushFinished(0, self._push(words["push"]), tokens, steps, ranges, 2.5), cluster)

    def aborts_push(self, cluster: str, words: Words) -> list[str]:
        push, why, diverged = self._push(words["push"]), words.get("why", "its trainer died"), "diverged" in words
        return self.step(ev.PushAborted(0, push, why, diverged), cluster)

    def awaits(self, cluster: str, words: Words) -> list[str]:
        return self.step(ev.RoundAwaited(0, self._push(words["push"])), cluster)

    def asks_pull(self, cluster: str, words: Words) -> list[str]:
        pull, version = self._pull(words["pull"]), VersionId.parse(words["version"]) if "version" in words else None
        return self.step(ev.PullRequested(0, pull, int(words.get("ranks", "1")), version), cluster)

    def finishes_pull(self, cluster: str, words: Words) -> list[str]:
        return self.step(ev.PullFinished(0, self._pull(words["pull"]), words.get("installed", "yes") == "yes"), cluster)

    def leases(self, cluster: str, words: Words) -> list[str]:
        inc = self._incarnation(cluster, words)
        return self.step(ev.RangesRequested(0, cluster, inc, int(words["seq"]), int(words.get("count", "2"))), cluster)

    def cluster_silent(self, cluster: str, words: Words) -> list[str]:
        consumed, lost = int(words.get("consumed", "0")), int(words.get("lost", "0"))
        return self.step(ev.ClusterSilent(cluster, self._incarnation(cluster, words), 10.0, consumed, lost))

    def told(self, cluster: str, words: Words) -> list[str]:
        """The judge tells what the incarnation's heartbeats said; asked before each Join and while a push is open."""
        inc, steps = self._incarnation(cluster, words), int(words.get("steps", "0"))
        return self.step(ev.TokensReported(cluster, inc, int(words["tokens"]), 0, steps))

    def leaves(self, cluster: str, words: Words) -> list[str]:
        return self.step(
            ev.ClusterLeft(0, cluster, self._incarnation(cluster, words), int(words.get("consumed", "0"))), cluster
        )

    def trainer(self, cluster: str, words: Words) -> list[str]:
        moving = words.get("moves", "yes") == "yes"
        return self.step(
            ev.TrainerChanged(cluster, self._incarnation(cluster, words), moving, words.get("why", "its trainer died"))
        )

    def measures(self, cluster: str, words: Words) -> list[str]:
        """The judge has heard how fast its transfers move."""
        return self.step(ev.BandwidthMeasured(cluster, self._incarnation(cluster, words), float(words["bytes_per_s"])))

    def comes(self, cluster: str, words: Words) -> list[str]:
        """The judge has heard that its ranks come to its push or pull, or move it."""
        return self.step(ev.TransferAwaited(cluster, self._incarnation(cluster, words), int(words["seq"])))

    def heartbeat(self, peer: str, words: Words) -> list[str]:
        """What a heartbeat of this incarnation would be answered."""
        incarnation = self._incarnation(peer, words)
        if peer.startswith("s"):
            register, as_of, listed = self.machine.slave_live(peer, incarnation)
            live = " ".join(map(str, (*listed.pushes, *listed.pulls))) or "nothing"
            return [f"{peer} ← {'register anew' if register else f'live is {live}, as of order {as_of}'}"]
        standing, push, pull = self.machine.cluster_standing(peer, incarnation)
        follow = "" if self.machine.proven_term else ", of no term to follow"
        return [f"{peer} ← {standing}, its push is {push or 'none'}, its pull {pull or 'none'}{follow}"]

    # ---- commands: an operator -------------------------------------------------------------------------------------

    def readmit(self, cluster: str, words: Words) -> list[str]:
        return self.step(ev.ReadmissionAsked(0, cluster), "operator")

    def extend(self, _: str, words: Words) -> list[str]:
        changes = tuple(ev.TargetChange(key, float(value)) for key, value in words.items())
        return self.step(ev.ExtensionAsked(0, changes), "operator")

    def seed(self, seeder: str, words: Words) -> list[str]:
        """An operator's process asks to bring the first model."""
        genesis = self.ledger.read_state().row.genesis
        digests = (*genesis[:-1], "0ther") if words.get("model") == "another" else genesis
        return self.step(ev.SeedAsked(0, seeder, digests, int(words.get("gives_up", "0"))), "operator")

    def drain(self, slave: str, words: Words) -> list[str]:
        return self.step(ev.DrainAllAsked(0) if slave == "all" else ev.DrainAsked(0, slave), "operator")

    def finalise(self, caller: str, words: Words) -> list[str]:
        return self._audited(caller, ev.FinaliseAsked(0, int(words.get("protocol", str(PROTOCOL)))))

    def tune(self, caller: str, words: Words) -> list[str]:
        changes = tuple(
            TunedOption(key, 0.0, off=True) if value == "off" else TunedOption(key, float(value))
            for key, value in words.items()
        )
        return self._audited(caller, ev.TuningAsked(0, changes))

    def quarantine(self, caller: str, words: Words) -> list[str]:
        return self._audited(caller, ev.QuarantineAsked(0, words["cluster"], words.get("why", "")))

    def asks_rollback(self, caller: str, words: Words) -> list[str]:
        return self._audited(caller, ev.RollbackAsked(0, VersionId.parse(words["to"])))

    def asks_drain(self, caller: str, words: Words) -> list[str]:
        return self._audited(caller, ev.DrainAsked(0, words["slave"]))

    def denied(self, caller: str, words: Words) -> list[str]:
        """The shell refuses an operator's call."""
        times, said = int(words.get("times", "1")), list[str]()
        for _ in range(times):
            said = self.step(ev.OperatorReported(caller, words["action"], words["of"], words["why"], True, self.now))
        return said

    def expelled(self, cluster: str, words: Words) -> list[str]:
        """The shell found that its certificate counts no more."""
        return self.step(ev.ClusterExpelled(cluster, words["why"]))

    def _audited(self, caller: str, request: ev.OperatorRequest) -> list[str]:
        return self.step(ev.OperatorAsked(0, caller, self.now, request), caller)

    # ---- commands: beginnings that other stories tell in full ------------------------------------------------------

    def ready(self, _: str, words: Words) -> list[str]:
        """Every slave registers and serves the head."""
        names = [name for name, _ in self.ledger.read_state().row.placement]
        for name in names:
            self.registers(
                name, {"holds": self.machine.build_view(self.now).head, "term": str(self.machine.term), **words}
            )
        return [self._state("slaves", name) for name in names]

    def trains(self, cluster: str, words: Words) -> list[str]:
        """A cluster joins, pulls the head under seq 1 and trains."""
        self.joins(cluster, words)
        pull = f"{cluster}/{self.lives[cluster]}^1"
        self.asks_pull(cluster, {"pull": pull})
        self.answers("all", {"only": "OpenPull"})
        self.finishes_pull(cluster, {"pull": pull})
        self.answers("all", {"only": "ClosePull"})
        return [self._state("clusters", cluster)]

    def pushes(self, cluster: str, words: Words) -> list[str]:
        """A cluster pushes up to its commit; the lines are those of the commit."""
        self.asks_push(cluster, words)
        self.answers("all", {"only": "OpenPush"})
        granted = self.asks_push(cluster, words)
        self.staged("all", words)
        return [*granted, *self.finishes_push(cluster, words)]

    # ---- commands: the master and time -----------------------------------------------------------------------------

    def later(self, _: str, words: Words) -> list[str]:
        """Time passes; a tick follows."""
        self.now += float(words["s"])
        return self.step(ev.Ticked())

    def sleep(self, _: str, words: Words) -> list[str]:
        """The master sleeps until its next deadline, as its runtime does; a tick follows."""
        due = self.machine.next_deadline()
        if isinf(due):
            return ["nothing is due"]
        passed_s, self.now = due - self.now, due
        return [f"{passed_s:.4g} s later", *self.step(ev.Ticked())]

    def blind(self, _: str, words: Words) -> list[str]:
        self.now += float(words["s"])
        return self.step(ev.Blind(float(words["s"])))

    def restart(self, _: str, words: Words) -> list[str]:
        """The master dies and a new one starts; `losing=records`: before what it said last was durable."""
        if words.get("losing") == "records":
            lost = ", ".join(type(r).__name__ for r in self.unwritten) or "nothing"
            self.unwritten = []
        else:
            lost = "nothing"
            self.settle()
        self.start()
        return [f"lost: {lost}", *self.status("", {})]

    def status(self, _: str, words: Words) -> list[str]:
        view = self.machine.build_view(self.now)
        r = view.round
        lines = [f"term {view.term}, head {view.head}, round {r.state}: {r.reason}"]
        durability = view.durability
        if durability.state != "durable":
            lines.append(f"{durability.state}: {durability.reason}")
        return lines + [self._state(role, name) for role in ("clusters", "slaves") for name in getattr(view, role)]

    def _state(self, role: str, name: str) -> str:
        peer = getattr(self.machine.build_view(self.now), role)[name]
        return f"{name} {peer.state}: {peer.reason}"

    # ---- names -----------------------------------------------------------------------------------------------------

    def _incarnation(self, name: str, words: Words) -> int:
        return int(words["incarnation"]) if "incarnation" in words else self.lives[name]

    def _push(self, text: str) -> PushId:
        cluster, inc, seq = transfer(text, "#")
        return PushId(cluster, inc, seq)

    def _pull(self, text: str) -> PullId:
        cluster, inc, seq = transfer(text, "^")
        return PullId(cluster, inc, seq)


def _kind(body: OrderBody) -> str:
    return type(body).__name__

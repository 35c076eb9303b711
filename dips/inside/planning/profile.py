"""The two files of `dips plan cluster`: what the machines can do (profile.yaml), and what a layer of the model needs
(model.yaml).

    nodes:                                   kinds:
      - {name: c0, kind: A100, devices: 8, site: east}   A100: {memory_gb: 80, tflops: 312, inside_gbit: 2400}
    links:
      east: {east: {gbit: 100, latency_us: 20}, west: {gbit: 1, latency_us: 20000, shared: true}}
      west: {east: {gbit: 1, latency_us: 20000, shared: true}, west: 25}
    measured:
      A100: {block: {forward: [0.004, 0.0001], input: [0.004, 0.0001], weight: [0.004, 0.0001]}}

`links` has a rate from the first site or node to the second, for each way; a node's own line goes before its site's,
and a number stands for `{gbit: …}`. `measured` has a line for each kind and layer: seconds per sample, and the
seconds that any micro-batch takes (`dips profile` fits it through three micro-batches). What is not measured is
scaled by FLOP/s and `efficiency`, and the plan says *estimated*.

Mended, of SpanTrain §3.2.1: `p_t = α + β/m` adds seconds to seconds per byte, so a link is its latency and its rate
here and a transfer takes latency + bytes ÷ rate; and `p_c = Σ w/t` sums speeds of unlike tasks by weights that nobody
can know: a device is the seconds of each layer of this model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from math import inf, isfinite
from statistics import fmean
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from dips.errors import ConfigError
from dips.inside.planning.simulate import PassSeconds, Route

GBIT_BYTES, GB, TERA = 1.25e8, 1e9, 1e12
EFFICIENCY = 0.45  # of a device's FLOP/s where nothing was measured: large Llamas on A100s reach 0.4 to 0.5
COPY_GBIT = 96.0  # between device and host memory: about 12 GB/s, PCIe 3 with 16 lanes
LAUNCH_S = 2e-4  # that a layer takes for any micro-batch where nothing was measured: starts of kernels
Made = TypeVar("Made")


# ---- profile.yaml ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterNode:
    """Devices of one kind behind one network card."""

    name: str
    kind: str
    devices: int = 1  # 0: it is not there now, and is known when it comes back
    site: str = "site"
    card_gbit: float | None = None  # null: as much as its fastest link to another node


@dataclass(frozen=True)
class DeviceKind:
    """Devices that are alike. Vendors' figures where nothing was measured."""

    memory_gb: float
    tflops: float  # of the format that the model trains in
    inside_gbit: float = COPY_GBIT  # between two devices of one node
    inside_us: float = 10.0
    copy_gbit: float = COPY_GBIT
    efficiency: float = EFFICIENCY


@dataclass(frozen=True)
class LinkSpeed:
    """One way between two sites or nodes. `shared`: all transfers together have this rate, not each pair of nodes."""

    gbit: float
    latency_us: float = 50.0
    shared: bool = False


Line = tuple[float, float]  # seconds per sample, seconds of any micro-batch


@dataclass(frozen=True)
class MeasuredLayer:
    """Seconds of a layer on one kind of device."""

    forward: Line
    input: Line
    weight: Line


@dataclass(frozen=True)
class ClusterProfile:
    """The machines. Devices are called node.number."""

    nodes: tuple[ClusterNode, ...]
    kinds: Mapping[str, DeviceKind]
    links: Mapping[str, Mapping[str, LinkSpeed]] = field(default_factory=dict)
    measured: Mapping[str, Mapping[str, MeasuredLayer]] = field(default_factory=dict)

    @cached_property
    def places(self) -> dict[str, ClusterNode]:
        """The node of each device, in the file's order."""
        return {f"{node.name}.{number}": node for node in self.nodes for number in range(node.devices)}

    def kind_of(self, device: str) -> DeviceKind:
        return self.kinds[self.places[device].kind]

    def find_link(self, sender: ClusterNode, receiver: ClusterNode) -> LinkSpeed | None:
        """Return the rate from one node to another, by their names or by their sites."""
        ends = self.find_ends(sender, receiver)
        return None if ends is None else self.links[ends[0]][ends[1]]

    def find_ends(self, sender: ClusterNode, receiver: ClusterNode) -> tuple[str, str] | None:
        """Return the two names by which `links` has the rate from one node to another."""
        ends = ((a, b) for a in (sender.name, sender.site) for b in (receiver.name, receiver.site))
        return next(((a, b) for a, b in ends if b in self.links.get(a, {})), None)

    @cached_property
    def cards(self) -> dict[str, float]:
        """Bytes a second of each node's network card."""
        fastest: dict[str, float] = {}
        for a in self.nodes:
            rates = [link.gbit for b in self.nodes if a is not b and (link := self.find_link(a, b)) is not None]
            fastest[a.name] = (a.card_gbit or max(rates, default=COPY_GBIT)) * GBIT_BYTES
        return fastest

    def route(self, sender: str, receiver: str) -> Route:
        """Return the way between two devices."""
        a, b = self.places[sender], self.places[receiver]
        if a is b:
            kind = self.kinds[a.kind]
            return Route(kind.inside_us * 1e-6, (((sender, receiver), 1 / (kind.inside_gbit * GBIT_BYTES)),))
        link = self.find_link(a, b)
        assert link is not None, f"{sender} and {receiver}: check_profile lets none through"
        line: Hashable = ("line", a.site, b.site) if link.shared else ("pair", a.name, b.name)
        uses = (
            (("out", a.name), 1 / self.cards[a.name]),
            (line, 1 / (link.gbit * GBIT_BYTES)),
            (("in", b.name), 1 / self.cards[b.name]),
        )
        return Route(link.latency_us * 1e-6, uses)

    def ring(self, devices: Iterable[str]) -> Route:
        """Return the slowest hop of a ring over these devices, node by node, and the cards that it passes."""
        ring = [d for d in self.places if d in set(devices)]
        if len(ring) < 2:
            return Route(0.0, ())
        hops = [self.route(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)]
        slowest = max(hop.byte_s for hop in hops)
        things = {thing: slowest for hop in hops for thing, _ in hop.uses if thing[0] in ("out", "in", "line")}  # type: ignore[index]
        return Route(max(hop.latency_s for hop in hops), (*things.items(), ("ring", slowest)))

    def scale_links(self, factor: float) -> ClusterProfile:
        """Return the profile with all lines between nodes so much faster."""
        links = {a: {b: replace(l, gbit=l.gbit * factor) for b, l in row.items()} for a, row in self.links.items()}
        nodes = tuple(replace(n, card_gbit=n.card_gbit * factor if n.card_gbit else None) for n in self.nodes)
        return replace(self, nodes=nodes, links=links)

    def only(self, devices: Iterable[str]) -> ClusterProfile:
        """Return the profile of these devices' nodes alone, each with as many devices as are named."""
        counts = Counter(self.places[d].name for d in devices)
        return replace(self, nodes=tuple(replace(n, devices=counts[n.name]) for n in self.nodes if counts[n.name]))


def ring_seconds(route: Route, devices: int, nbytes: float) -> float:
    """Seconds of an all-gather or a reduce-scatter of so many bytes in all, over a ring (`ClusterProfile.ring`) of at
    least one device.
    """
    return (devices - 1) * (route.latency_s + nbytes / devices * route.byte_s)


def check_profile(profile: ClusterProfile, name: str) -> None:
    """Raise ConfigError for what cannot be planned with: an unknown kind, a missing or one-way link, absurd figures."""

    def refuse(key: str, text: str) -> None:
        raise ConfigError(f"{name}: {key}: {text}")

    there = [node for node in profile.nodes if node.devices]
    if not there:
        refuse("nodes", "expected at least one node with devices, got none")
    twice = [n for n, count in Counter(node.name for node in profile.nodes).items() if count > 1]
    if twice:
        refuse("nodes", f"two nodes are called {twice[0]}, so their devices have one name: rename one")
    for node in profile.nodes:
        if node.kind not in profile.kinds:
            refuse(f"nodes.{node.name}.kind", f"expected one of {', '.join(profile.kinds)}, got {node.kind}")
        if not 0 <= node.devices <= 1024:
            refuse(f"nodes.{node.name}.devices", f"expected 0 to 1024, got {node.devices}")
    for key, value in _figures(profile):
        if not (isfinite(value) and value > 0):
            refuse(key, f"expected a number above 0, got {value}")
    for kind, layers in profile.measured.items():
        for layer, row in layers.items():
            for op in ("forward", "input", "weight"):
                slope, start = getattr(row, op)
                if not (0 <= slope < 3600 and 0 <= start < 3600):
                    refuse(f"measured.{kind}.{layer}.{op}", f"absurd seconds {slope}, {start}: expected 0 to 3600")
    known = {n.name for n in profile.nodes} | {n.site for n in profile.nodes}
    if unknown := sorted({*profile.links, *(b for row in profile.links.values() for b in row)} - known):
        refuse(f"links.{unknown[0]}", f"expected a node or a site, which are {', '.join(sorted(known))}")
    for a in there:
        for b in there:
            if a is not b and profile.find_link(a, b) is None:
                way = "one-way" if profile.find_link(b, a) is not None else "missing"
                refuse(
                    f"links.{a.site}.{b.site}", f"{way}: expected the rate from {a.name} to {b.name}, as {{gbit: 10}}"
                )


def _figures(profile: ClusterProfile) -> Iterable[tuple[str, float]]:
    for name, kind in profile.kinds.items():
        yield from ((f"kinds.{name}.{f.name}", getattr(kind, f.name)) for f in fields(kind))
    for a, row in profile.links.items():
        for b, link in row.items():
            yield f"links.{a}.{b}.gbit", link.gbit
            yield f"links.{a}.{b}.latency_us", link.latency_us + 1e-9  # 0 may stand there
    yield from ((f"nodes.{n.name}.card_gbit", n.card_gbit) for n in profile.nodes if n.card_gbit is not None)


# ---- model.yaml ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerNeed:
    """One layer, or `repeat` alike; figures are of one layer and one sample."""

    name: str
    parameters: float
    flops: float  # of the forward of a sample
    activation_bytes: float  # that the backward needs, of a sample
    border_bytes: float  # of its output, of a sample
    repeat: int = 1
    tied: str | None = None  # an earlier layer, all of whose parameters are this one's, too


@dataclass(frozen=True)
class TransformerShape:
    """A decoder as Llama's: `layers` is made from it."""

    blocks: int
    hidden: int
    ffn: int
    vocab: int
    gated: bool = True  # three matrices in the feed-forward, as in Llama; GPT-2 has two
    tied: bool = False  # the head's matrix is the embedding's


@dataclass(frozen=True)
class ModelProfile:
    """The model and how it is trained."""

    name: str
    batch: int  # samples of a step
    sequence: int = 1  # tokens of a sample
    layers: tuple[LayerNeed, ...] = ()
    transformer: TransformerShape | None = None
    recompute: bool = True  # a layer's activations are computed again in its backward; only borders are kept
    bf16_borders: bool = False  # activations and their gradients of 32 bits cross borders between stages in bf16
    parameter_bytes: float = 2.0
    gradient_bytes: float = 2.0
    state_bytes: float = 12.0  # of the optimizer, with fp32 masters

    @cached_property
    def chain(self) -> tuple[LayerNeed, ...]:
        """Every layer, in order."""
        made = self.layers or (_transformer_layers(self.transformer, self.sequence) if self.transformer else ())
        return tuple(replace(layer, repeat=1) for layer in made for _ in range(layer.repeat))

    @cached_property
    def ties(self) -> tuple[tuple[int, int, float], ...]:
        """The layers that share parameters: number of the later one, that of the first, and how many they share."""
        chain = self.chain
        first = {layer.name: number for number, layer in reversed([*enumerate(chain)])}
        found = ((number, first[layer.tied]) for number, layer in enumerate(chain) if layer.tied is not None)
        return tuple((copy, owner, chain[owner].parameters) for copy, owner in found)

    @property
    def border_share(self) -> float:
        """The share of a layer's `border_bytes` that goes over a border."""
        return 0.5 if self.bf16_borders else 1.0

    @property
    def parameters(self) -> float:
        """All of them; shared ones count once."""
        return sum(layer.parameters for layer in self.chain) - sum(shared for _, _, shared in self.ties)

    @property
    def flops(self) -> float:
        """Those of a step: a forward, a backward of twice that, and with `recompute` another forward."""
        return self.batch * (4 if self.recompute else 3) * sum(layer.flops for layer in self.chain)


def _transformer_layers(shape: TransformerShape, sequence: int) -> tuple[LayerNeed, ...]:
    """Layers of a decoder in 16 bits. Activations as Korthikanti et al. 2022 count them, with flash attention."""
    h, t = shape.hidden, sequence
    block = 4 * h * h + (3 if shape.gated else 2) * h * shape.ffn + 2 * h
    border = 2.0 * t * h
    return (
        LayerNeed("embedding", shape.vocab * h, 0.0, border, border),
        LayerNeed(
            "block", block, 2.0 * block * t + 4.0 * t * t * h, 2.0 * t * (8 * h + 4 * shape.ffn), border, shape.blocks
        ),
        LayerNeed(
            "head",
            shape.vocab * h,
            2.0 * shape.vocab * h * t,
            6.0 * t * shape.vocab,
            0.0,
            tied="embedding" if shape.tied else None,
        ),
    )


def check_model(model: ModelProfile, name: str) -> None:
    """Raise ConfigError for a model without layers, or with figures that cannot be."""
    if bool(model.layers) == (model.transformer is not None):
        raise ConfigError(
            f"{name}: expected either `layers` or `transformer`, got {'both' if model.layers else 'neither'}"
        )
    if model.bf16_borders and model.transformer is not None:
        raise ConfigError(f"{name}: bf16_borders: expected `layers` of 32 bits: those of `transformer` have 16 already")
    if model.batch < 1 or model.sequence < 1:
        raise ConfigError(f"{name}: expected batch and sequence of at least 1, got {model.batch}, {model.sequence}")
    for key in ("parameter_bytes", "gradient_bytes", "state_bytes"):
        if not (isfinite(value := getattr(model, key)) and value >= 0):
            raise ConfigError(f"{name}: {key}: expected a number from 0 on, got {value}")
    for key in ("blocks", "hidden", "ffn", "vocab") if model.transformer is not None else ():
        if (count := getattr(model.transformer, key)) < 1:
            raise ConfigError(f"{name}: transformer.{key}: expected at least 1, got {count}")
    for layer in model.layers:
        for key in ("parameters", "flops", "activation_bytes", "border_bytes"):
            if not (isfinite(value := getattr(layer, key)) and value >= 0):
                raise ConfigError(f"{name}: layers.{layer.name}.{key}: expected a number from 0 on, got {value}")
        if layer.repeat < 1:
            raise ConfigError(f"{name}: layers.{layer.name}.repeat: expected at least 1, got {layer.repeat}")
    earlier: dict[str, float] = {}
    for layer in model.layers:
        if layer.tied is not None and not earlier.get(layer.tied, inf) <= layer.parameters:
            raise ConfigError(
                f"{name}: layers.{layer.name}.tied: expected an earlier layer of at most as many parameters, got "
                f"{layer.tied}"
            )
        earlier[layer.name] = layer.parameters


def layer_seconds(
    profile: ClusterProfile, model: ModelProfile, kind: str, layer: LayerNeed, samples: int
) -> PassSeconds:
    """Seconds of one layer's F, I and W for a micro-batch of so many samples; I includes what is computed again."""
    row = profile.measured.get(kind, {}).get(layer.name)
    if row is not None:
        f, i, w = (line[0] * samples + line[1] for line in (row.forward, row.input, row.weight))
    else:
        f = i = w = samples * layer.flops / (profile.kinds[kind].tflops * TERA * profile.kinds[kind].efficiency)
        if layer.flops:
            f, i, w = f + LAUNCH_S, i + LAUNCH_S, w + LAUNCH_S
    return PassSeconds(f, i + f if model.recompute else i, w)


def is_estimated(profile: ClusterProfile, model: ModelProfile, kind: str) -> bool:
    """Return whether a kind's time of any layer is scaled by FLOP/s and not measured."""
    return any(layer.name not in profile.measured.get(kind, {}) for layer in model.chain)


# ---- reading ---------------------------------------------------------------------------------------------------------


def parse_profile(raw: Mapping[str, Any], name: str) -> ClusterProfile:
    """Return the profile of a file's keys. Raises ConfigError that names file and key."""
    profile = build(ClusterProfile, raw, name)
    check_profile(profile, name)
    return replace(profile, nodes=tuple(node for node in profile.nodes if node.devices))


def set_rates(raw: Mapping[str, Any], rates: Mapping[tuple[str, str], float], name: str) -> dict[str, Any]:
    """Return a profile file's keys with other rates of some links; all else stays as it is written.

    rates   bytes a second from one node to another. Of several that `links` has in one line the mean counts
    Errors  ConfigError for a file that is no profile, or that lacks such a link
    """
    profile = parse_profile(raw, name)
    nodes = {node.name: node for node in profile.nodes}
    byte_s: dict[tuple[str, str], list[float]] = {}
    for (a, b), rate in rates.items():
        ends = profile.find_ends(nodes[a], nodes[b]) if a in nodes and b in nodes else None
        if ends is None:
            raise ConfigError(f"{name}: links: expected the rate from {a} to {b}, which the plan has, got none")
        byte_s.setdefault(ends, []).append(1 / rate)
    links = {str(a): {str(b): line for b, line in row.items()} for a, row in raw["links"].items()}
    for (a, b), each in byte_s.items():
        gbit, line = float(f"{1 / fmean(each) / GBIT_BYTES:.4g}"), links[a][b]
        links[a][b] = {**line, "gbit": gbit} if isinstance(line, Mapping) else gbit
    return {**raw, "links": links}


def parse_model(raw: Mapping[str, Any], name: str) -> ModelProfile:
    """Return the model of a file's keys. Raises ConfigError that names file and key."""
    model = build(ModelProfile, raw, name)
    check_model(model, name)
    return model


def build(cls: type[Made], raw: Any, where: str, key: str = "") -> Made:
    """Build a dataclass from a file's keys, by its type hints; unknown and missing keys are refused by name."""
    hints = get_type_hints(cls)
    if cls is LinkSpeed and isinstance(raw, int | float):
        raw = {"gbit": raw}
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: {key or 'file'}: expected a mapping of keys, got {raw!r}")
    above = f"{key}." if key else ""
    if unknown := [k for k in raw if k not in hints]:
        raise ConfigError(f"{where}: {above}{unknown[0]}: unknown key (misspelt, or of another version?)")
    needed = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    if missing := [k for k in needed if k not in raw]:
        raise ConfigError(f"{where}: {above}{missing[0]}: missing, and it has no default")
    return cls(**{k: _convert(hints[k], value, where, above + str(k)) for k, value in raw.items()})


def _convert(hint: Any, value: Any, where: str, key: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return None if value is None else _convert(next(a for a in arguments if a is not NoneType), value, where, key)
    if is_dataclass(hint):
        return build(hint, value, where, key)  # type: ignore[arg-type]
    if origin is tuple and isinstance(value, list | tuple):
        if arguments[-1] is not Ellipsis and len(value) != len(arguments):
            raise ConfigError(f"{where}: {key}: expected {len(arguments)} values, got {len(value)}")
        return tuple(_convert(arguments[0], item, where, f"{key}.{_label(item, i)}") for i, item in enumerate(value))
    if origin is not None and origin is not tuple and isinstance(value, Mapping):
        return {str(k): _convert(arguments[1], item, where, f"{key}.{k}") for k, item in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    wanted = (
        hint.__name__
        if isinstance(hint, type) and origin is None
        else "a list"
        if origin is tuple
        else "a mapping of keys"
    )
    raise ConfigError(f"{where}: {key}: expected {wanted}, got {value!r}")


def _label(item: Any, number: int) -> Any:
    return item.get("name", number) if isinstance(item, Mapping) else number

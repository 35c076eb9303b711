"""Configuration: what stands in configs/ is right, and what is wrong is refused by file and key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import yaml

from dips.codecs import PULL_CODECS, Codec
from dips.config import (
    Shared,
    SlaveSection,
    host_port,
    load_cluster,
    load_run,
)
from dips.config.cluster import DEFAULT_STEPS
from dips.config.reading import read_yaml
from dips.errors import ConfigError, FailedMirror, treatment_of
from dips.identity.names import PeerRole
from dips.identity.paths import TlsFiles
from dips.master.genesis import mirror_of
from dips.protocol.enums import LayerUnit

CONFIGS = Path(__file__).parents[2] / "configs" / "shared"

RUN: dict[str, Any] = {
    "shared": {"run": "r"},
    "master": {"listen": "127.0.0.1:1", "directory": "m"},
    "slaves": [{"name": "s0", "master": "127.0.0.1:1", "directory": "s0", "initial_model": "m/i.safetensors"}],
    "tls": False,
}
CLUSTER: dict[str, Any] = {"shared": {"run": "r"}, "cluster": "a", "master": "127.0.0.1:1", "tls": False}


def write(path: Path, content: object) -> Path:
    path.write_text(yaml.safe_dump(content))
    return path


def changed(content: dict[str, Any], key: str, value: object) -> dict[str, Any]:
    """A copy with one dotted key set."""
    copy: dict[str, Any] = yaml.safe_load(yaml.safe_dump(content))
    at: Any = copy
    *path, last = key.split(".")
    for part in path:
        at = at[int(part)] if part.isdigit() else at.setdefault(part, {})
    at[last] = value
    return copy


PRESETS: dict[str, tuple[object, ...]] = {  # lr, momentum, clip's norm and whether per layer, merge, step, gates
    "paper": (0.7, 0.8, 1.0, False, "mean", "nesterov", ("dips",)),
    "diloco": (0.7, 0.9, None, False, "mean", "nesterov", ()),
    "edit": (0.8, 0.85, 10.0, True, "edit-paper", "nesterov", ("edit",)),
    "a-edit": (0.8, 0.85, 10.0, True, "edit", "nesterov", ("edit",)),
    "default": (0.7, 0.8, None, False, "mean", "share", ("dips", "replay")),
    "post-local-sgd": (1.0, 0.0, None, False, "mean", "sgd", ()),
}


def test_presets_are_shared_sections() -> None:
    """Every preset is a whole shared section that says what its paper does."""
    said = dict[str, tuple[object, ...]]()
    for file in CONFIGS.glob("*.yaml"):
        shared = Shared.model_validate(yaml.safe_load(file.read_text()))
        outer, clip = shared.outer, shared.outer.clip
        rules = (outer.merge, outer.step, shared.penalty.gates)
        said[file.stem] = (outer.lr, outer.momentum, clip.norm, clip.per_layer, *rules)
    assert said == PRESETS


@pytest.mark.parametrize("load", [load_run, load_cluster])
@pytest.mark.parametrize("file", sorted(CONFIGS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_shared_section_is_no_file_of_a_run(file: Path, load: Callable[[Path], object]) -> None:
    """Whoever takes one of configs/shared for a run file or a cluster file reads what it is, not what it lacks."""
    with pytest.raises(ConfigError, match=rf"{file.name}: this is a `shared` section: .*`shared: {file.name}`"):
        load(file)


def test_each_rule_is_agreed_on() -> None:
    """Another rule of the step, or another unit of layers, is another digest."""

    def digest_with(**outer: Any) -> str:
        return Shared.model_validate({"run": "r", "outer": outer}).digest

    others: list[dict[str, Any]] = [{"merge": "rda"}, {"step": "nesterov"}, {"weights": "uniform"}, {"lr": "auto"}]
    others += [{"clip": {"norm": 1.0}}, {"clip": {"norm": 1.0, "per_layer": True}}]
    digests = {digest_with(**outer) for outer in others}
    assert len(digests | {digest_with()}) == 7
    assert Shared(run="r").digest == Shared(run="r", layers=LayerUnit.BLOCK).digest
    assert Shared(run="r").digest != Shared(run="r", layers=LayerUnit.MODULE).digest


def test_own_data_is_the_word_for_no_ranges() -> None:
    """`data: own` and `data: {ranges: 0}` agree; a data set's digest is agreed on."""
    own, none = (Shared.model_validate({"run": "r", "data": data}) for data in ("own", {"ranges": 0}))
    assert own.digest == none.digest and own.data.ranges == 0
    named = Shared.model_validate({"run": "r", "data": {"ranges": 8, "digest": "d" * 64}})
    assert named.digest != Shared.model_validate({"run": "r", "data": {"ranges": 8}}).digest


@pytest.mark.parametrize(
    ("advertise", "control", "lane"),
    [
        (None, "0.0.0.0:7811", "0.0.0.0:7812"),
        ("ps0.example", "ps0.example:7811", "ps0.example:7812"),
        ("::1", "[::1]:7811", "[::1]:7812"),
        (("node.example:30001", "node.example:30002"), "node.example:30001", "node.example:30002"),
    ],
)
def test_a_slave_is_reached_where_it_says(advertise: str | tuple[str, ...] | None, control: str, lane: str) -> None:
    """The ports are those on which it listens and the host may be another; or it says both of each."""
    section = SlaveSection(name="s", master="127.0.0.1:1", directory=Path("d"), advertise=advertise, lanes=1)
    assert section.reached_at(["0.0.0.0:7811", "0.0.0.0:7812"]) == (control, lane)


@pytest.mark.parametrize(
    ("lanes", "advertise", "message"),
    [
        (0, ["n:1", "n:2"], r"2 addresses for any number of lanes"),
        (2, ["n:1", "n:2"], r"2 addresses for 2 lanes"),
        (1, ["n:1", "n"], r"expected an address like 127.0.0.1:7800, got 'n'"),
    ],
)
def test_an_address_for_each_port_or_none(tmp_path: Path, lanes: int, advertise: list[str], message: str) -> None:
    content = changed(changed(RUN, "slaves.0.lanes", lanes), "slaves.0.advertise", advertise)
    with pytest.raises(ConfigError, match=message):
        load_run(write(tmp_path / "dips.yaml", content))


def test_a_cluster_listens_on_loopback_only(tmp_path: Path) -> None:
    """HTTP is plain text without `tls`, as is what a relay passes on, which was refused at the first pull alone. What
    the agent tells ranks is signed.
    """
    for key, value in {"http": "10.0.0.1:9", "relay": "10.0.0.1"}.items():
        with pytest.raises(ConfigError, match=f"{key}: plain text"):
            load_cluster(write(tmp_path / "cluster.yaml", {**CLUSTER, key: value}))
    good = {"http": "[::1]:9", "relay": "::1", "agent": "10.0.0.1:29410"}
    config = load_cluster(write(tmp_path / "cluster.yaml", {**CLUSTER, **good}))
    assert {key: getattr(config, key) for key in good} == good


@pytest.mark.parametrize(("key", "value"), [("http", "10.0.0.1:9"), ("advertise", "ps0.example")])
def test_a_slave_is_on_loopback_only(tmp_path: Path, key: str, value: str) -> None:
    """No address is advertised that plain text may not go to."""
    with pytest.raises(ConfigError, match=rf"slaves.s0.{key}: plain text"):
        load_run(write(tmp_path / "dips.yaml", changed(RUN, f"slaves.0.{key}", value)))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("mater", {}, "mater: unknown key"),
        ("http_token", "token", "http_token: nothing is served without `http: HOST:PORT`"),
        ("slaves.0.http", "10.0.0.1:7821", "slaves.s0.http: plain text .* loopback only"),
        ("master.lissten", "x", "master.lissten: unknown key"),
        ("slaves.0.slot", 2, "slaves.0.slot: unknown key"),
        ("shared.outer.learning_rate", 1.0, "shared.outer.learning_rate: unknown key"),
        ("shared.outer.lr", "fast", "outer.lr: expected a number or auto, got 'fast'"),
        ("shared.outer.lr", -1.0, "outer.lr: expected a number from 1e-09 to 1000, got -1.0"),
        ("shared.outer.clip", {"norm": 1.0, "relative": 2.0}, "not both"),
        (
            "shared.penalty.gates",
            ["dips", "majority"],
            "penalty.gates: expected dips or .*, got 'majority'",
        ),
        ("shared.penalty.gates", ["loss", "loss"], "penalty.gates: expected each gate once"),
        ("shared.penalty.warmup_rounds", 0, "penalty.warmup_rounds: expected a number from 1"),
        ("shared.outer.clip", {"per_layer": True}, "clip.per_layer: expected a norm beside it"),
        ("shared.data.ranges", -1, "data.ranges: expected 0 or more"),
        ("shared.data.epochs", 0, "data.epochs: expected at least 1"),
        ("shared.stop.tokens", -1, "stop.tokens: expected 0 or more"),
        ("shared.codec", "fp16", "shared.codec"),
        ("shared.run", "Not A Name", "run name 'Not A Name' is not usable"),
        ("slaves.0.name", "Not A Name", "slave name 'Not A Name' is not usable"),
        ("clusters", ["a", "Not A Name"], "cluster name 'Not A Name' is not usable"),
        ("slaves", [], "slaves"),
        ("slaves.0.slots", 0, "slaves.0.slots"),
        ("master.timing.window_s", -1.0, "timing.window_s"),
        ("master.listen", "here", "master.listen: expected an address like 127.0.0.1:7800, got 'here'"),
        ("master.listen", "10.0.0.1:7800", "loopback only, got '10.0.0.1:7800'"),
        ("slaves.0.lanes", ["0.0.0.0:0"], "slaves.s0.lanes: .* loopback only, got '0.0.0.0:0'"),
        ("slaves.0.lanes", 17, "slaves.0.lanes"),
        ("slaves.0.lanes", [], "slaves.0.lanes"),
        ("master.listen", 7800, "master.listen: expected text, in quotes where YAML reads a number or date, got 7800"),
        ("shared.run", 2026, "shared.run: expected text, in quotes .*, got 2026"),
        ("shared.stop.tokens", "1e9", "stop.tokens: expected a whole number, in digits, got '1e9'"),
        ("shared.outer.momentum", "0,5", "outer.momentum: expected a number, got '0,5'"),
        ("shared.stop", 100000, "shared.stop: expected keys and their values, got 100000"),
        ("slaves", {"slave-0": {}}, "slaves: expected a list, got {'slave-0': {}}"),
        ("tls", None, "tls: expected the path of a certificate, .* or `tls: off` for plain text"),
        ("tls", True, "tls: expected the path of a certificate"),
        ("tls", "certs/", "tls: expected the path of a certificate, .* got .*certs'"),
        ("tls", {"ca": "a", "cert": "b", "key": "c"}, "tls: expected the path of a certificate"),
        ("master.listen", "127.evil.example:7800", "loopback only, got '127.evil.example:7800'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, key: str, value: object, message: str) -> None:
    """A wrong run file is refused with its path, the key, what was expected and what came; exit code 78."""
    path = write(tmp_path / "dips.yaml", changed(RUN, key, value))
    with pytest.raises(ConfigError, match=message) as caught:
        load_run(path)
    assert str(path) in str(caught.value)
    assert treatment_of(caught.value).exit_code == 78


def test_a_file_of_the_other_kind_is_called_what_it_is(tmp_path: Path) -> None:
    """Not by each key that it lacks or has too many: whoever gives the wrong one of the two is told which to give, and
    on a cluster's machine, which has no run file, how else to name the master. A mistyped key changes no file's kind.
    """
    run, cluster = write(tmp_path / "dips.yaml", RUN), write(tmp_path / "cluster.yaml", CLUSTER)
    with pytest.raises(ConfigError, match=r"dips.yaml: this is a run file: expected a cluster file.*cluster.yaml"):
        load_cluster(run)
    with pytest.raises(ConfigError, match=r"cluster.yaml: this is a cluster file: .* `--master 127.0.0.1:1`"):
        load_run(cluster)
    with pytest.raises(ConfigError, match="cluster: unknown key"):
        load_run(write(tmp_path / "typo.yaml", {**RUN, "cluster": ["a"]}))


def test_a_shared_section_that_is_not_there_is_named_with_its_file(tmp_path: Path) -> None:
    """The file to be mended is the one that names it."""
    with pytest.raises(ConfigError, match=r"dips.yaml: shared: .*shard.yaml: cannot be read: No such file"):
        load_run(write(tmp_path / "dips.yaml", {**RUN, "shared": "shard.yaml"}))


@pytest.mark.parametrize("key", ["shared", "master", "slaves"])
def test_what_is_missing_is_named(tmp_path: Path, key: str) -> None:
    """A missing section is said to be missing, by name."""
    path = write(tmp_path / "dips.yaml", {k: v for k, v in RUN.items() if k != key})
    with pytest.raises(ConfigError, match=f"{key}: missing"):
        load_run(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [", "is not YAML"), ("- a", "expected a mapping"), (None, "cannot be read: No such file")],
)
def test_what_is_no_configuration(tmp_path: Path, text: str | None, message: str) -> None:
    """A file that is absent, is not YAML or is no mapping is named in the error."""
    path = tmp_path / "cluster.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_cluster(path)


def test_a_key_that_stands_twice_is_refused(tmp_path: Path) -> None:
    """The last one alone counted: of two lists of `slaves`, or of `outer` and one more `outer` below, the first was
    not read, and nothing said so. What is merged from an anchor may be set anew, and two anchors may be merged.
    """
    path = tmp_path / "shared.yaml"
    path.write_text("run: r\nouter: {lr: 0.5}\npenalty: {}\nouter: {momentum: 0.5}\n")
    with pytest.raises(
        ConfigError, match=r"shared.yaml: is not YAML: the key 'outer' stands twice\n.*line 4, column 1:"
    ):
        read_yaml(path)
    path.write_text("a:\n  b: &b {<<: &c {x: 1, y: 2}, x: 3}\nd: {<<: *b, y: 4}\ne: {<<: *b, <<: {z: 5}}\n")
    assert read_yaml(path) == {"a": {"b": {"x": 3, "y": 2}}, "d": {"x": 3, "y": 4}, "e": {"x": 3, "y": 2, "z": 5}}


def test_a_lazy_install_goes_with_every_codec_and_overlap(tmp_path: Path) -> None:
    """It has a whole version in host memory, which is what both want."""
    lazy = {**changed(CLUSTER, "shared.codec", "bf16"), "install": "lazy", "overlap": "full"}
    assert load_cluster(write(tmp_path / "cluster.yaml", lazy)).install == "lazy"


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"fragments": 4}, "fragments: 4 needs overlap: full and install: whole, got overlap: none"),
        ({"fragments": 4, "overlap": "full", "install": "lazy"}, "needs overlap: full and install: whole, .* lazy"),
        ({"fragments": 0}, "fragments: .*greater than or equal to 1"),
    ],
)
def test_fragments_need_a_merge(tmp_path: Path, keys: dict[str, object], why: str) -> None:
    """Where nothing is merged beside training they would do nothing, or stagger what training waits for."""
    with pytest.raises(ConfigError, match=why):
        load_cluster(write(tmp_path / "cluster.yaml", {**CLUSTER, **keys}))
    good = {**CLUSTER, "fragments": 4, "overlap": "full"}
    assert load_cluster(write(tmp_path / "cluster.yaml", good)).fragments == 4


def test_two_slaves_of_one_name(tmp_path: Path) -> None:
    """A name that stands twice is refused."""
    path = write(tmp_path / "dips.yaml", {**RUN, "slaves": RUN["slaves"] * 2})
    with pytest.raises(ConfigError, match="'s0' stands 2 times"):
        load_run(path)


def test_the_codec_is_agreed_on_and_reaches_the_coordinator(tmp_path: Path) -> None:
    """fp32 unless the run says otherwise; a cluster with another codec than the run's has another digest."""
    for codec in Codec:
        named = write(tmp_path / "named.yaml", changed(RUN, "shared.codec", str(codec)))
        assert load_run(named).make_options().codec is codec
    lossy = load_run(write(tmp_path / "dips.yaml", changed(RUN, "shared.codec", "int8")))
    plain = load_run(write(tmp_path / "plain.yaml", RUN))
    assert (plain.make_options().codec, lossy.make_options().codec) == ("fp32", "int8")
    assert plain.shared.digest != lossy.shared.digest


def test_the_pull_codec_is_agreed_on_and_needs_momentum(tmp_path: Path) -> None:
    """It is part of the digest; without momentum nothing would come back of what rounding leaves over."""
    lossy = changed(RUN, "shared.pull_codec", "int8")
    assert (
        load_run(write(tmp_path / "dips.yaml", lossy)).shared.digest
        != load_run(write(tmp_path / "p.yaml", RUN)).shared.digest
    )
    with pytest.raises(ConfigError, match=r"pull_codec needs outer\.momentum above 0"):
        load_run(write(tmp_path / "still.yaml", changed(lossy, "shared.outer.momentum", 0.0)))
    with pytest.raises(ConfigError, match="and a step other than sgd"):
        load_run(write(tmp_path / "sgd.yaml", changed(lossy, "shared.outer.step", "sgd")))
    for codec in Codec:
        named = write(tmp_path / "named.yaml", changed(RUN, "shared.pull_codec", str(codec)))
        if codec in PULL_CODECS:
            assert load_run(named).shared.pull_codec is codec
        else:
            with pytest.raises(ConfigError, match=rf"shared\.pull_codec.*fp32, bf16, int8: {codec} is for pushes only"):
                load_run(named)


@pytest.mark.parametrize(("key", "what"), [("cluster", "cluster"), ("shared.run", "run")])
def test_names_of_a_cluster_file_are_usable(tmp_path: Path, key: str, what: str) -> None:
    """They stand in certificates, directories and names of metrics."""
    with pytest.raises(ConfigError, match=f"cluster.yaml: .*{what} name 'Not A Name' is not usable"):
        load_cluster(write(tmp_path / "cluster.yaml", changed(CLUSTER, key, "Not A Name")))


@pytest.mark.parametrize("served", ["master.http", "slaves.0.http"])
def test_a_token_needs_one_port(tmp_path: Path, served: str) -> None:
    """Of master or slave in a run file, in a cluster file the agent's own."""
    content = changed(changed(RUN, "http_token", "token"), served, "127.0.0.1:0")
    assert load_run(write(tmp_path / "dips.yaml", content)).http_token == tmp_path / "token"
    told = {**CLUSTER, "http_token": "token"}
    with pytest.raises(ConfigError, match="http_token: nothing is served"):
        load_cluster(write(tmp_path / "cluster.yaml", told))
    assert load_cluster(write(tmp_path / "cluster.yaml", {**told, "http": "127.0.0.1:0"})).http_token is not None


@pytest.mark.parametrize(("keep", "every", "kept"), [(2, 4, True), (4, 4, True), (4, 2, False), (0, 2, False)])
def test_a_version_lasts_until_its_command(tmp_path: Path, keep: int, every: int, kept: bool) -> None:
    """`on_version` needs each n-th version, so `keep_every` divides its n."""
    content = changed(changed(RUN, "master.keep_every", keep), "master.on_version", {"every": every, "command": ["x"]})
    path = write(tmp_path / "dips.yaml", content)
    if kept:
        assert load_run(path).master.keep_every == keep
    else:
        with pytest.raises(ConfigError, match=f"keep_every: expected {every}, or what divides it"):
            load_run(path)


def test_an_unknown_slave_lists_the_known(tmp_path: Path) -> None:
    """Asking for a slave that the file does not name lists those that it names."""
    with pytest.raises(ConfigError, match="no slave 's9' in this run file; it names s0"):
        load_run(write(tmp_path / "dips.yaml", RUN)).slave_section("s9")


def test_paths_are_relative_to_their_file(tmp_path: Path) -> None:
    """A daemon may start anywhere: relative paths are those of the file that names them; absolute ones stay."""
    run = load_run(write(tmp_path / "dips.yaml", changed(RUN, "slaves.0.directory", "/elsewhere")))
    assert run.master.directory == tmp_path / "m"
    assert run.slave_section("s0").initial_model == tmp_path / "m/i.safetensors"
    assert run.slave_section("s0").directory == Path("/elsewhere")
    for mirror, place in (("s3://bucket/m", "s3://bucket/m"), ("m", str(tmp_path / "m"))):  # a URL is no path
        assert load_run(write(tmp_path / "m.yaml", changed(RUN, "master.mirror", mirror))).master.mirror == place


@pytest.mark.parametrize("directory", ["~/slave", "$SCRATCH/slave", "${SCRATCH}/slave"])
def test_a_path_that_a_shell_would_fill_in_is_refused(tmp_path: Path, directory: str) -> None:
    """A directory `~` was made beside the file, on another disk than was meant; whoever has one writes ./~/slave."""
    said = r"dips.yaml: directory: expected a path, in which no ~ and no variable .* \./[~$].*/slave: write that"
    with pytest.raises(ConfigError, match=said):
        load_run(write(tmp_path / "dips.yaml", changed(RUN, "slaves.0.directory", directory)))
    there = write(tmp_path / "dips.yaml", changed(RUN, "slaves.0.directory", f"./{directory}"))
    assert load_run(there).slaves[0].directory == tmp_path / directory


def test_a_mirror_is_known_again_wherever_a_daemon_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand beside its file, then by systemd with the file's whole path: a disk that is not mounted is noticed."""
    file = write(tmp_path / "dips.yaml", changed(RUN, "master.mirror", "mirror"))
    (tmp_path / "mirror").mkdir()
    monkeypatch.chdir(tmp_path)
    assert load_run(Path("dips.yaml")) == load_run(file)
    store = mirror_of(load_run(Path("dips.yaml")))
    assert store is not None
    store.write_file("a", b"")
    rmtree(tmp_path / "mirror")
    (tmp_path / "mirror").mkdir()
    store = mirror_of(load_run(file))
    assert store is not None
    with pytest.raises(FailedMirror, match="got a place without one: mount its disk"):
        store.list_names()


def test_digest_is_of_values_not_of_spelling(tmp_path: Path) -> None:
    """A default that is written out agrees with one that is not; inline and by path are the same."""
    plain = load_cluster(write(tmp_path / "a.yaml", CLUSTER)).shared
    spelt = load_cluster(write(tmp_path / "b.yaml", changed(CLUSTER, "shared.outer.lr", 0.7))).shared
    other = load_cluster(write(tmp_path / "c.yaml", changed(CLUSTER, "shared.outer.lr", 0.6))).shared
    write(tmp_path / "shared.yaml", {"run": "r"})
    by_path = load_cluster(write(tmp_path / "d.yaml", {**CLUSTER, "shared": "shared.yaml"})).shared
    assert plain.digest == spelt.digest == by_path.digest != other.digest


@pytest.mark.parametrize(
    ("address", "parts"),
    [("127.0.0.1:80", ("127.0.0.1", 80)), ("[::1]:5", ("::1", 5)), ("localhost:0", ("localhost", 0))],
)
def test_addresses(address: str, parts: tuple[str, int]) -> None:
    """host:port is split at its last colon, brackets around an IPv6 host are taken off."""
    assert host_port(address) == parts


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":80", "host:http", "host:65536", "host:78²", "host:" + 5_000 * "1"]
)
def test_what_is_no_address(address: str) -> None:
    """Anything else is refused and shown."""
    with pytest.raises(ConfigError, match="expected an address"):
        host_port(address)


@pytest.mark.parametrize(
    ("options", "cores", "lanes"),
    [
        ({}, 1, 1),
        ({}, 2, 1),
        ({}, 6, 3),
        ({}, 64, 4),
        ({"lanes": 6}, 2, 6),
    ],
)
def test_lanes_follow_the_cores(options: dict[str, int], cores: int, lanes: int) -> None:
    """Free ports on the host of `listen`: one for two cores, at most 4, or as many as the file says."""
    section = SlaveSection(name="s0", master="m:1", directory="d", initial_model="m", listen="[::1]:0", **options)
    assert section.data_lanes(cores) == ("[::1]:0",) * lanes


def test_named_lanes_are_taken_as_they_are(tmp_path: Path) -> None:
    """Ports that a firewall lets through."""
    named = changed(RUN, "slaves.0.lanes", ["127.0.0.1:7811", "127.0.0.1:7812"])
    path = write(tmp_path / "dips.yaml", named)
    assert load_run(path).slaves[0].data_lanes(64) == ("127.0.0.1:7811", "127.0.0.1:7812")


@pytest.mark.parametrize("pace", [{"steps": 8}, {"seconds": 600}, {"aligned": 64}, {}])
def test_every_pace_is_one_key(tmp_path: Path, pace: dict[str, Any]) -> None:
    """steps, seconds or aligned: one, and the others are None; an empty section is the default."""
    loaded = load_cluster(write(tmp_path / "cluster.yaml", changed(CLUSTER, "pace", pace)))
    assert loaded.pace.model_dump(exclude_none=True) == (pace or {"aligned": DEFAULT_STEPS})


@pytest.mark.parametrize(
    ("pace", "said"),
    [({"steps": 8, "aligned": 8}, "steps and aligned"), ({"steps": 0}, "pace.steps"), ({"speed": 1}, "pace.speed")],
)
def test_a_wrong_pace_is_refused(tmp_path: Path, pace: dict[str, Any], said: str) -> None:
    """H = 0, two paces at once, an unknown one: the message names the key."""
    with pytest.raises(ConfigError, match=said):
        load_cluster(write(tmp_path / "cluster.yaml", changed(CLUSTER, "pace", pace)))


@pytest.mark.parametrize("collective_s", [0.0, float("inf"), float("nan")])
def test_ranks_wait_for_each_other_for_a_time_that_torch_knows(tmp_path: Path, collective_s: float) -> None:
    """`.inf`, for no end, was read, checked, and ended each start of the training with an OverflowError."""
    with pytest.raises(ConfigError, match=r"collective_s: Input should be (greater|less) than"):
        load_cluster(write(tmp_path / "cluster.yaml", changed(CLUSTER, "collective_s", collective_s)))


TLS = "{name}.{role}.crt"


def secured(**changes: Any) -> dict[str, Any]:
    """A run file with certificates, its one slave changed."""
    content = changed(RUN, "tls", TLS)
    content["slaves"][0].update(changes)
    return content


def test_with_certificates_all_leaves_the_machine(tmp_path: Path) -> None:
    """The file's paths are relative to it, and stand for each process's own."""
    content = secured(listen="10.0.0.2:7801", lanes=["10.0.0.2:7802"], advertise="s0.example", http="10.0.0.2:9400")
    content["master"]["listen"] = "10.0.0.1:7800"
    run = load_run(write(tmp_path / "dips.yaml", content))
    files = run.tls_files("s0", PeerRole.SLAVE)
    own = tmp_path / "s0.slave.crt"
    assert files == TlsFiles(tmp_path / "ca.crt", own, own.with_suffix(".key"), tmp_path / "crl.pem")

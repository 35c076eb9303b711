"""Mirrors in an object store that speaks S3: moto's server on this machine, over HTTP, with s3fs as in a run.

In front of it stands what a real one does to its users: it fails requests by 503, takes no object above its limit and
no more parts of one, takes its time, and is away for a while. The client's own retries are off, so each failure is one
of the mirror's.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import parse_qs
from urllib.request import Request, urlopen

import numpy as np
import pytest
import structlog
import xxhash

from dips.config import RunFile, load_run
from dips.errors import ConfigError, FailedMirror
from dips.ids import PushId, VersionId
from dips.master import genesis, ledger_mirror, restore
from dips.master.ledger import Ledger
from dips.protocol.events import MirrorReport, MirrorReported
from dips.protocol.manifest import Manifest
from dips.protocol.records import RoundReserved
from dips.slave import snapshot_mirror
from dips.slave.snapshot_mirror import SnapshotMirror, list_copies
from dips.slave.snapshots import Snapshots
from dips.store import mirror as mirror_files
from dips.store.mirror import MirrorStore, bring_back, copy_out
from dips.store.tensorfile import PIECE_BYTES
from dips.view.judging import Severity, judge_slave
from tests.run_files import write_run_file
from tests.unit.master.test_ledger import committed
from tests.unit.master.test_ledger_mirror import TENSORS, Term, like
from tests.unit.protocol.scripted_run import ScriptedRun
from tests.waiting import until

s3fs = pytest.importorskip("s3fs", reason="NO S3: pip install s3fs 'moto[server,s3]'; mirrors at s3:// are not tried")
moto_server = pytest.importorskip("moto.server", reason="NO S3: pip install 'moto[server,s3]'")

BUCKET = "dips"
LARGE = 5 * PIECE_BYTES // 32  # parameters of a layer whose θ and m take two parts, the second one a quarter full
MANIFEST = Manifest.from_shapes([("a.w", (LARGE,)), ("b.w", (LARGE,)), ("c.w", (LARGE,)), ("d.w", (1000,))])
LAYERS = range(len(MANIFEST.layers))
MOST_OBJECT = 2 * PIECE_BYTES  # bytes that an object may have: less than a version's, as 5 TB are less than a model
FAILING = 0.05  # of all requests
WITHIN_S = 120.0
LONG = (pytest.mark.slow, pytest.mark.timeout(1800))
LOG = structlog.get_logger()
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
TOO_LARGE = b"<Error><Code>EntityTooLarge</Code><Message>above the limit of this store</Message></Error>"

Environ = dict[str, Any]
Start = Callable[..., Any]


class RealStore:
    """A WSGI application between the client and moto's; counts what it sees."""

    def __init__(self, application: Callable[[Environ, Start], Iterable[bytes]]) -> None:
        self._application, self._rng, self._lock = application, Random(7), threading.Lock()
        self.share, self.away, self.every = 0.0, False, 0  # each `every`-th request fails, too
        self.most_object, self.most_parts, self.read_s = MOST_OBJECT, 10_000, 0.0
        self.reading = self.most_reading = 0  # requests for layers that are answered at the same time
        self.most_put = 5 << 30  # bytes of one request
        self.counts: Counter[str] = Counter()
        self._uploaded: Counter[str] = Counter()  # bytes by upload

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        method, nbytes = environ["REQUEST_METHOD"], int(environ.get("CONTENT_LENGTH") or 0)
        words = parse_qs(environ["QUERY_STRING"])
        with self._lock:
            self.counts["requests"] += 1
            self.counts["bytes in"] += nbytes
            nth = bool(self.every) and self.counts["requests"] % self.every == 0
            failing = self.away or nth or self._rng.random() < self.share
            self.counts["failed"] += failing
            self.counts["deletes"] += method == "POST" and "delete" in environ["QUERY_STRING"]
            self.counts["aborts failed"] += failing and method == "DELETE" and "uploadId" in words
            upload = words.get("uploadId", [""])[0] or f"{environ['PATH_INFO']} {self.counts['requests']}"
            self._uploaded[upload] += nbytes if method == "PUT" and not failing else 0
            large = method == "PUT" and self._uploaded[upload] > self.most_object
            large |= int(words.get("partNumber", ["0"])[0]) > self.most_parts or nbytes > self.most_put
            self.counts["too large"] += large
        if failing or large:
            environ["wsgi.input"].read(nbytes)
            status, body = ("503 Slow Down", SLOW_DOWN) if failing else ("400 Bad Request", TOO_LARGE)
            body = b"" if method == "HEAD" else body
            start(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
            return [body]
        reads = method == "GET" and environ["PATH_INFO"].endswith(".safetensors")
        with self._lock:
            self.reading += reads
            self.most_reading = max(self.most_reading, self.reading)
        if reads:
            time.sleep(self.read_s)
        parts = list(self._application(environ, start))
        with self._lock:
            self.reading -= reads
            self.counts["bytes out"] += sum(map(len, parts))
        return parts

    def describe(self) -> str:
        c = self.counts
        return (
            f"{c['requests']} requests, {c['failed']} of them failed; {c['bytes in'] / 1e6:.0f} MB in, "
            f"{c['bytes out'] / 1e6:.0f} MB out"
        )


@pytest.fixture(name="store")
def served_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealStore]:
    """An S3 server with an empty bucket, to which the environment points as it would on a slave's host."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    monkeypatch.setattr(WSGIRequestHandler, "log_request", lambda *_: None)
    store = RealStore(moto_server.DomainDispatcherApplication(moto_server.create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    for key, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    monkeypatch.setattr(s3fs.core.S3File, "retries", 1)
    monkeypatch.setattr(snapshot_mirror, "BACKOFF_S", (0.05, 0.2))
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        with urlopen(Request(f"http://127.0.0.1:{server.server_port}/moto-api/reset", method="POST")):
            s3fs.S3FileSystem().mkdir(BUCKET)
        yield store
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.shutdown()
        thread.join()
        server.server_close()


def opened(path: Path) -> Snapshots:
    snapshots = Snapshots(path, "r", "s", None, LOG)
    snapshots.bind_layers(MANIFEST, LAYERS, [""] * len(LAYERS), sinc=1)
    return snapshots


def arrays(seed: int) -> dict[int, np.ndarray]:
    return {i: np.random.default_rng((seed, i)).standard_normal(MANIFEST.layers[i].numel, np.float32) for i in LAYERS}


def version(number: int) -> VersionId:
    return VersionId(number, number)


def digests(of: dict[int, np.ndarray]) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(of[i].tobytes()) for i in LAYERS]


class WatchedMirror:
    """A slave's mirror, and what its master shows of it."""

    def __init__(self, root: Path) -> None:
        self._run = ScriptedRun()
        store = MirrorStore(f"s3://{BUCKET}/mirror", "r", "s", of=root)
        self.mirror = SnapshotMirror(store, root, "r", "s", LOG, time.monotonic)
        self.mirror.bind_layers(tuple(LAYERS))
        self.mirror.start()

    def look(self) -> tuple[MirrorReport, bool]:
        """What the slave reports now, and whether `dips status` is green with it."""
        report = self.mirror.report()
        self._run.step(MirrorReported("s", self._run.view.slaves["s"].sinc, report))
        return report, judge_slave(self._run.view.slaves["s"], None, None)[1] is Severity.GOOD

    def until(self, holds: Callable[[MirrorReport, bool], bool], what: str) -> bool:
        """Wait; return whether it was red meanwhile."""
        end, red = time.monotonic() + WITHIN_S, False
        while True:
            report, green = self.look()
            red |= not green
            if holds(report, green):
                return red
            assert time.monotonic() < end, f"not within {WITHIN_S:g} s: {what}; {report}"
            time.sleep(0.1)


def test_a_mirror_in_an_object_store_that_fails_loses_nothing(store: RealStore, tmp_path: Path) -> None:
    """One request in twenty fails, which the mirror makes up for; status is red while the store is away, and green when
    the mirror holds the newest version, which comes back bit for bit to a new disk. No object is larger than the store
    takes, and no part of an upload that failed stays there, which would be paid for and never seen.
    """
    root, theta, momentum = tmp_path / "s", arrays(1), arrays(2)
    snapshots = opened(root)
    watched = WatchedMirror(root)
    store.share = FAILING
    try:
        for number in range(1, 5):
            snapshots.write_snapshot(version(number), theta, momentum)
            watched.mirror.want((version(number),))
            watched.until(lambda r, green, v=version(number): r.held == (v,) and green, f"{number} is held")
            theta, momentum = momentum, {i: theta[i] + np.float32(number) for i in LAYERS}
        assert store.counts["failed"] > 0
        store.away = True
        snapshots.write_snapshot(version(5), theta, momentum)
        watched.mirror.want((version(4), version(5)))
        watched.until(lambda r, green: not green and "request rate" in r.reason, "it is red while the store is away")
        assert watched.look()[0].held == (version(4),), "what it held it is believed to hold"
        store.away = False
        watched.until(lambda r, green: version(5) in r.held and green, "it is green again")
        snapshots.close()
        shutil.rmtree(root)
        fresh, brought = opened(root), set[VersionId]()
        while version(5) not in brought:
            try:
                brought.update(watched.mirror.restore(fresh.complete_versions()).versions)
            except snapshot_mirror.FailedMirror:
                continue
        back = {i: np.empty_like(theta[i]) for i in LAYERS}, {i: np.empty_like(theta[i]) for i in LAYERS}
        fresh.read_snapshot(version(5), *back)
        assert [digests(of) for of in back] == [digests(theta), digests(momentum)]
        fresh.close()
    finally:
        watched.mirror.close()
    store.share = 0.0
    fs = s3fs.S3FileSystem()
    sizes = [entry["size"] for entry in fs.find(f"{BUCKET}/mirror", detail=True).values()]
    assert PIECE_BYTES < max(sizes) <= MOST_OBJECT < sum(sizes) and not store.counts["too large"]
    left = fs.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])
    assert len(left) <= store.counts["aborts failed"]
    print(store.describe())


def test_what_a_store_does_not_take_is_said(store: RealStore, tmp_path: Path) -> None:
    """An object above the limit is refused: the mirror says which one, and counts as failing."""
    store.most_object = PIECE_BYTES
    snapshots, mirror = opened(tmp_path / "s"), MirrorStore(f"s3://{BUCKET}/mirror", "r", "s")
    snapshots.write_snapshot(version(1), arrays(1), arrays(2))
    with pytest.raises(snapshot_mirror.FailedMirror, match=r"v1@r1/00000\.safetensors: .*limit of this store"):
        copy_out(mirror, tmp_path / "s", version(1))
    assert list_copies(mirror, "r", "s", LOG).whole == ()
    assert not s3fs.S3FileSystem().call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads")
    snapshots.close()


def test_an_object_of_any_size_has_no_more_parts_than_a_store_takes(
    store: RealStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S3 takes 10,000: pieces of 8 MiB end at 83.9 GB. Here it takes two, and a file has four pieces."""
    monkeypatch.setattr(mirror_files, "MOST_PARTS", 2)
    store.most_parts, store.most_object = 2, 4 * PIECE_BYTES
    mirror, content = MirrorStore(f"s3://{BUCKET}/mirror", "r", "s"), np.random.default_rng(1).bytes(4 * PIECE_BYTES)
    with mirror.create_file("large", len(content)) as file:
        for begin in range(0, len(content), PIECE_BYTES):
            file.write(content[begin : begin + PIECE_BYTES])
    assert mirror.read_file("large", len(content)) == content and not store.counts["too large"]


def test_what_another_machine_writes_is_seen_at_once(store: RealStore) -> None:
    """Its client remembers what it has listed, and a standby, a new master and a person write to the same place."""
    mirror, path = MirrorStore(f"s3://{BUCKET}/mirror", "r", "s"), f"{BUCKET}/mirror/r/s"
    other = s3fs.S3FileSystem(skip_instance_cache=True)
    mirror.write_file("a", b"1")
    assert mirror.list_names() == ["a"] and mirror.list_sizes("") == {"a": 1}
    other.pipe_file(f"{path}/b", b"22")
    assert mirror.list_names() == ["a", "b"]
    other.pipe_file(f"{path}/b", b"333")
    assert mirror.file_size("b") == 3
    assert mirror.list_sizes("") == {"a": 1, "b": 3}
    other.pipe_file(f"{path}/b", b"4444")
    assert mirror.list_sizes("") == {"a": 1, "b": 4}
    other.pipe_file(f"{path}/c", b"")
    mirror.remove_path("c")
    other.invalidate_cache()
    assert not other.exists(f"{path}/c")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_gigabytes_reach_no_limit(store: RealStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GB of layers and S3's limits, all by the same factor of 256: 10,000 parts of an object are 39, 5 GiB of a
    request 20 MiB, and one layer is larger than 10,000 parts of 8 MiB are. There are more layers than an answer has
    keys, 1,000, which nobody scales. A part size that is fixed, or an object in one request, would be refused.
    """
    scale, small = 256, 1000
    monkeypatch.setattr(mirror_files, "MOST_PARTS", 10_000 // scale)
    store.most_parts, store.most_put, store.most_object = 10_000 // scale, (5 << 30) // scale, (5 << 40) // scale
    large = (store.most_parts * PIECE_BYTES * 21 // 20) // 8  # parameters; θ and m
    rest = (100 * 10**9 // scale // 8 - large) // small
    manifest = Manifest.from_shapes([("large.w", (large,)), *((f"l{i:04}.w", (rest,)) for i in range(small))])
    layers, rng = range(len(manifest.layers)), np.random.default_rng(1)
    flat = {i: rng.random(manifest.layers[i].numel, np.float32) for i in layers}
    snapshots = Snapshots(tmp_path / "s", "r", "s", None, LOG)
    snapshots.bind_layers(manifest, layers, [""] * len(layers), sinc=1)
    snapshots.write_snapshot(version(1), flat, flat)
    snapshots.close()
    mirror = MirrorStore(f"s3://{BUCKET}/mirror", "r", "s")
    copy_out(mirror, tmp_path / "s", version(1))
    sizes = mirror.list_sizes(str(version(1)))
    assert len(sizes) == len(layers) + 1 > 1000 and sum(sizes.values()) > 100 * 10**9 // scale
    assert max(sizes.values()) > store.most_parts * PIECE_BYTES and not store.counts["too large"]
    (tmp_path / "back").mkdir()
    bring_back(mirror, tmp_path / "back", "r", "s", version(1))
    for file in (tmp_path / "s" / str(version(1))).iterdir():
        assert (tmp_path / "back" / str(version(1)) / file.name).read_bytes() == file.read_bytes()
    mirror.remove_path(str(version(1)))
    assert mirror.list_sizes(str(version(1))) == {}
    print(f"{sum(sizes.values()) / 1e6:.0f} MB in {len(sizes)} objects: {store.describe()}")


def test_a_restore_reads_several_layers_at_once(
    store: RealStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that answers slowly is asked for them side by side, and brings the same bytes; each is counted."""
    manifest = Manifest.from_shapes([(f"l{i}.w", (1000,)) for i in range(3 * mirror_files.STREAMS)])
    layers = range(len(manifest.layers))
    theta = {i: np.full(1000, i, np.float32) for i in layers}
    snapshots = Snapshots(tmp_path / "s", "r", "s", None, LOG)
    snapshots.bind_layers(manifest, layers, [""] * len(layers), sinc=1)
    snapshots.write_snapshot(version(1), theta, theta)
    mirror = MirrorStore(f"s3://{BUCKET}/mirror", "r", "s")
    copy_out(mirror, tmp_path / "s", version(1))
    store.read_s = 0.2
    for streams in (1, mirror_files.STREAMS):
        monkeypatch.setattr(mirror_files, "STREAMS", streams)
        store.most_reading = 0
        root, moved = tmp_path / f"by{streams}", list[int]()
        root.mkdir()
        bring_back(mirror, root, "r", "s", version(1), moved.append)
        assert sum(moved) == 2 * 4000 * len(layers)
        assert store.most_reading == streams
        for file in (tmp_path / "s" / str(version(1))).iterdir():
            assert (root / str(version(1)) / file.name).read_bytes() == file.read_bytes()
    snapshots.close()


# ---- the ledger's ----------------------------------------------------------------------------------------------------


@pytest.fixture(name="config")
def mirrored_config(store: RealStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFile:
    """A run whose ledger's mirror is in the store."""
    monkeypatch.setattr(mirror_files, "AGAIN_S", 0.01)
    monkeypatch.setattr(ledger_mirror, "BACKOFF_S", (0.02, 0.1))
    config = load_run(write_run_file(tmp_path, ["s0"], mirror=f"s3://{BUCKET}/mirror"))
    genesis.make_run(config, TENSORS)
    return config


def write_version(term: Term, n: int) -> None:
    row = committed(VersionId(n, n), VersionId(n - 1, n - 1), PushId("west", 1, n), PushId("east", 1, n))
    term.write([RoundReserved(n, 1.0), row])


def wait_until_green(term: Term) -> None:
    until(lambda: not term.mirror.view().red, lambda: term.mirror.view(), WITHIN_S)


@pytest.mark.parametrize(
    ("share", "every", "versions"),
    [
        pytest.param(FAILING, 0, 20, id="few"),
        pytest.param(FAILING, 0, 1000, id="one in twenty", marks=LONG),
        pytest.param(0.0, 3, 250, id="each third", marks=LONG),
    ],
)
def test_a_long_ledger_in_a_store_that_fails_loses_nothing(
    config: RunFile, store: RealStore, share: float, every: int, versions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests fail all the time, and for a while all of them: the mirror is red then, and green after; a lost ledger
    comes back with every version.
    """
    monkeypatch.setattr(ledger_mirror, "LOGS_TO_A_BASE", 100)  # as many bases as of a run of days
    store.share, store.every = share, every
    store.counts.clear()
    term = Term(config)
    wait_until_green(term)
    begun = time.monotonic()
    for n in range(1, versions - 10):
        write_version(term, n)
    took_s = time.monotonic() - begun
    store.away = True
    for n in range(versions - 10, versions + 1):
        write_version(term, n)
    assert term.mirror.view().red and term.mirror.view().behind_transactions > 0
    store.away = False
    wait_until_green(term)
    state = term.end()
    print(f"{versions} versions in {took_s:.0f} s: {store.describe()}")
    shutil.rmtree(config.master.directory)
    store.every = 0  # a restore needs more requests in a row than two; there the client's own retries help, off here
    for _ in range(100):
        try:
            restore.restore_if_lost(config, LOG)
            break
        except (FailedMirror, ConfigError):
            continue
    with closing(Ledger.open(genesis.ledger_path(config), readonly=True)) as ledger:
        back = ledger.read_state()
    assert back.versions[-1].version == VersionId(versions, versions) and like(back, state)


def test_a_new_base_removes_what_it_replaces_by_one_request(config: RunFile, store: RealStore) -> None:
    """It is not written meanwhile: a request for each of a thousand transactions took a minute and more."""
    term = Term(config)
    for n in range(1, 6):
        write_version(term, n)
    mirror = genesis.mirror_of(config)
    assert mirror is not None
    before = len(mirror.list_names(restore.FOLDER))
    store.counts.clear()
    restore.write_base(mirror, "r", term.term, *term.take_base())
    assert store.counts["deletes"] == 1 and store.counts["requests"] < before
    kinds = {name.rpartition(".")[2] for name in mirror.list_names(restore.FOLDER)}
    assert kinds == {"base"}
    term.end()

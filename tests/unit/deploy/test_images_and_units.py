"""Images and units: daemons without torch and without rights, and exit codes that mean what errors.py says."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import threading
import tomllib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dips.errors import TREATMENTS, ConfigError, Corrupt, Denied, DipsError, Stale

DEPLOY = Path(__file__).parents[3] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
IMAGES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def code(cls: type[DipsError]) -> int:
    return next(t.exit_code for c, t in TREATMENTS if issubclass(cls, c))


@pytest.mark.parametrize("image", IMAGES, ids=lambda p: p.name)
def test_images_end_as_a_user(image: Path) -> None:
    """The last word on the user is one without rights, by number, so that runAsNonRoot can see it."""
    users = re.findall(r"^USER (\S+)", image.read_text(), re.MULTILINE)
    assert users and re.fullmatch(r"[1-9]\d+:[1-9]\d+", users[-1])


def test_the_training_image_keeps_its_directory() -> None:
    """`train.py` of a job, and the module of CHECK, would be looked for in / wherever their image has them."""
    assert "WORKDIR" not in (DEPLOY / "docker" / "client.Dockerfile").read_text()


def test_the_training_image_removes_nothing_of_its_base() -> None:
    """A base may have its script in /src, and its wheels in /wheels: what is copied has a directory of its own."""
    text = (DEPLOY / "docker" / "client.Dockerfile").read_text()
    (removed,) = re.findall(r"\brm -r (.+)$", text, re.MULTILINE)
    assert removed.split() == ["/dips-src", "/tmp/kept", "/tmp/names"]
    copied = re.findall(r"^COPY .+ (\S+)$", text, re.MULTILINE)
    assert {path.split("/")[1] for path in copied} == {"dips-src", "usr"}


def test_who_trains_has_a_name() -> None:
    """Some releases of torch ask the system for it at torch.compile, and end with a KeyError: nobody knows 10001."""
    variables = re.findall(r"^ENV (.+)$", (DEPLOY / "docker" / "client.Dockerfile").read_text(), re.MULTILINE)
    assert "USER=dips" in " ".join(variables).split()


def test_images_copy_what_is_there() -> None:
    """Every file that is copied exists and is not ignored."""
    root = DEPLOY.parent
    kept = {line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for image in IMAGES:
        text = image.read_text()
        text = text.replace("${WHEELS}", re.findall(r"^ARG WHEELS=(\S+)$", text, re.MULTILINE)[0])
        for words in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE):
            for name in words.split():
                assert (root / name).exists() and name in kept, f"{image.name} copies {name}"


class Registry(BaseHTTPRequestHandler):
    """A registry of images that wants a token, as docker.io does; there is none to be reached from where tests run."""

    digest = "sha256:" + "a1" * 32

    def do_GET(self) -> None:
        self.reply(200, {}, b'{"token": "of-everybody"}')

    def do_HEAD(self) -> None:
        if self.path != "/v2/library/python/manifests/3.12-slim":
            self.reply(404, {})
        elif self.headers["Authorization"] != "Bearer of-everybody":
            realm = f"http://{self.headers['Host']}/token"
            self.reply(401, {"WWW-Authenticate": f'Bearer realm="{realm}",scope="repository:library/python:pull"'})
        else:
            self.reply(200, {"Docker-Content-Digest": self.digest})

    def reply(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_bases_are_pinned_by_their_digests(tmp_path: Path) -> None:
    """By `make pin`: the registry's digest stands behind the tag, for a former one; a wrong tag writes nothing."""
    pin, image = DEPLOY.parent / ".ci" / "pin", tmp_path / "daemons.Dockerfile"
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"127.0.0.1:{server.server_port}/library/python"
        for former in ("", f"@sha256:{'00' * 32}"):
            image.write_text(f"ARG BASE={base}:3.12-slim{former}\nFROM ${{BASE}}\n")
            subprocess.run([sys.executable, pin, image], check=True)
            assert image.read_text() == f"ARG BASE={base}:3.12-slim@{Registry.digest}\nFROM ${{BASE}}\n"
        image.write_text(wrong := f"ARG BASE={base}:none\nFROM ${{BASE}}\n")
        done = subprocess.run([sys.executable, pin, image], capture_output=True, text=True, check=False)
        server.shutdown()
    assert done.returncode == 1 and "404" in done.stderr and image.read_text() == wrong
    pinned = re.search(r"^ARG BASE=(\S+)$", (DEPLOY / "docker" / "daemons.Dockerfile").read_text(), re.MULTILINE)
    assert pinned and re.fullmatch(r"docker\.io/library/python:[\w.-]+(@sha256:[0-9a-f]{64})?", pinned[1])


def test_the_image_of_the_daemons_has_no_torch() -> None:
    """Its packages are those of requirements.txt, and the wheel is installed without them."""
    text = (DEPLOY / "docker" / "daemons.Dockerfile").read_text()
    assert "--require-hashes -r requirements.txt" in text and "--no-deps --no-build-isolation ." in text
    assert "torch" not in "".join(line for line in text.splitlines() if not line.startswith("#"))


def test_the_image_of_the_daemons_is_the_tested_set() -> None:
    """Each package has a hash and the version of constraints.txt; all that pyproject.toml asks for is there."""
    text = (DEPLOY / "docker" / "requirements.txt").read_text()
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))
    for name in pinned:
        assert re.search(rf"^{re.escape(name)}==.* \\\n    --hash=sha256:[0-9a-f]{{64}}", text, re.MULTILINE), name
    tested = dict(
        re.findall(r"^([\w.-]+)==(\S+)", (DEPLOY.parent / "constraints.txt").read_text().lower(), re.MULTILINE)
    )
    assert not {
        name: (pinned[name], tested[name]) for name in pinned.keys() & tested.keys() if pinned[name] != tested[name]
    }
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    asked = [*project["project"]["dependencies"], *project["project"]["optional-dependencies"]["s3"]]
    names = {re.match(r"[\w.-]+", line)[0] for line in (*asked, *project["build-system"]["requires"])}  # type: ignore[index]
    assert names <= pinned.keys()
    assert "torch" not in pinned


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_units_do_not_restart_what_cannot_help(unit: Path) -> None:
    """A wrong configuration stays wrong; a master or cluster that was superseded stays away; nobody runs as root."""
    text = unit.read_text()
    prevented = {int(n) for n in re.search(r"^RestartPreventExitStatus=(.+)$", text, re.MULTILINE)[1].split()}  # type: ignore[index]
    assert {code(ConfigError), code(Denied)} <= prevented, "README: exit codes on which starting again does not help"
    if unit.name != "dips-slave@.service":
        assert code(Stale) in prevented
    if "client" not in unit.name:
        assert code(Corrupt) in prevented
    assert re.search(r"^User=(?!root)\w+", text, re.MULTILINE) and "NoNewPrivileges=true" in text


def test_of_two_machines_that_serve_in_turn_the_superseded_one_waits() -> None:
    """The drop-in starts the unit's own program as a standby, also after it was superseded; what cannot help stays."""
    unit, both = ((DEPLOY / "systemd" / name).read_text() for name in ("dips-master.service", "standby.conf"))
    (command,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
    assert re.findall(r"^ExecStart=(.*)$", both, re.MULTILINE) == ["", f"{command} --standby"]
    first, prevented = re.findall(r"^RestartPreventExitStatus=(.*)$", both, re.MULTILINE)
    assert not first and set(map(int, prevented.split())) == {code(ConfigError), code(Denied), code(Corrupt)}


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    """systemd-analyze finds nothing but the programs that are not installed here."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: the units were not held against it")
    for unit in UNITS:
        text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(f"./{u.name}" for u in UNITS)],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    complaints = [line for line in done.stderr.splitlines() if any(u.name.partition("@")[0] in line for u in UNITS)]
    assert not complaints, complaints


# Exposure by `systemd-analyze security`, 0 to 10: a training job keeps its devices and the network.
MOST_EXPOSED = {"dips-client@.service": 3.5}
DAEMON_EXPOSED = 2.0


@pytest.mark.parametrize("unit", UNITS, ids=lambda p: p.name)
def test_units_are_hardened(unit: Path) -> None:
    """By the measure of systemd itself; a mirror on a mount has its line."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not here: exposure was not measured")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)], capture_output=True, text=True, check=False
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= MOST_EXPOSED.get(unit.name, DAEMON_EXPOSED)
    assert "client" in unit.name or re.search(r"^ReadWritePaths=", unit.read_text(), re.MULTILINE)


@pytest.mark.parametrize("script", ["slurm/cluster.sbatch", "slurm/torchrun.sh", "nodes.sh"])
def test_scripts_are_shell(script: str) -> None:
    """bash can read them."""
    subprocess.run(["bash", "-n", str(DEPLOY / script)], check=True)

"""Plain text against certificates and the reverse, by every command and daemon: a sentence that says what to change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from dips.cli import cli
from dips.identity.names import MASTER_NAME, PeerRole
from tests.enrolled import Enrolled
from tests.integration import cluster_harness as harness
from tests.integration.test_mistakes import tiny
from tests.integration.train_constant import tensors

NOBODY = 69
NEEDS_TLS = "it expects certificates: give this process a certificate (`tls`)"
IS_PLAIN = "it speaks plain text: give it a certificate (`tls`), or this process `tls: off`"
OPERATOR = ("operator", PeerRole.OPERATOR)
NAMES = ((MASTER_NAME, PeerRole.MASTER), OPERATOR, ("ps0", PeerRole.SLAVE), ("west", PeerRole.CLUSTER))
WORDS = [
    ("status",),
    ("status", "--json"),
    ("drain", "ps0"),
    ("cluster", "readmit", "west"),
    ("set", "stop.versions=9"),
    ("export", "--output", "model.safetensors"),
]


class TwoRuns:
    """A run with certificates and one in plain text, of each only the master."""

    def __init__(self, directory: Path) -> None:
        self.enrolled = Enrolled(directory / "certs", "test")
        for name, role in NAMES:
            self.enrolled.enroll(name, role)
        files = self.enrolled.files_of("{name}.{role}")
        self.runs = {
            True: self._make_run(directory / "tls", {"tls": str(files.cert)}),
            False: self._make_run(directory / "plain"),
        }
        self.addresses = {secured: run.address for secured, run in self.runs.items()}

    @staticmethod
    def _make_run(directory: Path, security: dict[str, dict[str, str]] | None = None) -> harness.Run:
        directory.mkdir()
        return harness.Run(directory, tensors(), slaves=1, security=security)

    @property
    def credentials(self) -> list[str]:
        return ["--credentials", str(self.enrolled.files_of("operator.operator").cert)]

    def start(self) -> None:
        for run in self.runs.values():
            master = run.start_master()
            run.until(lambda log=master.log: "serving" in log.read_text(), 60, "the master serves")

    def confuse(self, secured: bool) -> harness.Run:
        """The run whose certificates are `secured`, with the other one's master."""
        run = self.runs[secured]
        run.address = self.addresses[not secured]
        content = yaml.safe_load(run.file.read_text())
        content["slaves"][0]["master"] = run.address
        run.file.write_text(yaml.safe_dump(content))
        return run


@pytest.fixture(scope="module", name="both")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRuns]:
    both = TwoRuns(tmp_path_factory.mktemp("runs"))
    with both.runs[True], both.runs[False]:
        both.start()
        yield both


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
@pytest.mark.parametrize("secured", [True, False], ids=["plain text to certificates", "certificates to plain text"])
def test_a_command(
    both: TwoRuns, words: tuple[str, ...], secured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = ["--master", both.addresses[secured]]
    done = CliRunner().invoke(cli, [*words, *address, *([] if secured else both.credentials)])
    said = f"{done.output}{done.exception}"
    assert done.exit_code != 0 and (NEEDS_TLS if secured else IS_PLAIN) in said, said


@pytest.mark.parametrize("secured", [True, False], ids=["certificates to plain text", "plain text to certificates"])
def test_daemons(both: TwoRuns, secured: bool, tmp_path: Path) -> None:
    """A slave and an agent that dial the other run's master say it in their logs."""
    run = both.confuse(secured)
    slave, agent = run.start_slave("ps0"), run.start_cluster("west", tiny(tmp_path))
    sentence = IS_PLAIN if secured else NEEDS_TLS
    for process in (slave, agent):
        run.until(lambda log=process.log: sentence in log.read_text(), 30, f"{process.name} says: {sentence}")

"""What comes from outside cannot move a cursor, forge a line or turn a text round: one function, at every door."""

from __future__ import annotations

import io
import json
import logging
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from dips.errors import CorruptManifest, RemoteProtocolError
from dips.printable import make_lines_printable, make_printable, make_tree_printable
from dips.protocol import events
from dips.protocol.manifest import Manifest
from dips.telemetry import logs
from dips.telemetry.listing import Column, Listing, ListingRow
from dips.wire import messages
from tests.unit.wire.test_messages import dataclasses_that_travel

EVIL = ("\x1b[2J", "\u202e", "\n[info] forged", "\x00", "\x9b31m", "\u2028", "\x7f", "\r", "\ud800")


@given(st.text(alphabet=st.characters()))
def test_nothing_is_left_that_does_not_print(text: str) -> None:
    """And what prints stays as it is."""
    shown = make_printable(text)
    assert shown.isprintable() and (shown == text) is text.isprintable()
    assert make_printable(shown) == shown


def test_what_is_ours_keeps_its_lines() -> None:
    assert make_lines_printable("Traceback\n  \x1b[2J") == "Traceback\n  \\x1b[2J"
    assert make_tree_printable({"a\n": ["\u202e", 1, None]}) == {"a\\n": ["\\u202e", 1, None]}


def text_fields() -> list[tuple[type, str]]:
    """Every field of every message that is a text, or a list of texts; but manifests, which travel packed."""
    found = []
    for cls in dataclasses_that_travel():
        for name, hint in typing.get_type_hints(cls).items():
            if name != "manifest" and (hint is str or hint == tuple[str, ...]):
                found.append((cls, name))
    return found


@pytest.mark.parametrize("evil", EVIL[:-1], ids=ascii)  # a surrogate cannot be spelled in a message at all
def test_no_text_of_a_message_brings_it(evil: str) -> None:
    """A reason is shown spelled, any other text is refused."""
    for cls, name in text_fields():
        message = messages._message_class(cls.__name__)()
        field = getattr(message, name)
        if isinstance(field, str):
            setattr(message, name, evil)
        else:
            field.append(evil)
        read = dict(messages._field_plan(cls).read)[name]
        if name == "reason":
            assert read(message) == make_printable(evil), cls
        else:
            with pytest.raises(RemoteProtocolError) as raised:
                read(message)
            assert str(raised.value).isprintable(), (cls, name)


def test_the_walk_sees_all() -> None:
    assert (events.SlaveRegistered, "nonce") in text_fields() and (events.SlaveRegistered, "lanes") in text_fields()
    assert len(text_fields()) > 40


@pytest.mark.parametrize("evil", EVIL, ids=ascii)
def test_no_parameter_is_called_so(evil: str) -> None:
    text = json.dumps({"format": 1, "layers": [{"name": "layers.0", "parameters": [[f"w{evil}", [4]]]}]})
    with pytest.raises(CorruptManifest) as raised:
        Manifest.from_json(text)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("terminal", [True, False])
def test_no_log_line_brings_it(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal and as JSON, in text and in errors."""
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr("sys.stderr", out)
    log = logs.configure_log("slave", "s0")
    logging.captureWarnings(False)
    for evil in EVIL:
        log.info("push_refused", reason=f"a{evil}b", why=ValueError(evil))
    log.info("plain")
    shown = out.getvalue()
    colours = ("\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[32m", "\x1b[35m", "\x1b[36m")
    for colour in colours:
        shown = shown.replace(colour, "")
    lines = shown.splitlines()
    assert len(lines) == len(EVIL) + 1
    assert all(line.isprintable() for line in lines), [line for line in lines if not line.isprintable()]


def test_no_table_brings_it() -> None:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    rows = [ListingRow((evil, "1"), (f"because {evil}",)) for evil in EVIL]
    console.print(Listing("clusters", [Column("name", left=True), Column("n")], rows))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(line.isprintable() for line in shown.split("\n")), shown

"""The table of codecs: what must hold for every row, and that the documents and the template show it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from dips.codecs import DTYPES, PULL_CODECS, UPDATE_BLOCK, Codec
from dips.quantisers import QUANTISERS, SPAN
from tests.codec_bounds import BOUNDS

ROOT = Path(__file__).parents[2]


def test_every_dtype_is_one_codec_of_one_content() -> None:
    """Two rows that share a number would be read as each other."""
    used = [codec.number for codec in Codec] + [codec.update_number for codec in Codec if codec.updates]
    assert sorted(used) == sorted(set(used)) == sorted(DTYPES)
    assert {dtype.content for dtype in DTYPES.values()} == {0, 1, 2}


@pytest.mark.parametrize("codec", Codec)
def test_a_row_is_one_that_all_can_use(codec: Codec) -> None:
    """Spans cut no block, codes fill whole bytes, slaves lay steps out by one block, updates are fewer bytes."""
    assert SPAN % (codec.block or 1) == 0 and (codec.block or 2) * codec.bits % 8 == 0
    assert set(QUANTISERS) == {each for each in Codec if each.lossy} and set(BOUNDS) == set(Codec)
    if codec.updates:
        assert codec.block in (0, UPDATE_BLOCK) and codec.lossy
        assert codec.bits == 8 * np.dtype(QUANTISERS[codec].codes).itemsize, "a range may begin at any element"
        assert codec.updates * codec.element_bytes < Codec.FP32.element_bytes


def test_the_guide_shows_the_table() -> None:
    """Each row, as docs/guides/codecs.md has it."""
    text = (ROOT / "docs/guides/codecs.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", text, re.M)
    shown = {name: [cell.strip() for cell in row.split("|")[:-1]] for name, row in rows}
    for codec in Codec:
        dtypes = [codec.number, codec.update_number] if codec.updates else [codec.number]
        assert shown.pop(codec) == [
            str(codec.bits),
            str(codec.block or ""),
            f"largest / {codec.largest}" if codec.block else "",
            f"{codec.element_bytes:.5g}",
            str(codec.updates or ""),
            ", ".join(map(str, dtypes)),
        ], codec
    assert not shown


def test_the_template_and_the_options_name_every_codec() -> None:
    """Whoever chooses one there sees all that there are."""
    template = (ROOT / "dips" / "templates" / "shared.yaml").read_text()
    options = (ROOT / "docs/configuration.md").read_text()
    for key, codecs in (("codec", Codec), ("pull_codec", PULL_CODECS)):
        (line,) = re.findall(rf"^# {key}: .*", template, re.M)
        (row,) = re.findall(rf"^\| `shared\.{key}` .*", options, re.M)
        named = {codec for codec in Codec if re.search(rf"\b{codec}\b", line)}
        assert named == set(codecs) == {codec for codec in Codec if re.search(rf"`{codec}`", row)}, key

"""An authority for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.enrolled import Enrolled


@pytest.fixture
def enrolled(tmp_path: Path) -> Enrolled:
    return Enrolled(tmp_path)

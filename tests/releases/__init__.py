"""The release before, as a wheel, and virtual environments that have it.

The wheel is what `pip wheel --no-deps .` made of commit 9edc8683, the last one of 0.1.0. The next release puts its own
here and removes this one: a release and the one before go together, no more.
"""

from __future__ import annotations

import sys
import venv
import zipfile
from pathlib import Path

FORMER = Path(__file__).with_name("di_ps-0.1.0-py3-none-any.whl")


def make_venv(directory: Path, wheel: Path = FORMER) -> Path:
    """Make an environment with this wheel and, below it, the packages of the present one; return its interpreter.

    Only the present one's editable install is out of its sight: `.pth` files of directories that a `.pth` file names
    are not read.
    """
    venv.create(directory, symlinks=True)
    python = directory / "bin" / "python"
    (packages,) = (directory / "lib").glob("python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    present = [path for path in sys.path if Path(path).name == "site-packages"]
    (packages / "present.pth").write_text("\n".join(present) + "\n")
    return python

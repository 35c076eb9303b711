"""Compare the golden files with what is written today, or write them: `python -m tests.golden [--write]`."""

from __future__ import annotations

import sys

from tests.golden.files import DATA, MAKERS, different


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--write"]):
        print(__doc__, file=sys.stderr)
        return 64
    made = {name: raw for make in MAKERS.values() for name, raw in make().items()}
    changed = different(made)
    if arguments:
        for name in changed:
            (DATA / name).parent.mkdir(parents=True, exist_ok=True)
            (DATA / name).write_bytes(made[name])
        print(f"written: {', '.join(changed) or 'nothing, all are as they were'}")
        return 0
    print(f"different: {', '.join(changed) or 'none'}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

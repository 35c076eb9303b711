"""Says what a program can see of how it was started, as JSON; then ends as ordered: probe.py OUT END."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

HANDLERS = (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD, signal.SIGHUP)


def main(out: Path, end: str) -> None:
    main_module = sys.modules["__main__"]
    found = {
        "argv": sys.argv,
        "path": sys.path,
        "main": [__name__, main_module.__name__, main_module.__file__, str(main_module.__package__)],
        "cwd": os.getcwd(),
        "umask": os.umask(0o022),
        "environment": {k: v for k, v in os.environ.items() if k != "LC_CTYPE"},
        "leads": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), os.getpgid(0) == os.getpgid(os.getppid())],
        "parent": os.getppid(),
        "stdin": sys.stdin.read(),
        "handlers": {s.name: str(signal.getsignal(s)).partition(" at 0x")[0] for s in HANDLERS},
        "threads": len(os.listdir("/proc/self/task")),
        "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:-1],  # without that of the listing
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode().split("\0")[1:],
        "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
    }
    out.write_text(json.dumps(found))
    atexit.register(lambda: print("atexit ran"))
    threading.Thread(target=lambda: (time.sleep(0.2), print("the thread ended"))).start()
    if end == "raise":
        raise ValueError("no")
    if end in ("TERM", "KILL", "INT"):
        os.kill(os.getpid(), getattr(signal, f"SIG{end}"))
        time.sleep(10)
    sys.exit(int(end) if end.isdigit() else end or None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

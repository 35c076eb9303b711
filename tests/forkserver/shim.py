"""A Python command of a script: `python -S -E shim.py DOOR COMMAND...` ends as a fork of the server did that ran it.

Signals are passed on. A script of bash costs its own commands then, not the imports of what they start.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
REQUEST_BYTES, ANSWER_BYTES = 1 << 20, 1 << 16


def main(door: str, words: Sequence[str]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
    umask = os.umask(0)
    os.umask(umask)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, REQUEST_BYTES)
        server.connect(f"\0{door}")
        request = {
            "words": words, "environment": dict(os.environ), "cwd": os.getcwd(), "kept": [],
            "session": True, "group": -1, "umask": umask,
        }  # fmt: skip
        socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2, 2])
        answer = json.loads(server.recv(ANSWER_BYTES) or b'{"error": "it ended"}')
        if "error" in answer:
            sys.exit(f"the fork server: {answer['error']}")
        for number in PASSED_ON:
            signal.signal(number, lambda number, _: os.kill(answer["pid"], number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
        code = json.loads(server.recv(ANSWER_BYTES))["code"]
    if code < 0:
        with suppress(OSError):  # of KILL, which no one handles
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])

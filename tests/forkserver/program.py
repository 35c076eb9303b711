"""Runs a script, a module or a console script in this process as a new interpreter would run it."""

from __future__ import annotations

import atexit
import importlib.util
import io
import os
import signal
import site
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from tests.forkserver import command as commands
from tests.forkserver.command import Program

_exec_really = os.execvp
_installed_path = [p for p in sys.path[1:] if p not in os.environ.get("PYTHONPATH", "").split(os.pathsep)]


class Become(BaseException):
    """The program called exec on a plain Python command: this process goes on as that one."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)


def run(program: Program) -> None:
    """Run it to its end; what it raises, SystemExit among them, is the interpreter's to report."""
    os.execvp = _exec
    _open_output(program.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    first, name, code = _load(program, main)
    extra = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    sys.path[:] = [*extra, *_installed_path]
    for folder in site.getsitepackages():
        site.addsitedir(folder)  # an editable install is passed over where PYTHONPATH has it, as it had for the server
    sys.path.insert(0, first)
    sys.argv[:] = [name, *program.arguments]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def end(main: Callable[[], None]) -> NoReturn:
    """Run `main` and end as Python does, but for freeing every object of every library: a second of work, for a fork.

    Threads are waited for and what is registered for the exit runs, as ever.
    """
    code, interrupted = 0, False
    try:
        main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if code and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  of the program: reported as the interpreter would
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _load(program: Program, main: types.ModuleType) -> tuple[str, str, Any]:
    """Return the first entry of sys.path, the name of the program, and its code; describe it in `main`."""
    if program.code:
        return "", "-c", compile(program.code, "<string>", "exec")
    if program.script:
        main.__file__ = program.script
        with open(program.script, "rb") as file:
            code = compile(file.read(), program.script, "exec")
        return os.path.dirname(os.path.abspath(program.script)), program.script, code
    spec = importlib.util.find_spec(program.module)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{program.module}.__main__")
    if spec is None or spec.origin is None:
        sys.exit(f"{sys.executable}: No module named {program.module}")
    sys.modules.pop(program.module, None)  # whoever imports it gets one of its own, as ever
    main.__spec__, main.__package__, main.__file__ = spec, spec.parent, spec.origin
    return os.getcwd(), spec.origin, spec.loader.get_code(spec.name)  # type: ignore[union-attr]


def _open_output(unbuffered: bool) -> None:
    """Write to the descriptors that lie at 1 and 2 now, through Python's buffers or past them."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=stream is sys.stderr or stream.isatty())  # type: ignore[union-attr]
    if unbuffered:
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), write_through=True)
        raw = io.FileIO(2, "w", closefd=False)
        sys.stderr = io.TextIOWrapper(raw, errors="backslashreplace", write_through=True)


def _exec(file: str, words: Sequence[str]) -> NoReturn:
    if commands.parse([file, *words[1:]]) is None:
        _exec_really(file, words)
    raise Become(words)

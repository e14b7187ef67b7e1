"""Makes this process like one on Windows, for the modules of this package: run as `python like_windows.py FILE ARGS`.

They find no module, no function and no signal that Windows does not have, cannot open a folder, and get a stand-in for
msvcrt. Other packages are left alone: they are built for the system that this runs on.
"""

import builtins
import fcntl
import multiprocessing.context
import os
import runpy
import signal
import sys
from types import ModuleType
from typing import Any

import torch.distributed.checkpoint  # noqa: F401 - before anything is missing: torch knows Windows itself

MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "syslog", "termios", "tty")
MISSING: dict[ModuleType, tuple[str, ...]] = {
    os: ("O_DIRECTORY", "fork", "getpgid", "geteuid", "getuid", "killpg", "sched_getaffinity", "setpgrp", "sysconf"),
    signal: ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "alarm", "pthread_sigmask", "setitimer"),
    multiprocessing.context: ("ForkContext", "ForkProcess", "ForkServerContext", "ForkServerProcess"),
}


class Msvcrt(ModuleType):
    """Locks of one byte, as msvcrt.locking has them."""

    LK_NBLCK, LK_UNLCK = 2, 0

    def locking(self, handle: int, mode: int, size: int) -> None:
        assert (mode in (self.LK_NBLCK, self.LK_UNLCK), size) == (True, 1)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if mode == self.LK_NBLCK else fcntl.LOCK_UN)


def become_windows() -> None:
    """Takes away what Windows does not have."""
    import_module, open_file = builtins.__import__, os.open

    def import_there(name: str, globals: Any = None, *args: Any) -> Any:
        if name in MODULES and (globals or {}).get("__name__", "").startswith("rebased"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return import_module(name, globals, *args)

    def open_there(path: Any, *args: Any, **others: Any) -> int:
        if not isinstance(path, int) and os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return open_file(path, *args, **others)

    builtins.__import__, os.open = import_there, open_there
    os.environ.setdefault("USERNAME", "someone")  # torch asks for it
    multiprocessing.get_all_start_methods = lambda: ["spawn"]
    sys.modules["msvcrt"] = Msvcrt("msvcrt")
    for module, names in MISSING.items():
        for name in names:
            vars(module).pop(name, None)


if __name__ == "__main__":
    become_windows()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")

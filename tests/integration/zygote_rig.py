"""A zygote whose workers have no engine: a driver with one rank, which both only wait.

    python tests/integration/zygote_rig.py FD RUN_DIR PARENT GRACE_S KILLS

The rank does not die with its driver, as one does that the kernel has killed but not ended yet.
A driver writes its rank's pid to the log of its spec. `KILLS`: 0 for ranks that the zygote cannot
kill (a stand-in for those that hang in a device's driver).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import types
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memserve.workers import zygote
from memserve.workers.spec import WorkerSpec


def be_driver(spec: WorkerSpec, parent_pid: int) -> NoReturn:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    print(pid, flush=True)
    while True:
        signal.pause()


def main() -> None:
    fd, run_dir, parent, grace_s, kills = sys.argv[1:]
    workers = types.ModuleType("memserve.workers.main")
    vars(workers)["run_worker"] = be_driver
    sys.modules["memserve.workers.main"] = workers
    vars(zygote)["import_engine"] = lambda check: check()
    vars(zygote)["_GROUP_GRACE_S"] = float(grace_s)
    vars(zygote)["_END_GRACE_S"] = 0.1
    if kills == "0":
        vars(os)["killpg"] = lambda group, number: None
    zygote.Zygote(socket.socket(fileno=int(fd)), run_dir, int(parent)).serve()


if __name__ == "__main__":
    main()

"""Runs `python -m rl` in children that kill themselves with SIGKILL in the middle of an exact instruction.

    python -m tests.rl.killed_runs        (driven over its standard input, by tests and by scripts)

This program imports everything once and forks a child for each line of input, before gRPC is touched, so
that a run costs no start of an interpreter. A line is JSON: `argv` of the loop's command line; `output`, a
file; `kill_at`, the number of the profiler's event in the loop's own code at which to die, 0 to live and
count, null to live. The answer is `[pid, status, events]`: the child, its wait status, what it counted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

import rl.cli

OWN_CODE = str(Path(rl.cli.__file__).parent)


class Countdown:
    """Counts calls and returns within the loop's own code, on all threads; kills this process at one."""

    def __init__(self, kill_at: int | None) -> None:
        self.count = 0
        self._kill_at = kill_at

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if frame.f_code.co_filename.startswith(OWN_CODE):
            self.count += 1
            if self.count == self._kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    def begin(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)


def run_child(order: dict[str, object], report: int) -> None:
    output = os.open(str(order["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    kill_at, argv = order["kill_at"], order["argv"]
    assert isinstance(kill_at, int | None)
    assert isinstance(argv, list)
    countdown = Countdown(kill_at)
    if kill_at is not None:
        countdown.begin()
    code = rl.cli.main(argv)
    sys.setprofile(None)
    os.write(report, str(countdown.count).encode())
    os._exit(code)


def main() -> None:
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            run_child(json.loads(line), writing)
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading, "rb") as told:
            count = told.read()
        print(json.dumps([child, status, int(count or 0)]), flush=True)


if __name__ == "__main__":
    main()

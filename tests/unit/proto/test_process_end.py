"""The end of a process, by its id and start."""

from __future__ import annotations

import os
import subprocess
import sys

from heliograph_proto.process_end import process_started, wait_for_end


def test_a_process_that_ends_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = process_started(process.pid)
    assert started > 0 and not wait_for_end(process.pid, started, 0.0)
    process.communicate(b"\n")
    assert wait_for_end(process.pid, started, 60.0)


def test_a_process_that_is_not_the_same_is_not_waited_for() -> None:
    own = os.getpid()
    for process, started in ((own, process_started(own) + 1), (own, 0), (2**31, 1), (0, 0)):
        assert wait_for_end(process, started, 0.0)
    assert process_started(2**31) == 0

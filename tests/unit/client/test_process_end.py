"""The end of a process, by its id and start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from heliograph.admin import _wait_for_end as wait_for_end
from heliograph_proto.process_facts import process_started


def start_of(process: int) -> int:
    return process_started(Path(f"/proc/{process}/stat").read_text())


def test_a_process_that_ends_is_waited_for() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_of(process.pid)
    assert started > 0 and not wait_for_end(process.pid, started, 0.0)
    process.communicate(b"\n")
    assert wait_for_end(process.pid, started, 60.0)


def test_a_process_that_is_not_the_same_is_not_waited_for() -> None:
    own = os.getpid()
    for process, started in ((own, start_of(own) + 1), (own, 0), (2**31, 1), (0, 0)):
        assert wait_for_end(process, started, 0.0)


def test_a_text_that_is_no_status_has_no_start() -> None:
    assert process_started("") == process_started("1 (a) b") == 0
    assert process_started("7 (a ) b) S " + " ".join(map(str, range(4, 60)))) == 22

"""Ctrl-C in a client, at any moment: it reaches the program, and the session goes on."""

from __future__ import annotations

import gc
import random
import subprocess
import sys

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from paths import SUPPORT

import heliograph as hg

INTERRUPTS = 30


@pytest.mark.parametrize("transport", ["local", "tcp", "unix"])
def test_every_interrupt_reaches_the_program(daemon: DaemonUrls, transport: str) -> None:
    seed = random.randrange(2**32)
    url = {"local": "local:", "tcp": daemon.tcp, "unix": daemon.unix}[transport]
    command = [sys.executable, str(SUPPORT / "interrupted_client.py"), url, str(seed), str(INTERRUPTS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    print(f"seed {seed}\n{done.stderr}")
    assert (done.returncode, done.stdout) == (0, "all\n")


def test_a_closed_session_leaves_no_channel_to_the_collector(daemon: DaemonUrls) -> None:
    def channels() -> int:
        return sum(type(one).__module__ == "grpc._channel" for one in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = channels()
        with hg.connect(daemon.tcp, shared_memory=False) as session:
            session.put(np.zeros(2**20, np.uint8)).get()
        assert channels() <= before
    finally:
        gc.enable()

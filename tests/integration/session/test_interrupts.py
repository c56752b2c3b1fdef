"""Ctrl-C in a client, at any moment: it reaches the program, and the session goes on."""

from __future__ import annotations

import gc
import random
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from daemon_urls import DaemonUrls
from paths import SUPPORT

import heliograph as hg
from heliograph_backends.cpu.backend import CpuDevice

INTERRUPTS, SECONDS = 30, 60.0


def urls_of(daemon: DaemonUrls) -> dict[str, str]:
    return {"local": "local:", "tcp": daemon.tcp, "unix": daemon.unix}


@pytest.mark.parametrize("transport", ["local", "tcp", "unix"])
def test_every_interrupt_reaches_the_program(daemon: DaemonUrls, transport: str) -> None:
    seed = random.randrange(2**32)
    url = urls_of(daemon)[transport]
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
        with hg.connect(daemon.tcp, shared_memory=False, direct=False) as session:
            session.put(np.zeros(2**20, np.uint8)).get()
        assert channels() <= before
    finally:
        gc.enable()


@pytest.mark.parametrize("transport", ["local", "tcp", "unix"])
def test_a_signal_handler_may_use_the_session_that_its_thread_waits_for(
    daemon: DaemonUrls, transport: str
) -> None:
    answers: list[float] = []
    x = np.eye(256, dtype=np.float32)
    with hg.connect(urls_of(daemon)[transport]) as session:
        slow, quick = hg.Graph(), hg.Graph()
        y = given = slow.input("x", x.shape, "f32")
        for _ in range(300):
            y = y @ given
        slow.output("y", y)
        quick.output("b", quick.input("a", (4,), "f32") + 1)
        long, short = session.compile(slow), session.compile(quick)

        def handle(*_: object) -> None:
            found = short.submit(a=np.zeros(4, np.float32)).result(timeout=SECONDS)
            answers.append(float(found["b"][0]))

        previous = signal.signal(signal.SIGUSR1, handle)
        try:
            interrupt = threading.Timer(0.01, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR1))
            interrupt.start()
            assert np.array_equal(long.run(x=x, timeout=SECONDS)["y"], x)
            interrupt.join()
        finally:
            signal.signal(signal.SIGUSR1, previous)
    assert answers == [1.0]


def test_a_signal_handler_may_use_a_session_of_this_process_while_its_first_run_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[float] = []
    main, stream = threading.get_ident(), CpuDevice.stream

    def opened(device: CpuDevice) -> Any:
        signal.pthread_kill(main, signal.SIGUSR1)
        return stream(device)

    def handle(*_: object) -> None:
        answers.append(float(plan.submit(a=zeros).result(timeout=SECONDS)["b"][0]))

    g, zeros = hg.Graph(), np.zeros(4, np.float32)
    g.output("b", g.input("a", (4,), "f32") + 1)
    monkeypatch.setattr(CpuDevice, "stream", opened)
    previous = signal.signal(signal.SIGUSR1, handle)
    try:
        with hg.connect("local:") as session:
            plan = session.compile(g)
            assert plan.run(a=zeros, timeout=SECONDS)["b"][0] == 1
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert answers == [1.0]

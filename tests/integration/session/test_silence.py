"""A side that says nothing for a while, as when it is suspended: the session lives on."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from forked_daemons import newest_daemon, running_daemon

import heliograph as hg
from heliograph.transport import handshake
from heliograph_server.config.config import ServerConfig

#: The bound of both sides here, and a silence well below it, but of several pings.
SILENCE_SECONDS, SHORT_SECONDS = 5.0, 2.0

CLIENT = f"""
import sys
import heliograph as hg, numpy as np
with hg.connect(sys.argv[1], silence_seconds={SILENCE_SECONDS}) as session:
    tensor = session.put(np.arange(3, dtype=np.float32))
    print("ready", flush=True)
    sys.stdin.readline()
    print(tensor.get().tolist(), flush=True)
"""


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_session_outlives_a_silent_server() -> None:
    with (
        running_daemon("--silence-seconds", str(SILENCE_SECONDS)) as url,
        hg.connect(url, silence_seconds=SILENCE_SECONDS) as session,
    ):
        tensor = session.put(np.arange(3, dtype=np.float32))
        daemon = newest_daemon()
        daemon.send_signal(signal.SIGSTOP)
        try:
            pause(SHORT_SECONDS)
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert tensor.get().tolist() == [0, 1, 2]


def test_a_session_outlives_its_silent_client() -> None:
    with running_daemon("--silence-seconds", str(SILENCE_SECONDS)) as url:
        command = [sys.executable, "-c", CLIENT, url]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            try:
                assert client.stdout is not None and client.stdout.readline() == "ready\n"
                client.send_signal(signal.SIGSTOP)
                try:
                    pause(SHORT_SECONDS)
                finally:
                    client.send_signal(signal.SIGCONT)
                assert client.communicate("go on\n", timeout=30)[0] == "[0.0, 1.0, 2.0]\n"
            finally:
                client.kill()


def test_unless_told_otherwise_a_ping_goes_every_5_s_and_has_20_s_to_be_answered() -> None:
    options = dict(handshake.channel_options())
    assert options["grpc.keepalive_time_ms"] == 5_000
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 20_000
    assert ServerConfig().silence_seconds == handshake.SILENCE_SECONDS


@pytest.mark.parametrize("seconds", [0, -1, 0.1, 4000, float("nan"), True, "5"])
def test_a_bound_that_makes_no_sense_is_refused(seconds: float) -> None:
    with pytest.raises(hg.InvalidArgumentError, match="silence_seconds"):
        hg.connect("grpc://127.0.0.1:1", silence_seconds=seconds)
    with pytest.raises(hg.InvalidArgumentError, match="silence_seconds"):
        asyncio.run(refused(seconds))


async def refused(seconds: float) -> None:
    await hg.aio.connect("grpc://127.0.0.1:1", silence_seconds=seconds)

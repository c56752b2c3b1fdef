"""Training that goes on through cut connections and through the death of its daemon.

A network learns in a loop of 200 steps, with its weights and moments on a daemon. The way to the
daemon is cut three times, and the daemon itself is killed three times as `kill -9` does and started
again. The program does not notice, but for the time: the losses and the weights have the same bits
as those of a calm run.

    python surviving.py [FOLDER]
"""

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

import heliograph as hg
from heliograph.testing import wait_until_serving

STEPS, BATCH, HIDDEN = 200, 32, 48
#: At these steps.
CUTS, KILLS = (25, 80, 130), (50, 105, 160)


def training() -> hg.Graph:
    """Return a step: a network of two layers learns a function of 8 numbers."""
    random = np.random.default_rng(1)
    g = hg.Graph()
    x, y = g.input("x", (BATCH, 8), "f32"), g.input("y", (BATCH, 1), "f32")
    w1 = g.variable("w1", (8, HIDDEN), "f32", init=random.normal(0, 0.3, (8, HIDDEN)))
    w2 = g.variable("w2", (HIDDEN, 1), "f32", init=random.normal(0, 0.3, (HIDDEN, 1)))
    loss = hg.mean((hg.tanh(x @ w1) @ w2 - y) ** 2)
    hg.optim.adamw([w1, w2], hg.grad(loss, [w1, w2]), 0.01)
    g.output("loss", loss)
    return g


def train(session: hg.Session, disturb: list | None = None) -> tuple[list[bytes], bytes]:
    """Train, and return the bits of all losses and of the weights."""
    plan, random, losses = session.compile(training()), np.random.default_rng(2), []
    for step in range(STEPS):
        x = random.random((BATCH, 8), np.float32)
        if disturb is not None:
            disturb[0](step)
        loss = plan.run(x=x, y=np.sin(x.sum(1, keepdims=True)))["loss"]
        losses.append(loss.tobytes())
        if step % 40 == 39:
            print(f"  step {step + 1}: loss {float(loss):.5f}")
    return losses, plan.variables["w1"].get().tobytes()


class Daemon:
    """`heliograph serve` with a folder for the state of its sessions."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.command = [sys.executable, "-m", "heliograph.cli", "serve", "--log-level", "error"]
        self.command += ["--listen", f"grpc://127.0.0.1:{self.port}", "--state", str(folder)]
        self.command += ["--snapshot-seconds", "1"]
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        wait_until_serving(f"grpc://127.0.0.1:{self.port}")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class Cable:
    """The way to a daemon: a port that passes bytes on, until it is cut."""

    def __init__(self, port: int) -> None:
        self._to, self._ends = port, []
        self._loop = asyncio.new_event_loop()
        server = asyncio.start_server(self._join, "127.0.0.1", 0)
        self.port = self._loop.run_until_complete(server).sockets[0].getsockname()[1]
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            there, back = await asyncio.open_connection("127.0.0.1", self._to)
            self._ends += [writer, back]
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(65536):
                to.write(data)
                await to.drain()
        to.close()

    def cut(self) -> None:
        """Break every connection."""
        self._loop.call_soon_threadsafe(lambda: [one.transport.abort() for one in self._ends])


def main(folder: Path) -> None:
    print(f"{STEPS} steps without a disturbance:")
    with hg.connect("local:") as session:
        calm = train(session)

    daemon = Daemon(folder)
    try:
        cable = Cable(daemon.port)
        print(
            f"{STEPS} steps, with {len(CUTS)} cuts of the connection and {len(KILLS)} deaths of the daemon:"
        )

        def disturb(step: int) -> None:
            if step in CUTS:
                print(f"  step {step}: the connection is cut")
                cable.cut()
            if step in KILLS:
                print(f"  step {step}: kill -9")
                daemon.kill()
                threading.Thread(target=daemon.start).start()

        began = time.monotonic()
        # TCP connections beside gRPC's would go past the cable.
        with hg.connect(f"grpc://127.0.0.1:{cable.port}", durable=True, direct=False) as session:
            found = train(session, [disturb])
        took = time.monotonic() - began
    finally:
        daemon.kill()
    assert found == calm, "the bits differ"
    print(f"every loss and every weight has the same bits; it took {took:.1f} s")


if __name__ == "__main__":
    logging.getLogger("heliograph").setLevel(logging.ERROR)
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))

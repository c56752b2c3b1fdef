"""A large tensor from member to member: 256 MiB over a wire of 1 Gbit/s that takes 0.5 ms each way.

Head and client are on a third host, through which no byte of it may go.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from figures import Figure
from pool_runs import SECONDS, carried_bytes

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from paths import SUPPORT
from virtual_hosts import Host, Network, Wire, rights

MIB = 2**20
SIZE_BYTES = 256 * MIB
RATE_BITS = 1e9
#: Of each host's own wire; from one to the other lie both.
WIRE = Wire(delay_seconds=0.00025, rate_bits_per_second=RATE_BITS)
#: Of the wire's rate, which counts all that goes over it.
SHARE = 0.9
ROUNDS = 3
PORT, BULK_PORT = 7070, 9000
PROBES = str(SUPPORT / "virtual_hosts" / "probes.py")


def figures() -> Iterator[Figure]:
    if reason := rights():
        print(f"  skipped: {reason}", file=sys.stderr)
        return
    found = measured()
    limit = SIZE_BYTES * 8 / RATE_BITS
    copy, run = median(found["copies"]), median(found["runs"])
    wire = found["head_wire_bytes"][0]
    note = (
        f"{SIZE_BYTES / copy / 1e6:.0f} MB/s; a run that carries as much {run:.2f} s; "
        f"tensor bytes that the head carried {found['head_bytes'][0]:.0f}; "
        f"all bytes on the head's own wire {wire / MIB:.2f} MiB"
    )
    yield Figure("pool-transfer/256MiB", copy, limit, 1 / SHARE, "s", "the rate of the wire", note)


def measured() -> dict[str, list[float]]:
    """What the client found: seconds of copies and of runs, and bytes that the head carried."""
    with Network(desk=WIRE, first=WIRE, second=WIRE) as network, ExitStack() as stack:
        for name in ("first", "second"):
            stack.callback(_end, _member(network[name]))
        urls = [f"{name}=grpc://{network[name].address}:{PORT}" for name in ("first", "second")]
        found: dict[str, list[float]] = json.loads(
            network["desk"].run([sys.executable, __file__, *urls], timeout=SECONDS).stdout
        )
        return found


def _member(host: Host) -> subprocess.Popen[Any]:
    serve = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--log-level", "error"]
    listen = ["--listen", f"grpc://{host.address}:{PORT}"]
    pipe: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}
    process = host.popen([*serve, "--device", "fake:memory=2GiB", *listen], **pipe)
    assert process.stdout.readline().startswith("listening on ")
    return process


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait(SECONDS)


def client(urls: list[str]) -> dict[str, list[float]]:
    """On the desk: a pool of its own."""
    found: dict[str, list[float]] = {"copies": [], "runs": []}
    with hg.connect([url.partition("=")[2] for url in urls], timeout=SECONDS) as session:
        first, second = (device.name for device in session.devices)
        source = session.empty((SIZE_BYTES,), "u8", device=first)
        target = session.empty((SIZE_BYTES,), "u8", device=second)
        plan = _plan(session, first, second)
        source.copy_and_wait(target)
        plan.run()
        before, wire_before = carried_bytes(session), _wire_bytes()
        for _ in range(ROUNDS):
            found["copies"].append(_seconds(lambda: source.copy_and_wait(target)))
            found["runs"].append(_seconds(plan.run))
        found["head_bytes"] = [carried_bytes(session) - before]
        found["head_wire_bytes"] = [float(_wire_bytes() - wire_before)]
    return found


def _seconds(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def _plan(session: hg.Session, first: str, second: str) -> hg.Plan:
    """A result of 256 MiB on the first member, of which the second reads the sum."""
    g = hg.Graph()
    v = g.variable("v", (SIZE_BYTES // 4,), "f32")
    with g.scope("first"):
        large = v + np.float32(1)
    with g.scope("second"):
        g.output("sum", hg.sum(large))
    return session.compile(g, devices=[first, second], pins={"first/*": first, "second/*": second})


def _wire_bytes() -> int:
    """What went over this host's interface, both ways."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    fields = next(line.split() for line in lines if line.strip().startswith("eth0:"))
    return int(fields[1]) + int(fields[9])


if __name__ == "__main__":
    print(json.dumps(client(sys.argv[1:])))

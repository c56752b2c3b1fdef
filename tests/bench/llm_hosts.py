"""Tokens of a language model on other hosts, which are network namespaces here.

A daemon that is 5 ms away, each way, stands beside the same one without a delay. Two and three
hosts, 0.5 ms apart by wires of 1 Gbit/s, stand beside one and what the wires take: a hop to each
host, and one back. A hop is half a round trip of a byte over TCP, measured in turns, since a wire
is a process that takes time of its own. All daemons have one thread, and the hosts share this
machine's processors.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from figures import Figure, shared
from llm_shapes import chosen, write

import heliograph as hg

sys.path.append(str(Path(__file__).parents[1] / "support"))

from paths import SUPPORT
from virtual_hosts import Host, Network, Wire, rights

DELAY_SECONDS, HOP_SECONDS = 0.005, 0.0005
#: A hop passes two wires.
WIRE = Wire(delay_seconds=HOP_SECONDS / 2, rate_bits_per_second=1e9)
HOSTS = ("one", "two", "three")
#: The most that a token may take of its time without delay, and of one host's with the wires'.
DELAY_BAR, HOSTS_BAR = 1.05, 1.2
#: Tokens of an answer, of a daemon and of several hosts.
TOKENS, HOSTS_TOKENS = 128, 32
ROUNDS, TRIPS, SECONDS, PORT, ECHO_PORT = 3, 200, 120, 7070, 9000
PROBES = [sys.executable, str(SUPPORT / "virtual_hosts" / "probes.py")]
SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--log-level", "warning"]


def delay() -> Iterator[Figure]:
    """Milliseconds of a token of a daemon that is far away."""
    for model in _models():
        yield delayed(model)


def hosts() -> Iterator[Figure]:
    """Milliseconds of a token of several hosts."""
    for model in _models():
        yield from spread(model)


def _models() -> Iterator[Path]:
    """Yield a model, where there can be namespaces."""
    if reason := rights():
        print(f"  skipped: {reason}", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="bench-hosts-") as folder:
        yield write(Path(folder) / "model.gguf", chosen())


def delayed(model: Path) -> Figure:
    """A daemon that is far away, beside a near one."""
    with Network(server=Wire(), near=Wire(), far=Wire(delay_seconds=DELAY_SECONDS)) as network:
        url, daemon = _served(network["server"], "--models", str(model.parent))
        found: dict[str, list[float]] = {"near": [], "far": []}
        for _ in range(shared(ROUNDS)):
            for name, seconds in found.items():
                seconds += _asked(network[name], url, "")
        _end(daemon)
    mine, theirs = (statistics.median(found[name]) * 1e3 for name in ("far", "near"))
    return Figure("llm-delay/token", mine, theirs, DELAY_BAR, "ms/token", "without delay", "5 ms each way")


def spread(model: Path) -> Iterator[Figure]:
    """Two and three hosts, beside one."""
    with Network(head=Wire(), **dict.fromkeys(HOSTS, WIRE)) as network:
        options = ["--device", "cpu:threads=1"]
        daemons = [_served(network[name], *options)[1] for name in HOSTS]
        listed = ",".join(f"{name}={network[name].address}" for name in HOSTS)
        url, head = _served(network["head"], *options, "--pool", f"static:{listed}")
        counts = range(1, len(HOSTS) + 1)
        found: dict[int, list[float]] = {count: [] for count in counts}
        hops: list[float] = []
        echo = network["two"].popen([*PROBES, "answer", str(ECHO_PORT)], stdout=subprocess.PIPE, text=True)
        assert echo.stdout is not None and echo.stdout.readline()
        for _ in range(shared(ROUNDS)):
            hops += _hops(network["one"], network["two"].address)
            for count, seconds in found.items():
                seconds += _asked(network["head"], url, str(model), *HOSTS[:count])
        for one in (head, *daemons):
            _end(one)
    alone, hop = statistics.median(found[1]), statistics.median(hops)
    for count in counts[1:]:
        mine, wires = statistics.median(found[count]), count * hop
        note = f"one host {alone * 1e3:.2f} ms, a hop {hop * 1e3:.2f} ms"
        against = "one host and the wires"
        yield Figure(
            f"pool-llm/{count}-hosts", mine * 1e3, (alone + wires) * 1e3, HOSTS_BAR, "ms/token", against, note
        )


def _served(host: Host, *options: str) -> tuple[str, subprocess.Popen[str]]:
    url = f"grpc://{host.address}:{PORT}"
    process = host.popen([*SERVE, "--listen", url, *options], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().startswith("listening on ")
    return url, process


def _hops(host: Host, address: str) -> list[float]:
    """Seconds of a hop between two hosts."""
    command = [*PROBES, "round-trips", address, str(ECHO_PORT), str(TRIPS)]
    trips: list[float] = json.loads(host.run(command, timeout=SECONDS).stdout)
    return [one / 2 for one in trips]


def _end(daemon: subprocess.Popen[str]) -> None:
    daemon.terminate()
    daemon.wait(SECONDS)


def _asked(host: Host, url: str, model: str, *hosts: str) -> list[float]:
    """Return what a client on a host measures; without a path, the model is the server's."""
    done = host.run([sys.executable, __file__, url, model, *hosts], timeout=SECONDS)
    found: list[float] = json.loads(done.stdout)
    return found


def client(url: str, model: str, hosts: Sequence[str]) -> list[float]:
    """Return the seconds of a token in each of some answers, from the first token to the last."""
    found, tokens = [], HOSTS_TOKENS if hosts else TOKENS
    with hg.connect(url, timeout=SECONDS, progress=None) as session:
        options: Any = {}
        if hosts:
            devices = [f"{host}/cpu0" for host in hosts]
            watch = session.watch()
            while not set(devices) <= {one.name for one in session.devices}:
                next(watch)
            layers = chosen().layers
            pins = {f"layer{n}/*": devices[n * len(devices) // layers] for n in range(layers)}
            options = {"devices": devices, "pins": pins}
        llm = hg.llm.load(session, model or session.server_weights("model.gguf"), **options)
        for turn in range(3):
            times = [
                time.perf_counter()
                for _ in llm.generate(list(range(300, 316)), max_tokens=tokens, temperature=0)
            ]
            if turn:
                found.append((times[-1] - times[0]) / (tokens - 1))
    return found


if __name__ == "__main__":
    print(json.dumps(client(sys.argv[1], sys.argv[2], sys.argv[3:])))

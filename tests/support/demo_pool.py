"""`make demo-pool`: MiniLM over three small hosts, none of which has room for all of it; then one dies.

    desk (client and head) ─┬─ left ─┐
                            ├─ middle ┤  each with a daemon, 112 MiB for the model, and a wire of 1 Gbit/s
                            └─ right ─┘

The hosts are network namespaces that virtual wires join. The client prints where the model runs and what
crosses between the hosts, loses one host in the middle of a run, goes on with the others, and compares every
embedding, bit for bit, with those of the same model in one process.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import heliograph as hg
from heliograph.demo import SENTENCES, find_model
from heliograph.explain.explanation import Explanation
from heliograph.models.minilm import Embedder

sys.path.append(str(Path(__file__).parent))

from virtual_hosts import Network, Wire, rights

HOSTS = ("left", "middle", "right")
PORT = 7070
#: The model takes 87 MiB of weights: more than one host has.
MEMORY = "80MiB"
#: What each host is to run as long as it is there: the table of words, layers 0 to 2, and 3 to 5.
PATTERNS = (["get_rows_*"], [f"layer{n}/*" for n in range(3)], [f"layer{n}/*" for n in range(3, 6)])
WIRE = Wire(delay_seconds=0.0001, rate_bits_per_second=1e9)
SECONDS = 300.0
KILL, KILLED = "kill", "killed"


def main() -> int:
    """The hosts, a daemon on each of three, and the client's process on the fourth; 0 when it worked."""
    console = Console(width=100)
    if reason := rights():
        console.print(f"the demo needs hosts of its own, which this system refuses: {reason}")
        return 1
    console.print(f"hosts {', '.join(HOSTS)} with a daemon and {MEMORY} each, and desk with the client")
    with Network(desk=WIRE, **dict.fromkeys(HOSTS, WIRE)) as network, ExitStack() as stack:
        daemons = {name: _daemon(network, name) for name in HOSTS}
        for one in daemons.values():
            stack.callback(_end, one)
        urls = [f"grpc://{network[name].address}:{PORT}" for name in HOSTS]
        client = network["desk"].popen(
            [sys.executable, __file__, *urls],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        stack.callback(_end, client)
        for line in client.stdout:
            if line.startswith(KILL):
                victim = line.split()[1]
                daemons[victim].kill()
                console.print(f"\n[bold]the daemon on {victim} was killed[/bold]\n")
                print(KILLED, file=client.stdin, flush=True)
            else:
                console.out(line, end="", highlight=False)
        return client.wait(SECONDS)


def _daemon(network: Network, name: str) -> subprocess.Popen[Any]:
    serve = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--log-level", "error"]
    listen = ["--listen", f"grpc://{network[name].address}:{PORT}"]
    device = ["--device", f"cpu:threads=1,memory={MEMORY}"]
    process = network[name].popen([*serve, *listen, *device], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("listening on "), f"the daemon on {name} did not start"
    return process


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait(SECONDS)


def client(urls: list[str]) -> int:
    """On the desk: a pool of its own over the three hosts."""
    # What is lost is shown below.
    logging.disable(logging.WARNING)
    console = Console(width=100)
    model = find_model()
    with hg.connect("local:") as alone:
        expected = Embedder(alone, model).embed(SENTENCES)
    _try_alone(console, urls[0], model)
    steps = {}
    begun = time.perf_counter()
    with hg.connect(urls) as pool:
        _wait_for(pool, len(urls))
        steps["join the hosts"] = time.perf_counter() - begun
        names = [device.name for device in pool.devices]
        hosts = dict(zip(names, HOSTS, strict=True))
        pins = {one: name for name, patterns in zip(names, PATTERNS, strict=True) for one in patterns}
        embedder = Embedder(pool, model, devices=names, pins=pins, on_loss="rebuild")
        steps["send the weights, compile, embed"], first = _timed(lambda: embedder.embed(SENTENCES))
        steps["embed again"], again = _timed(lambda: embedder.embed(SENTENCES))
        (plan,) = embedder._plans.values()
        _show(console, hosts, plan.explain(), "over three hosts")
        steps["embed, lose a host, place again, embed"], after = _timed(
            lambda: _embed_with_a_loss(embedder, HOSTS[-1])
        )
        steps["embed again on two hosts"], last = _timed(lambda: embedder.embed(SENTENCES))
        _show(console, hosts, plan.explain(), "over two hosts")
        for one in plan.rebuilds:
            lost = ", ".join(hosts[name] for name in one.lost)
            console.print(f"lost: {lost}; runs that were repeated: {one.repeated}", highlight=False)
    console.print(_timings(steps))
    found = {"over three hosts": [first, again], "while one was lost": after, "over two hosts": [last]}
    return _verdict(console, expected, found)


def _wait_for(pool: hg.Session, count: int) -> None:
    with pool.watch() as watch:
        while len(pool.devices) < count:
            watch.next(timeout=SECONDS)


def _try_alone(console: Console, url: str, model: Path) -> None:
    """One host is too small, and says so."""
    with hg.connect(url) as session:
        try:
            Embedder(session, model).embed(SENTENCES)
        except hg.OutOfMemoryError as error:
            console.print(f"{HOSTS[0]} alone: {error.message}", highlight=False)
        else:
            raise SystemExit(f"{HOSTS[0]} has room for all of the model: the demo shows nothing")


def _show(console: Console, hosts: dict[str, str], found: Explanation, title: str) -> None:
    """Where the model runs, and what crosses between the hosts."""
    placement = Table(title=f"placement {title}", min_width=70)
    for name in ("split", "host", "nodes", "ms"):
        placement.add_column(name, justify="right" if name == "ms" else "left")
    edges = Table(title=f"edges {title}", min_width=70)
    for name, justify in (
        ("value", "left"),
        ("from", "left"),
        ("to", "left"),
        ("bytes", "right"),
        ("way", "left"),
    ):
        edges.add_column(name, justify=justify)  # type: ignore[arg-type]
    for split in found.splits:
        host = hosts[split.device]
        nodes = f"{len(split.nodes)}: {split.nodes[0].name} ... {split.nodes[-1].name}"
        placement.add_row(str(split.number), host, nodes, f"{split.compute_us / 1e3:.1f}")
        for copy in split.copies:
            edges.add_row(copy.name, hosts[copy.source], host, f"{copy.size_bytes:,}", str(copy.route))
    console.print(placement)
    console.print(edges)


def _timed(call: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def _embed_with_a_loss(embedder: Embedder, host: str) -> list[Any]:
    """Embeds again and again, while the end of a host is asked for, and done."""
    killing = threading.Thread(target=_ask_to_kill, args=(host,))
    results = []
    killing.start()
    while killing.is_alive():
        results.append(embedder.embed(SENTENCES))
    results.append(embedder.embed(SENTENCES))
    return results


def _ask_to_kill(host: str) -> None:
    print(KILL, host, flush=True)
    assert sys.stdin.readline().strip() == KILLED


def _timings(seconds: dict[str, float]) -> Table:
    table = Table(title="timings", min_width=70)
    table.add_column("step")
    table.add_column("ms", justify="right")
    for name, duration in seconds.items():
        table.add_row(name, f"{duration * 1e3:,.0f}")
    return table


def _verdict(console: Console, expected: Any, found: dict[str, list[Any]]) -> int:
    """0 when all bits are those of one process."""
    is_same = {what: all(np.array_equal(one, expected) for one in ones) for what, ones in found.items()}
    for what, same in is_same.items():
        values = "the bits of one process" if same else "OTHER VALUES"
        console.print(f"embeddings {what} ({len(found[what])} runs): {values}", highlight=False)
    return 0 if all(is_same.values()) else 1


if __name__ == "__main__":
    raise SystemExit(client(sys.argv[1:]) if len(sys.argv) > 1 else main())

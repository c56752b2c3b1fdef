"""`make demo-pool`: MiniLM over three small hosts, none of which has room for all of it; then one dies.

    desk (client and head) ─┬─ left ─┐
                            ├─ middle ┤  each with a daemon, 48 MiB for the model, and a wire of 1 Gbit/s
                            └─ right ─┘

The hosts are network namespaces that virtual wires join. The client prints where the model runs and what
crosses between the hosts, loses one host in the middle of a run, goes on with the others, and compares every
embedding, bit for bit, with those of the same model in one process.
"""

from __future__ import annotations

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
from heliograph.demo import SENTENCES, find_model, pairs_table
from heliograph.models.minilm import Embedder

sys.path.append(str(Path(__file__).parent))

from virtual_hosts import Network, Wire, rights

HOSTS = ("left", "middle", "right")
PORT = 7070
#: Of 87 MiB of weights, and half as much again for their packed form and what is between nodes.
MEMORY = "96MiB"
WIRE = Wire(delay_seconds=0.0001, rate_bits_per_second=1e9)
SECONDS = 300.0
KILL, KILLED = "kill", "killed"


def main() -> int:
    """The hosts, a daemon on each of three, and the client's process on the fourth; 0 when it worked."""
    console = Console()
    if reason := rights():
        console.print(f"the demo needs hosts of its own, which this system refuses: {reason}")
        return 1
    console.print(f"making hosts {', '.join(HOSTS)} and desk, and starting a daemon on each of the three")
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
        for line in client.stdout:
            if line.startswith(KILL):
                lost = line.split()[1]
                victim = next(name for name in HOSTS if network[name].address == lost)
                daemons[victim].kill()
                console.print(f"[bold]killed the daemon on {victim}[/bold] ({lost})")
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
    console = Console(width=110)
    model = find_model()
    with hg.connect("local:") as alone:
        expected = Embedder(alone, model).embed(SENTENCES)
    begun = time.perf_counter()
    with hg.connect(urls) as pool:
        console.print(f"a pool of {len(pool.devices)} devices in {time.perf_counter() - begun:.2f} s:")
        names = [device.name for device in pool.devices]
        for device in pool.devices:
            console.print(f"  {device.name}, {device.memory().free_bytes / 2**20:.0f} MiB free")
        embedder = Embedder(pool, model, devices=names, on_loss="rebuild")
        steps = {}
        steps["weights to their hosts, compile, embed"], first = _timed(lambda: embedder.embed(SENTENCES))
        steps["embed again"], again = _timed(lambda: embedder.embed(SENTENCES))
        (plan,) = embedder._plans.values()
        explanation = plan.explain()
        console.print(str(explanation), markup=False, highlight=False)
        steps["embed, while one host is killed, and once more on the others"], after = _timed(
            lambda: _embed_with_a_loss(embedder, explanation)
        )
        console.print(str(plan.explain()), markup=False, highlight=False)
    console.print(pairs_table(after))
    console.print(_table(steps))
    same = [bool(np.array_equal(one, expected)) for one in (first, again, after)]
    for what, is_same in zip(("over three hosts", "again", "after the loss"), same, strict=True):
        console.print(f"{what}: {'the same bits as in one process' if is_same else 'OTHER VALUES'}")
    return 0 if all(same) else 1


def _timed(call: Any) -> tuple[float, Any]:
    begun = time.perf_counter()
    result = call()
    return time.perf_counter() - begun, result


def _embed_with_a_loss(embedder: Embedder, explanation: Any) -> Any:
    """Embeds, and asks for the end of the host that computes last meanwhile."""
    last = explanation.devices[-1].name.partition("/")[0]
    killing = threading.Thread(target=_ask_to_kill, args=(last,))
    results = []
    killing.start()
    while killing.is_alive():
        results.append(embedder.embed(SENTENCES))
    results.append(embedder.embed(SENTENCES))
    for one in results:
        if not np.array_equal(one, results[0]):
            raise SystemExit("a run gave other values than the one before")
    return results[-1]


def _ask_to_kill(host: str) -> None:
    print(KILL, host, flush=True)
    assert sys.stdin.readline().strip() == KILLED


def _table(seconds: dict[str, float]) -> Table:
    table = Table(title="timings")
    table.add_column("step")
    table.add_column("ms", justify="right")
    for name, duration in seconds.items():
        table.add_row(name, f"{duration * 1e3:,.0f}")
    return table


if __name__ == "__main__":
    raise SystemExit(client(sys.argv[1:]) if len(sys.argv) > 1 else main())

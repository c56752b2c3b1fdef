"""A daemon on one host and clients on others: slow, lossy and broken ways between them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from hosts_client import HELD_BYTES, X, large_graph, small_graph
from paths import SUPPORT
from virtual_hosts import Network, Wire, rights

import heliograph as hg

CLIENT = [sys.executable, str(SUPPORT / "hosts_client.py")]
SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--device", "cpu:threads=1"]
PORT = 7070
SECONDS = 60
#: A peer that vanished is noticed after 15 s; a busy machine has as much again.
NOTICED_SECONDS = 30

pytestmark = pytest.mark.hosts


WIRES = {
    "server": Wire(),
    "near": Wire(),
    "lossy": Wire(delay_seconds=0.005, loss=0.01, seed=5),
    # A queue that a sender who fills it does not hide behind.
    "slow": Wire(delay_seconds=0.005, rate_bits_per_second=50e6, queue_bytes=2**18),
    "cut": Wire(delay_seconds=0.001),
    "mute": Wire(delay_seconds=0.001),
    "deaf": Wire(delay_seconds=0.001),
    "refused": Wire(),
}


@dataclass
class Served:
    """A daemon on the host `server` of a network, and a client near it that is asked what it has free."""

    network: Network
    process: subprocess.Popen[str]
    watcher: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"grpc://{self.network['server'].address}:{PORT}"

    def client(self, host: str, what: str) -> subprocess.Popen[str]:
        """A client program on a host, whose lines `told` reads."""
        return self.network[host].popen(
            [*CLIENT, what, self.url], stdin=PIPE, stdout=PIPE, text=True, bufsize=1
        )

    def asked(self, host: str, what: str) -> Any:
        """What a client program tells that is done with it."""
        return json.loads(self.network[host].run([*CLIENT, what, self.url], timeout=SECONDS).stdout)

    def free_bytes(self) -> int:
        """What the device has free now."""
        ask(self.watcher)
        return int(told(self.watcher))

    def until_ended(self, *hosts: str) -> None:
        """Waits until the daemon has said that the sessions of clients on these hosts have ended."""
        begun = {f"from ipv4:{self.network[host].address}:" for host in hosts}
        running: set[str] = set()
        for line in self.process.stderr:
            if any(peer in line for peer in begun):
                begun = {peer for peer in begun if peer not in line}
                running |= set(re.findall(r"session \d+", line))
            elif " ended after " in line:
                running -= set(re.findall(r"session \d+", line))
            if not begun and not running:
                return
        raise AssertionError("the daemon has ended")


@pytest.fixture(scope="module")
def there() -> Iterator[Served]:
    """One daemon for all tests, since each has a host of its own; it ends well."""
    if reason := rights():
        pytest.skip(reason)
    with Network(**WIRES) as network:
        host = network["server"]
        command = [*SERVE, "--listen", f"grpc://{host.address}:{PORT}"]
        served = Served(network, host.popen(command, stdout=PIPE, stderr=PIPE, text=True))
        assert told_text(served.process).startswith("listening on ")
        served.watcher = served.client("near", "memory")
        told(served.watcher)
        yield served
        served.watcher.stdin.close()
        assert served.watcher.wait(SECONDS) == 0
        served.process.terminate()
        assert served.process.wait(SECONDS) == 0


def told_text(process: subprocess.Popen[str]) -> str:
    """The next line that a process writes."""
    return process.stdout.readline()


def told(client: subprocess.Popen[str]) -> Any:
    """The next thing that a client program tells."""
    return json.loads(told_text(client))


def ask(client: subprocess.Popen[str]) -> None:
    """Lets a client program go on that waits for a line."""
    client.stdin.write("\n")


def test_a_lossy_slow_wire_changes_no_value(there: Served) -> None:
    with hg.connect("local:") as session:
        plan = session.compile(small_graph())
        values = [plan.run(x=X * number)["y"] for number in range(15)] * 2
    found = np.array(there.asked("lossy", "graph"), np.float32)
    assert np.array_equal(found, np.array(values))
    assert sum(one.lost for one in there.network["lossy"].wire.counts()) > 0


def test_a_small_run_does_not_wait_for_an_upload_that_is_under_way(there: Served) -> None:
    order, large, small = there.asked("slow", "uploading")
    assert order == ["run", "upload"]
    with hg.connect("local:") as session:
        assert small == session.compile(small_graph()).run(x=X)["y"].tolist()
        assert large == session.compile(large_graph()).run(x=np.zeros(1, np.float32))["y"].tolist()


@dataclass(frozen=True)
class Ends:
    """What was seen when ways broke while clients waited for runs."""

    #: By host: the name of the error, its text, and the seconds that the wait took.
    waits: dict[str, tuple[str, str, float]]
    #: What the device had free before there were clients, with them, and when the daemon had noticed.
    free_bytes: tuple[int, int, int]


@pytest.fixture(scope="module")
def ends(there: Served) -> Ends:
    """Three clients wait; the way of one is cut, that of each other in one direction. All at once, since
    noticing takes a quarter of a minute."""
    hosts = ("cut", "mute", "deaf")
    network = there.network
    before = there.free_bytes()
    clients = [there.client(name, "waiting") for name in hosts]
    for client in clients:
        told(client)
    during = there.free_bytes()
    network["cut"].cut()
    network["mute"].cut_towards(network["server"])
    network["server"].cut_towards(network["deaf"])
    outputs = [client.communicate(timeout=NOTICED_SECONDS)[0] for client in clients]
    there.until_ended(*hosts)
    waits = {name: tuple(json.loads(output)) for name, output in zip(hosts, outputs, strict=True)}
    return Ends(waits, (before, during, there.free_bytes()))


@pytest.mark.parametrize("way", ["cut", "mute", "deaf"])
def test_a_wait_ends_with_a_typed_error_when_the_way_breaks(ends: Ends, way: str) -> None:
    """Cut altogether, from the client to the daemon, and from the daemon to the client."""
    name, text, seconds = ends.waits[way]
    print(f"{way}: {name} after {seconds:.1f} s: {text}")
    assert issubclass(getattr(hg, name), hg.ConnectionError)
    assert "connect again" in text


def test_the_daemon_frees_what_a_vanished_client_held(ends: Ends) -> None:
    before, during, after = ends.free_bytes
    assert during <= before - 3 * HELD_BYTES
    assert after == before


def test_a_reset_connection_is_a_typed_error_at_once(there: Served) -> None:
    """A firewall before the daemon begins to refuse the client, and stops."""
    if shutil.which("nft") is None:
        pytest.skip("no nft command: install nftables")
    client = there.client("refused", "asking")
    assert told(client) == "ready"
    there.network["server"].reject(sender=there.network["refused"])
    ask(client)
    name, text = told(client)
    there.network["server"].mend()
    assert issubclass(getattr(hg, name), hg.ConnectionError), text
    assert client.wait(SECONDS) == 0
    assert there.asked("refused", "graph")

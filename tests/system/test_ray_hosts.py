"""What an operator does with deploy/ray, on hosts that are network namespaces, one of which is cut."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hosts_client import X, small_graph
from paths import DEPLOY, SUPPORT
from virtual_hosts import Network, Wire, rights

import heliograph as hg

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

NODE = str(DEPLOY / "ray" / "node.sh")
CLIENT = [sys.executable, str(SUPPORT / "hosts_client.py"), "graph"]
POOL = [sys.executable, "-m", "heliograph.cli", "pool"]
SERVE = ("--serve", "--insecure", "--device", "cpu:threads=1,memory=256MiB")
STARTED = "Ray runtime started"
SMALL = "--object-store-memory=80000000"
SECONDS = 90.0
#: A node that says nothing is lost after three seconds, where Ray has half a minute by default.
SOON = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
T = TypeVar("T")


@dataclass
class Cluster:
    """Ray on the hosts of a network: `first` is its head, and takes no member."""

    network: Network
    folder: str

    @property
    def address(self) -> str:
        return f"{self.network['first'].address}:6379"

    def node(self, host: str, *what: str, options: str = "") -> subprocess.Popen[Any]:
        """Makes a host a node, as deploy/ray/README.md says."""
        there = self.network[host]
        environment = os.environ | SOON | {"NODE_ADDRESS": there.address, "RAY_OPTIONS": f"{SMALL} {options}"}
        environment["RAY_BIN"] = str(Path(sys.executable).parent)
        with open(f"{self.folder}/{host}.log", "ab") as log:
            return there.popen([NODE, *what], env=environment, stdout=log, stderr=log)

    def join(self, host: str) -> subprocess.Popen[Any]:
        """One after the other: these hosts have one file system, where Ray's files are otherwise mixed up."""
        log = Path(self.folder, f"{host}.log")
        before = log.read_text().count(STARTED) if log.exists() else 0
        process = self.node(host, "join", self.network["first"].address, options="--num-cpus=1")
        until(lambda: log.read_text().count(STARTED) > before, f"{host} is a node")
        return process

    def pool(self, action: str, *arguments: str, host: str = "first", address: str = "") -> Any:
        """`heliograph pool`: what it says and its exit status."""
        command = [*POOL, action, "--address", address or self.address, *arguments]
        return self.network[host].run(command, timeout=2 * SECONDS, check=False)

    def states(self) -> list[str]:
        done = self.pool("status", "--json")
        return [one["state"] for one in json.loads(done.stdout)["members"]] if done.stdout else []

    def value(self, url: str) -> Any:
        """What a graph gives that a client runs there, on a host that is no node."""
        return json.loads(self.network["client"].run([*CLIENT, url], timeout=SECONDS).stdout)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: `make test-ray` has it in an environment of its own")
    if reason := rights():
        pytest.skip(reason)
    # Ray makes sockets there, whose paths must be short.
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    try:
        with Network(first=Wire(), second=Wire(), third=Wire(), client=Wire()) as network:
            made = Cluster(network, folder)
            made.node("first", "head", options=f"--num-cpus=0 --temp-dir={folder}/r")
            until(lambda: not made.pool("down").returncode, "the head is there")
            yield made
    finally:
        for log in sorted(Path(folder).glob("*.log")):
            # Shown where a test fails.
            print(f"--- {log.name}\n{log.read_text()}")
        shutil.rmtree(folder, ignore_errors=True)


def until(find: Callable[[], T | None], what: str) -> T:
    deadline = time.monotonic() + SECONDS
    while not (found := find()):
        assert time.monotonic() < deadline, f"not within {SECONDS:.0f} s: {what}"
        threading.Event().wait(0.25)
    return found


def test_hosts_are_made_nodes_serve_others_and_are_lost_and_found(cluster: Cluster) -> None:
    cluster.join("second")
    third = cluster.join("third")
    urls = [f"grpc://{cluster.network[host].address}:7070" for host in ("second", "third")]

    refused = cluster.pool("up", "--members", "2", *SERVE[:1], *SERVE[2:])
    assert refused.returncode == 1 and "--serve --insecure" in refused.stderr
    done = cluster.pool("up", "--members", "2", *SERVE)
    assert done.returncode == 0, done.stderr
    assert all(url in done.stdout for url in urls)
    with hg.connect("local:") as session:
        expected = session.compile(small_graph()).run(x=X)["y"].tolist()
    assert [cluster.value(url)[1] for url in urls] == [expected] * 2
    elsewhere = f"ray://{cluster.network['first'].address}:10001"
    asked = cluster.pool("status", host="client", address=elsewhere)
    assert (asked.returncode, asked.stdout) == (0, cluster.pool("status").stdout), asked.stderr

    cluster.network["third"].cut()
    until(lambda: sorted(cluster.states()) == ["lost", "serving"], "the loss of a host is known")
    cluster.network["third"].mend()
    # Ray gave the node up, which ends with what ran there; a service manager starts it anew.
    assert third.wait(SECONDS) != 0
    cluster.join("third")
    until(lambda: cluster.states() == ["serving"] * 2, "the host has a member again")
    assert [cluster.value(url)[1] for url in urls] == [expected] * 2

    assert cluster.pool("down").returncode == 0
    assert not [one for host in ("second", "third") for one in daemons(cluster.network, host)]


def daemons(network: Network, host: str) -> list[str]:
    """Command lines of daemons on a host."""
    found = network[host].run(["ps", "-eo", "args"], timeout=SECONDS).stdout.splitlines()
    return [line for line in found if "heliograph.cli serve" in line and network[host].address in line]

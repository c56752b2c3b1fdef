"""A firewall between two members of a pool, on hosts of their own: what `heliograph doctor` says of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from subprocess import PIPE
from typing import Any

import pytest
from virtual_hosts import Network, NetworkError, Wire, rights

HELIOGRAPH = [sys.executable, "-m", "heliograph.cli"]
PORT = 7070
SECONDS = 60

pytestmark = pytest.mark.hosts


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := rights():
        pytest.skip(reason)
    with Network(head=Wire(), a=Wire(), b=Wire()) as made:
        yield made


def serve(network: Network, host: str, *arguments: str) -> subprocess.Popen[str]:
    listen = ["serve", "--insecure", "--device", "fake", "--listen", f"grpc://{network[host].address}:{PORT}"]
    process = network[host].popen([*HELIOGRAPH, *listen, *arguments], stdout=PIPE, text=True)
    assert process.stdout.readline().startswith("listening on ")
    return process


def doctor(network: Network) -> Any:
    """What it says on the head's host."""
    url = f"grpc://{network['head'].address}:{PORT}"
    process = network["head"].popen([*HELIOGRAPH, "doctor", url, "--json"], stdout=PIPE, text=True)
    return json.loads(process.communicate(timeout=SECONDS)[0])


def test_a_firewall_between_two_members_is_found_with_the_port_to_open(network: Network) -> None:
    try:
        network["b"].reject(PORT, network["a"])
    except NetworkError as error:
        pytest.skip(str(error))
    served = [serve(network, "a"), serve(network, "b")]
    listed = ",".join(f"{name}={network[name].address}" for name in "ab")
    served.append(serve(network, "head", "--pool", f"static:{listed}"))
    end = time.monotonic() + SECONDS
    while True:
        told = doctor(network)
        links = {(one["a"], one["b"]): one["reachable"] for one in told["measurements"]["pool"]["links"]}
        if len(links) == 4 and None not in links.values():
            break
        assert time.monotonic() < end, links
    assert links == {("", "a"): True, ("", "b"): True, ("a", "b"): False, ("b", "a"): True}
    (found,) = [one for one in told["findings"] if one["name"] == "unreachable"]
    assert (
        found["seen"].startswith("a cannot fetch values from b")
        and f"open port {PORT} at b to a" in found["advice"]
    )
    assert all(one["reached"] for one in told["measurements"]["pool"]["members"])
    for process in served:
        process.terminate()
    assert [process.wait(SECONDS) for process in served] == [0, 0, 0]

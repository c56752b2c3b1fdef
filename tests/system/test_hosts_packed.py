"""Tensors on a slow way between two hosts are compressed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from virtual_hosts import Network, Wire, rights

SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--device", "cpu:threads=1"]
PORT = 7070
SECONDS = 60
SIZE = 24 * 2**20

pytestmark = pytest.mark.hosts

#: Prints the bytes that its host has received and sent meanwhile.
CLIENT = """
import json, sys
import numpy as np
import heliograph as hg

def counts():
    with open("/proc/self/net/dev") as lines:
        (line,) = [one for one in lines if one.strip().startswith("eth0:")]
    fields = line.split(":")[1].split()
    return int(fields[0]), int(fields[8])

array = np.zeros(int(sys.argv[2]), np.uint8)
before = counts()
with hg.connect(sys.argv[1]) as session:
    assert session.command_socket, session.why_no_command_socket
    assert np.array_equal(session.put(array).get(timeout=60), array)
print(json.dumps([after - one for one, after in zip(before, counts())]))
"""


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := rights():
        pytest.skip(reason)
    slow = Wire(delay_seconds=0.002, rate_bits_per_second=100e6)
    with Network(server=Wire(), far=slow) as made:
        server = made["server"]
        url = f"grpc://{server.address}:{PORT}"
        daemon = server.popen([*SERVE, "--listen", url], stdout=subprocess.PIPE, text=True)
        assert daemon.stdout is not None and daemon.stdout.readline().startswith("listening on ")
        yield made
        daemon.terminate()
        daemon.wait(SECONDS)


def passed(network: Network, host: str) -> tuple[int, int]:
    """The bytes that a host received and sent for a tensor of `SIZE` bytes, there and back."""
    url = f"grpc://{network['server'].address}:{PORT}"
    done = network[host].run([sys.executable, "-c", CLIENT, url, str(SIZE)], timeout=SECONDS)
    received, sent = json.loads(done.stdout)
    return received, sent


def test_a_slow_way_carries_fewer_bytes_than_the_tensor_has(network: Network) -> None:
    received, sent = passed(network, "far")
    assert sent < SIZE / 2 and received < SIZE / 2

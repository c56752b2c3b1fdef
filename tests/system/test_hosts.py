"""The harness of hosts: wires delay, bound and lose; ways are cut and mended; nothing is left behind."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from paths import SUPPORT
from virtual_hosts import Host, Network, NetworkError, Wire, processes_in, rights
from virtual_hosts.wire import Line

PROBES = [sys.executable, "-I", "-S", str(SUPPORT / "virtual_hosts/probes.py")]
PORT = 9000
SECONDS = 60


@pytest.fixture
def able() -> None:
    """Skips where no network can be made, and says why."""
    if reason := rights():
        pytest.skip(reason)


needs_rights = [pytest.mark.hosts, pytest.mark.usefixtures("able")]


def marked(test: Any) -> Any:
    """A test of a real network."""
    for mark in needs_rights:
        test = mark(test)
    return test


@contextmanager
def answering(**wires: Wire) -> Iterator[Network]:
    """A network whose host `server` answers probes."""
    with Network(server=Wire(), **wires) as network:
        process = network["server"].popen([*PROBES, "answer", str(PORT)], stdout=subprocess.PIPE, text=True)
        assert json.loads(process.stdout.readline()) == "ready"
        yield network


def probe(network: Network, host: str, what: str, *number: int) -> Any:
    """What a probe from this host to the server finds."""
    command = [*PROBES, what, network["server"].address, str(PORT), *map(str, number)]
    return json.loads(network[host].run(command, timeout=SECONDS).stdout)


# One direction of a wire, without sockets


def arrivals(line: Line, *moments: float) -> list[int]:
    """How many frames arrive at each moment."""
    return [len(list(line.arrived(moment))) for moment in moments]


def test_a_frame_arrives_after_the_delay_and_not_before() -> None:
    line = Line(Wire(delay_seconds=2.0), "there")
    line.put(10.0, b"frame", 5)
    assert line.next_arrival == 12.0
    assert arrivals(line, 11.9, 12.0, 13.0) == [0, 1, 0]
    assert line.next_arrival == float("inf")


def test_frames_are_sent_one_after_the_other_at_the_rate() -> None:
    line = Line(Wire(delay_seconds=1.0, rate_bits_per_second=8.0), "there")
    for _ in range(3):
        line.put(0.0, b"xx", 2)
    assert arrivals(line, 2.9, 3.0, 4.9, 5.0, 7.0) == [0, 1, 0, 1, 1]


def test_a_wire_that_becomes_shorter_lets_no_frame_overtake_another() -> None:
    line = Line(Wire(delay_seconds=5.0), "there")
    line.put(0.0, b"first", 5)
    line.change(Wire())
    line.put(1.0, b"second", 6)
    assert list(line.arrived(4.9)) == []
    assert list(line.arrived(5.0)) == [b"first", b"second"]


def test_the_queue_is_bounded_and_what_is_on_its_way_is_not_in_it() -> None:
    line = Line(Wire(delay_seconds=1.0, rate_bits_per_second=80.0, queue_bytes=20), "there")
    for _ in range(5):
        line.put(0.0, bytes(10), 10)
    assert line.counts.dropped == 2 and arrivals(line, 10.0) == [3]


def test_the_same_seed_loses_the_same_frames() -> None:
    def lost(seed: int) -> list[bytes]:
        line = Line(Wire(loss=0.5, seed=seed), "there")
        for number in range(100):
            line.put(0.0, bytes([number]), 1)
        assert line.counts.lost + len(frames := list(line.arrived(0.0))) == 100
        return frames

    assert lost(1) == lost(1) != lost(2)


@pytest.mark.parametrize("wrong", [{"delay_seconds": -1}, {"loss": 1.5}, {"rate_bits_per_second": -8}])
def test_a_wire_that_cannot_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Wire(**wrong)


# Wires between hosts


@marked
def test_a_round_trip_takes_the_delay_twice() -> None:
    with answering(near=Wire(), far=Wire(delay_seconds=0.02)) as network:
        far = probe(network, "far", "round-trips", 20)
        assert min(far) >= 0.04
        # Below a delay that is there twice each way. A busy machine adds nothing to the shortest.
        assert min(far) - min(probe(network, "near", "round-trips", 20)) < 0.06


@marked
def test_the_rate_bounds_what_comes_through_and_large_frames_pass_whole() -> None:
    size_bytes, rate = 2**20, 20e6
    with answering(client=Wire(rate_bits_per_second=rate)) as network:
        assert probe(network, "client", "bulk", size_bytes) >= size_bytes * 8 / rate
    there, _ = network.counts["client"]
    # Segments of an Ethernet would be 700.
    assert 0 < there.received < 600


@marked
def test_a_wire_loses_some_and_tcp_does_not_mind() -> None:
    with answering(client=Wire(loss=0.1, seed=3)) as network:
        assert 0 < probe(network, "client", "datagrams", 500) < 500
        assert probe(network, "client", "bulk", 2**20) > 0
    for counts in network.counts["client"]:
        assert counts.lost > 0 and counts.received == counts.sent + counts.lost + counts.dropped


@marked
def test_a_wire_can_be_changed_while_it_carries() -> None:
    with answering(client=Wire(delay_seconds=0.001)) as network:
        wire = network["client"].wire
        wire.change(Wire(loss=1.0))
        assert probe(network, "client", "reach") == "silence"
        wire.change(Wire(delay_seconds=0.03))
        assert min(probe(network, "client", "round-trips", 5)) >= 0.06
        assert wire.counts()[0].lost > 0


@marked
@pytest.mark.parametrize("wire", [Wire(), Wire(delay_seconds=0.001)], ids=["straight", "wire"])
def test_a_cut_host_reaches_nobody_until_it_is_mended(wire: Wire) -> None:
    with answering(other=Wire(), client=wire) as network:
        network["client"].cut()
        assert probe(network, "client", "reach") == "silence"
        assert probe(network, "other", "reach") == "answer"
        network["client"].mend()
        assert probe(network, "client", "reach") == "answer"


@marked
def test_a_connection_outlives_a_cut() -> None:
    with answering(client=Wire(delay_seconds=0.001)) as network:
        client = network["client"]
        command = [*PROBES, "round-trips", network["server"].address, str(PORT), "500"]
        process = client.popen(command, stdout=subprocess.PIPE, text=True)
        while client.wire.counts()[1].sent < 100:
            pass
        client.cut()
        before = client.wire.counts()[1].sent
        client.mend()
        assert len(json.loads(process.communicate(timeout=SECONDS)[0])) == 500
        assert client.wire.counts()[1].sent > before


@marked
@pytest.mark.parametrize("sender, receiver", [("client", "server"), ("server", "client")])
def test_a_cut_in_one_direction_lets_the_other_pass(sender: str, receiver: str) -> None:
    with Network(server=Wire(), client=Wire()) as network:
        network[sender].cut_towards(network[receiver])
        assert not arrives(network[sender], network[receiver])
        assert arrives(network[receiver], network[sender])
        network[sender].mend()
        assert arrives(network[sender], network[receiver])


RECEIVE = """
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
s.bind(("", 9001))
print("ready", flush=True)
s.settimeout(1)
try:
    print(len(s.recv(10)))
except TimeoutError:
    print(0)
"""
SEND = (
    "import socket, sys; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', (sys.argv[1], 9001))"
)


def arrives(sender: Host, receiver: Host) -> bool:
    """Whether a datagram that needs no answer does."""
    process = receiver.popen([sys.executable, "-S", "-c", RECEIVE], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    sender.run([sys.executable, "-S", "-c", SEND, receiver.address], timeout=SECONDS)
    return process.communicate(timeout=SECONDS)[0] == "1\n"


@marked
def test_a_host_may_reject_and_says_what_it_lacks() -> None:
    with answering(client=Wire()) as network:
        server = network["server"]
        if shutil.which("nft") is None:
            with pytest.raises(NetworkError, match="nftables"):
                server.reject(PORT)
            pytest.skip("no nft command: install nftables")
        server.reject(PORT + 1)
        assert probe(network, "client", "reach") == "answer"
        server.mend()
        server.reject(PORT)
        assert probe(network, "client", "reach") == "reset"
        server.mend()
        assert probe(network, "client", "reach") == "answer"


# What hosts see, and what is left of them


@marked
def test_hosts_see_their_own_network_alone_and_networks_do_not_meet() -> None:
    with Network(a=Wire()) as one, Network(a=Wire(), b=Wire()) as two:
        links = two["a"].run(["ip", "-brief", "link"], timeout=SECONDS).stdout
        assert {line.split("@")[0].split()[0] for line in links.splitlines()} == {"lo", "eth0"}
        assert one["a"].address == two["a"].address
        with answering() as third:
            assert probe(third, "server", "reach") == "answer"
            command = [*PROBES, "reach", third["server"].address, str(PORT)]
            assert json.loads(two["b"].run(command, timeout=SECONDS).stdout) != "answer"


@marked
def test_a_command_that_fails_or_takes_too_long_is_an_error_and_ends() -> None:
    with Network(a=Wire()) as network:
        with pytest.raises(subprocess.CalledProcessError):
            network["a"].run(["false"], timeout=SECONDS)
        assert network["a"].run(["false"], timeout=SECONDS, check=False).returncode == 1
        with pytest.raises(subprocess.TimeoutExpired):
            network["a"].run(["sleep", "1000"], timeout=0.1)
        assert list(processes_in(network.inodes)) == []


@marked
def test_nothing_is_left_of_a_network_whose_test_fails() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ZeroDivisionError), Network(a=Wire(), b=Wire(delay_seconds=0.001)) as network:
        # What a process has started in turn, and nobody ends.
        shell = network["a"].popen(["sh", "-c", "sleep 1000 & echo; wait"], stdout=subprocess.PIPE)
        shell.stdout.readline()
        # The shell, what it started, and the wire.
        assert len(list(processes_in(network.inodes))) == 3
        print(1 / 0)
    assert list(processes_in(network.inodes)) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


@marked
def test_what_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("virtual_hosts.network.WIRE_PROGRAM", SUPPORT / "nothing.py")
    with pytest.raises(NetworkError, match="wire ended"), Network(a=Wire(), b=Wire(delay_seconds=0.001)):
        pass
    assert len(os.listdir("/proc/self/fd")) == descriptors


KILLED = """
import sys
sys.path.insert(0, sys.argv[1])
from virtual_hosts import Network, Wire
with Network(a=Wire(), b=Wire(delay_seconds=0.001)) as network:
    sleeper = network["a"].popen(["sh", "-c", "echo; exec sleep 1000"], stdout=-1)
    sleeper.stdout.readline()
    print(*network.inodes, flush=True)
    sys.stdin.read()
"""


@marked
def test_nothing_is_left_of_a_process_that_is_killed() -> None:
    command = [sys.executable, "-c", KILLED, str(SUPPORT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        inodes = set(map(int, owner.stdout.readline().split()))
        endings = [os.pidfd_open(pid) for pid in processes_in(inodes)]
        assert len(inodes) == 3 and len(endings) == 2
        owner.send_signal(signal.SIGKILL)
        owner.wait(SECONDS)
    for ending in endings:
        assert select.select([ending], [], [], SECONDS)[0]
        os.close(ending)
    assert list(processes_in(inodes)) == []


@marked
def test_a_machine_that_lacks_something_says_what(monkeypatch: pytest.MonkeyPatch) -> None:
    rights.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        assert rights() == "no ip command: install iproute2"
    finally:
        rights.cache_clear()

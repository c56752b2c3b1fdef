"""A head and its members on hosts of their own, and the ways between them cut: altogether, and one way."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from subprocess import PIPE
from typing import Any, TypeAlias

import pytest
from paths import SUPPORT
from virtual_hosts import Network, Wire, rights

CLIENT = [sys.executable, str(SUPPORT / "hosts_pool_client.py")]
SERVE = [sys.executable, "-m", "heliograph.cli", "serve", "--insecure", "--device", "cpu:threads=1"]
PORT = 7070
SECONDS = 60
#: How its way to the head, or from there, breaks.
WAYS = ("cut", "mute", "deaf")

#: What was seen, of which device, in which words, and when.
Told: TypeAlias = tuple[str, str, str, float]

pytestmark = pytest.mark.hosts


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    if reason := rights():
        pytest.skip(reason)
    with Network(head=Wire(), **{link: Wire() for link in WAYS}) as made:
        yield made


def serve(network: Network, host: str, *arguments: str) -> subprocess.Popen[str]:
    command = [*SERVE, "--listen", f"grpc://{network[host].address}:{PORT}", *arguments]
    process = network[host].popen(command, stdout=PIPE, text=True)
    assert process.stdout.readline().startswith("listening on ")
    return process


def told(client: subprocess.Popen[str]) -> Told:
    kind, device, text, seconds = json.loads(client.stdout.readline())
    return kind, device, text, seconds


@pytest.fixture(scope="module")
def seen(network: Network) -> Iterator[tuple[float, list[Told]]]:
    """When the ways were cut, and all that a client was told until they were mended."""
    served = [serve(network, link) for link in WAYS]
    listed = ",".join(f"{link}={network[link].address}" for link in WAYS)
    served.append(serve(network, "head", "--pool", f"static:{listed}"))
    url = f"grpc://{network['head'].address}:{PORT}"
    devices = [f"{link}/cpu0" for link in WAYS]
    client = network["head"].popen([*CLIENT, url, *devices], stdout=PIPE, text=True, bufsize=1)
    for _ in WAYS:
        assert told(client)[0] == "waiting"
    began = time.monotonic()
    network["cut"].cut()
    network["mute"].cut_towards(network["head"])
    network["head"].cut_towards(network["deaf"])
    found: list[Told] = []
    while not found or found[-1][0] != "goes on":
        found.append(told(client))
    for host in ("cut", "mute", "head"):
        network[host].mend()
    found += [told(client) for _ in WAYS]
    assert client.wait(SECONDS) == 0
    yield began, found
    for process in served:
        process.terminate()
    ended: list[Any] = [process.wait(SECONDS) for process in served]
    assert ended == [0] * len(served)


@pytest.mark.parametrize("link", WAYS)
def test_a_member_whose_way_is_cut_is_lost_and_who_waits_for_it_is_told(
    seen: tuple[float, list[Told]], link: str
) -> None:
    """Cut altogether, from the member to the head, and from the head to the member."""
    began, found = seen
    mine = {kind: (text, at - began) for kind, device, text, at in found if device == f"{link}/cpu0"}
    text, seconds = mine["MemberLostError"]
    print(f"{link}: noticed after {mine['lost'][1]:.2f} s, its run failed after {seconds:.2f} s")
    assert f"member {link} at grpc://" in text and "is lost" in mine["lost"][0]
    assert seconds < SECONDS


def test_work_that_needs_none_of_them_goes_on_and_all_are_there_again_when_the_ways_are_mended(
    seen: tuple[float, list[Told]],
) -> None:
    _, found = seen
    assert ("goes on", "[1.0, 2.0, 3.0]") in [(kind, text) for kind, _, text, _ in found]
    counts = Counter(kind for kind, *_ in found)
    assert counts["lost"] == counts["MemberLostError"] == counts["appeared"] == len(WAYS)

"""`heliograph doctor`: its measurements of a connection to a server, and its findings."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import doctor_measurements
import numpy as np
import pytest
from doctor_measurements import DEVICE, FAR, MIB, ONCE, TUNED, WELL, transport
from forked_daemons import running_daemon

import heliograph as hg
import heliograph.admin
from heliograph.cli import doctor, main
from heliograph.cli.common.text import time_text
from heliograph.cli.doctor.findings import Finding, Level, find, is_untuned, network_of, said
from heliograph.cli.doctor.growth import FIRST_BYTES, LARGEST_BYTES, Growth, grow
from heliograph.cli.doctor.machine import measure_machine
from heliograph.cli.doctor.measurements import (
    Copies,
    DeviceSeen,
    Direction,
    MachineRates,
    PathMeasurement,
    Rate,
    RoundTrip,
    SideFacts,
    TransportKind,
    TransportMeasurements,
)
from heliograph.cli.doctor.measuring import measure, round_trips
from heliograph.testing import wait_until_serving
from heliograph_backends.fake import FakeDevice
from heliograph_backends.registry import Registry
from heliograph_proto.process_facts import allocator, allocator_settings, process_facts


def only(found: TransportMeasurements) -> Finding:
    """The one finding that there is."""
    (finding,) = find(found)
    assert finding.seen and finding.cost and finding.advice
    return finding


# Findings, of frozen measurements


def test_where_all_is_well_nothing_is_found() -> None:
    assert find(WELL) == find(FAR) == ()
    assert said(()) == ["nothing to change: the rates are usual for these transports"]


def test_a_long_way_is_a_hint_to_send_runs_ahead() -> None:
    found = only(replace(FAR, run=RoundTrip(40e-3, 45e-3, 9)))
    assert (found.name, found.level) == ("round_trip", Level.HINT)
    assert "40 ms" in found.seen and "25 runs a second" in found.cost
    assert "plan.loop" in found.advice and "plan.submit" in found.advice


def test_a_long_round_trip_on_one_host_is_the_processor() -> None:
    found = only(replace(WELL, run=RoundTrip(8e-3, 9e-3, 9)))
    assert (found.name, found.level) == ("round_trip", Level.WARNING)
    assert "on this host" in found.seen and "processor" in found.advice


def test_answers_that_are_late_now_and_then_are_told() -> None:
    assert only(replace(FAR, run=RoundTrip(1e-3, 30e-3, 50))).name == "jitter"
    assert find(replace(FAR, run=RoundTrip(0.1e-3, 2e-3, 50))) == ()


def test_connecting_that_takes_long_is_told_unless_devices_start_here() -> None:
    found = only(replace(FAR, connect_seconds=3.0))
    assert (found.name, found.seen) == ("connecting", "connecting took 3 s")
    assert find(replace(FAR, connect_seconds=1.5, empty=RoundTrip(40e-3, 40e-3, 7))) == ()
    assert find(replace(WELL, connect_seconds=3.0, in_process=True)) == ()


def test_a_server_without_uvloop_is_told_what_to_install() -> None:
    server = SideFacts("heliograph/0.1.0", {**WELL.server.facts, "event_loop": "asyncio"})
    found = only(replace(WELL, server=server))
    assert "uvloop is not installed" in found.seen and "pip install 'heliograph[server]'" in found.advice


@pytest.mark.parametrize(
    ("why", "level", "words"),
    [
        ("numba is not installed", Level.WARNING, "pip install 'heliograph[server]'"),
        ("the definition of the ops alone was asked for", Level.HINT, "without reference=1"),
    ],
)
def test_a_device_without_kernels_is_told_why(why: str, level: Level, words: str) -> None:
    device = replace(DEVICE, features={"blas": "openblas"}, missing={"native_kernels": why})
    found = only(replace(WELL, devices=(device,)))
    assert found.level is level and why in found.seen and words in found.advice


def test_one_host_without_shared_memory_says_why_as_both_sides_know_it() -> None:
    facts = {**WELL.server.facts, "shared_memory": "it is off in the configuration", "allocator": "jemalloc"}
    found = find(
        replace(
            WELL,
            client=FAR.client,
            server=SideFacts("heliograph/0.1.0", facts),
            shared_memory=False,
            why_not_shared="the server offers none",
            why_no_command_socket="the server offers none",
            transports=(transport(TransportKind.GRPC, 900e6),),
        )
    )
    assert [one.name for one in found] == ["shared_memory"] and found[0].level is Level.WARNING
    assert "the server offers none (it is off in the configuration)" in found[0].seen
    here = (transport(TransportKind.LOCAL, 2e9), transport(TransportKind.MAPPED, 7e9))
    assert find(replace(WELL, in_process=True, shared_memory=False, transports=here)) == ()


@pytest.mark.parametrize(
    ("rate", "network"),
    [
        (1.1e6, "10 Mbit/s"),
        (11.2e6, "100 Mbit/s"),
        (110e6, "1 Gbit/s"),
        (280e6, "2.5 Gbit/s"),
        (1.1e9, "10 Gbit/s"),
        (60e6, ""),
        (0.0, ""),
        (math.nan, ""),
        (math.inf, ""),
    ],
)
def test_a_rate_is_that_of_a_usual_network_or_none(rate: float, network: str) -> None:
    assert network_of(rate) == network


def test_a_network_s_rate_is_named() -> None:
    found = only(replace(FAR, transports=(transport(TransportKind.GRPC, 110e6),)))
    assert found.seen == "the connection gives 104.9 MiB/s: that is a 1 Gbit/s network"
    assert "9.76 s" in found.cost and "quantized" in found.advice


def test_a_network_is_known_behind_a_long_way() -> None:
    """Of a transfer's time the round trip is none in which bytes came."""
    way = Direction(Rate(4 * MIB, 4 * MIB / 11.5e6 + 0.1, 1), ONCE)
    far = replace(
        FAR, empty=RoundTrip(0.1, 0.1, 5), transports=(PathMeasurement(TransportKind.GRPC, way, way),)
    )
    assert only(far).seen == "the connection gives 8.6 MiB/s: that is a 100 Mbit/s network"


def test_a_rate_that_no_network_has_asks_what_is_in_between() -> None:
    found = only(replace(FAR, transports=(transport(TransportKind.GRPC, 3e6),)))
    assert (found.name, found.level) == ("slow_transport", Level.WARNING) and "VPN" in found.advice


def test_a_slow_grpc_on_one_host_matters_where_tensors_go_by_it() -> None:
    slow = replace(
        WELL, transports=(transport(TransportKind.SHARED, 2e9), transport(TransportKind.GRPC, 50e6))
    )
    assert find(slow) == ()
    alone = replace(
        slow,
        shared_memory=False,
        why_not_shared="another user",
        why_no_command_socket="another user",
        transports=(transport(TransportKind.GRPC, 50e6),),
    )
    assert [one.name for one in find(alone)] == ["shared_memory", "slow_transport"]


MACHINE = MachineRates(copy=8e9, tcp=2e9, unix=6e9)


@pytest.mark.parametrize(
    ("url", "kind", "rate", "words"),
    [
        ("grpc://127.0.0.1:7070", TransportKind.GRPC, 42e6, "TCP on the loopback interface gives 1.9 GiB/s"),
        ("grpcs://127.0.0.1:7070", TransportKind.GRPC, 42e6, "TCP on the loopback interface"),
        ("unix:///run/x.sock", TransportKind.GRPC, 200e6, "a unix socket gives 5.6 GiB/s"),
        ("unix:///run/x.sock", TransportKind.SHARED, 100e6, "a copy in memory gives 7.5 GiB/s"),
        ("unix:///run/x.sock", TransportKind.MAPPED, 500e6, "a copy in memory"),
        ("local:", TransportKind.LOCAL, 100e6, "a copy in memory"),
    ],
)
def test_a_rate_is_compared_with_that_of_the_machine_itself(
    url: str, kind: TransportKind, rate: float, words: str
) -> None:
    here = replace(WELL, url=url, shared_memory=kind is not TransportKind.GRPC, why_not_shared="")
    server = SideFacts("heliograph/0.1.0", {"event_loop": "uvloop", "allocator": "jemalloc"})
    well = replace(here, server=server, machine=MACHINE, transports=(transport(kind, 30 * rate),))
    assert not [one for one in find(well) if one.name == "slow_transport"]
    found = [
        one
        for one in find(replace(well, transports=(transport(kind, rate),)))
        if one.name == "slow_transport"
    ]
    assert len(found) == 2 and {one.level for one in found} == {Level.WARNING}
    assert words in found[0].seen and "is usual" in found[0].seen and "up" in found[0].seen
    assert "1 GiB takes" in found[0].cost and "processor" in found[0].advice


def test_a_slow_grpc_beside_shared_memory_is_a_hint() -> None:
    slow = (transport(TransportKind.SHARED, 3e9), transport(TransportKind.GRPC, 42e6))
    found = find(replace(WELL, machine=MACHINE, transports=slow))
    assert {(one.name, one.level) for one in found} == {("slow_transport", Level.HINT)}
    assert "shared memory is on" in found[0].cost


def test_the_machine_s_own_rates_are_measured_in_bounded_time() -> None:
    found = measure_machine()
    assert min(found.copy, found.tcp, found.unix) > 0


def test_a_small_quota_is_measured_within_and_refuses_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_daemon("--quota", "device_memory_bytes=16MiB") as url:
        assert main(["doctor", url, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        with heliograph.admin.connect(url) as admin:
            (usage,) = admin.snapshot().tenants
    assert [one["why_not"] for one in found["measurements"]["transports"]] == ["", "", "", ""]
    assert found["measurements"]["devices"][0]["free_bytes"] <= 16 * MIB
    assert usage.refused == 0


def test_an_allocator_with_its_defaults_is_told_on_either_side_where_grpc_is_fast() -> None:
    untuned = SideFacts("heliograph/0.1.0", {"rich": "13.0", "allocator": "glibc 2.36"})
    found = only(replace(FAR, client=untuned))
    assert "client" in found.seen and "hg.tune_allocator()" in found.advice
    server = SideFacts("heliograph/0.1.0", {"allocator": "glibc 2.36"})
    assert "server" in only(replace(FAR, server=server)).seen
    assert [
        one.name
        for one in find(replace(FAR, client=untuned, transports=(transport(TransportKind.GRPC, 110e6),)))
    ] == ["network"]


def test_settings_of_the_allocator_that_help_are_known() -> None:
    assert is_untuned({"allocator": "glibc 2.36"})
    assert is_untuned({"allocator": "glibc 2.36", "allocator_settings": "MALLOC_ARENA_MAX=2"})
    for settings in (TUNED, "GLIBC_TUNABLES=glibc.malloc.mmap_threshold=33554432", "mmap_threshold=4194304"):
        assert not is_untuned({"allocator": "glibc 2.36", "allocator_settings": settings})
    assert not is_untuned({"allocator": "jemalloc"}) and not is_untuned({})


def test_small_chunks_and_too_many_copies_are_told() -> None:
    assert only(replace(FAR, chunk_bytes=4096)).name == "chunks"
    assert find(replace(FAR, chunk_bytes=0)) == ()
    found = find(replace(FAR, transports=(transport(TransportKind.GRPC, 900e6, Copies(2.0, None)),)))
    assert [one.seen for one in found] == [
        f"by gRPC, {way}, the client copies each byte 2 times" for way in ("up", "down")
    ]


def test_a_full_device_is_told() -> None:
    found = only(replace(WELL, devices=(replace(DEVICE, free_bytes=10**8),)))
    assert found.name == "memory" and "95.4 MiB free of 14.9 GiB" in found.seen
    assert find(replace(WELL, devices=(replace(DEVICE, free_bytes=0, total_bytes=0),))) == ()


def test_a_device_that_names_no_blas_is_told() -> None:
    assert only(replace(WELL, devices=(replace(DEVICE, features={"threads": "2"}),))).name == "blas"


def test_a_transport_that_could_not_be_measured_is_told_and_no_mapped_tensor_is_none() -> None:
    found = only(
        replace(FAR, transports=(PathMeasurement(TransportKind.GRPC, why_not="it took more than 10 s"),))
    )
    assert found.name == "broken_transport" and "it took more than 10 s" in found.seen
    assert (
        find(
            replace(
                WELL,
                transports=(*WELL.transports[:2], PathMeasurement(TransportKind.MAPPED, why_not="a GPU")),
            )
        )
        == ()
    )


def test_an_older_server_tells_nothing_and_that_is_told() -> None:
    found = only(replace(FAR, server=SideFacts("heliograph/0.0.9", {}), missing_features=("statistics",)))
    assert found.name == "versions" and "heliograph/0.0.9" in found.seen
    assert "does not report" in found.seen and "does not support statistics" in found.seen


def test_rich_is_suggested_where_it_is_missing() -> None:
    assert only(replace(WELL, client=SideFacts("heliograph/0.1.0", {"python": "3.11"}))).name == "rich"


def test_what_matters_most_comes_first() -> None:
    bare = SideFacts("heliograph/0.1.0", {"python": "3.11"})
    found = find(replace(WELL, client=bare, run=RoundTrip(1.0, 9.0, 2)))
    assert [one.name for one in found] == ["round_trip", "jitter", "rich"]
    assert len(said(found)) == 3 * len(found) and said(found)[0].startswith("1. warning: ")


ODD = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e300, 1e-300)


@pytest.mark.parametrize("odd", ODD)
def test_numbers_that_make_no_sense_are_no_error(odd: float, capsys: pytest.CaptureFixture[str]) -> None:
    way = Direction(Rate(MIB, odd, 1), Copies(odd, odd))
    for base in (WELL, FAR):
        found = replace(
            base,
            connect_seconds=odd,
            empty=RoundTrip(odd, odd, 0),
            run=RoundTrip(odd, odd, -1),
            transports=(PathMeasurement(TransportKind.GRPC, way, way), PathMeasurement(TransportKind.MAPPED)),
            devices=(replace(DEVICE, free_bytes=-1, total_bytes=2**64),),
        )
        doctor.show(found, find(found))
        json.dumps(doctor.as_json(found, find(found)), allow_nan=False)
        assert "nan" not in capsys.readouterr().out.lower()


def test_a_hostile_server_s_words_stay_on_their_line(capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\n\nall is well\x00" + "x" * 1000
    facts = {"python": evil, "event_loop": evil, "allocator": "glibc" + evil, "shared_memory": evil}
    device = DeviceSeen(evil, evil, evil, evil, 1, 2, {"blas": evil}, {"native_kernels": evil})
    found = replace(
        WELL,
        server=SideFacts(evil, facts),
        devices=(device,),
        features=(evil,),
        shared_memory=False,
        why_not_shared=evil,
        why_no_command_socket=evil,
        transports=(PathMeasurement(TransportKind.GRPC, why_not=evil),),
    )
    doctor.show(found, find(found))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "\x00" not in printed and "\nall is well" not in printed


def test_times_are_in_fitting_units() -> None:
    told = [time_text(seconds) for seconds in (0.0, 25e-6, 40e-3, 2.5, 90.0, 7200.0, 1e6, math.nan)]
    assert told == ["unknown", "25 us", "40 ms", "2.5 s", "1.5 min", "2 h", "11.6 days", "unknown"]


# How it measures


@pytest.mark.parametrize("rate", [1e3, 1e5, 1e6, 1e8, 1e10])
@pytest.mark.parametrize("latency", [0.0, 1e-3, 40e-3])
def test_transfers_grow_and_end_in_time_on_every_transport(rate: float, latency: float) -> None:
    sizes: list[int] = []

    def transfer(size_bytes: int) -> float:
        sizes.append(size_bytes)
        return latency + size_bytes / rate

    growth = Growth(round_trip_seconds=latency)
    found = grow(transfer, growth)
    assert sizes[0] == FIRST_BYTES and max(sizes) <= LARGEST_BYTES
    # All that come after the first fit into the time that there is, which is a second at most.
    assert len(sizes) == 1 or sum(latency + size / rate for size in sizes) <= growth.seconds * 1.001 <= 1.001
    assert found.size_bytes == max(sizes) and found.bytes_per_second <= rate * 1.001
    # The round trip is no longer what is measured, but where the largest transfer is too short for that.
    assert found.size_bytes == LARGEST_BYTES or found.bytes_per_second >= rate / 2


def test_a_clock_that_stands_still_is_no_endless_loop() -> None:
    assert grow(lambda _: 0.0, Growth()).transfers > 1
    assert grow(lambda _: -1.0, Growth()).bytes_per_second > 0
    assert Growth().next_bytes(FIRST_BYTES, 1.0, 0.5) is None
    assert Growth().next_bytes(1, 1e-9, 0.0) is None


def test_no_transfer_is_larger_than_there_is_room_for() -> None:
    assert grow(lambda _: 1e-3, Growth(most_bytes=100)).size_bytes == 100


def test_round_trips_are_counted_and_the_first_is_not() -> None:
    calls: list[None] = []
    found = round_trips(lambda: calls.append(None))
    assert len(calls) == found.samples + 1 and 2 <= found.samples <= 200
    assert found.median_seconds <= found.p90_seconds


# What processes tell


def test_facts_of_a_process_are_versions_and_what_makes_its_memory() -> None:
    facts = process_facts({"MALLOC_ARENA_MAX": "2\x1b[2J", "OTHER": "secret"})
    assert (
        facts["python"].endswith(sys.version.split()[0])
        and facts["grpc"]
        and facts["numpy"] == np.__version__
    )
    assert facts["allocator_settings"] == "MALLOC_ARENA_MAX=2?[2J" and "secret" not in str(facts)
    assert allocator({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "glibc 2.36") == "jemalloc"
    assert allocator({}, "") == "" and allocator_settings({}) == ""
    assert process_facts({}, "mmap_threshold=4194304")["allocator_settings"] == "mmap_threshold=4194304"


def test_a_server_tells_its_facts_over_every_transport(url: str) -> None:
    with hg.connect(url) as session:
        facts = session.server_facts()
    assert facts["python"] and facts["numpy"]
    if url != "local:":
        assert facts["event_loop"] in ("uvloop", "asyncio") and facts["zstd"] == "installed"
        assert facts["allocator_settings"] or not facts["allocator"].startswith("glibc")
        assert facts["shared_memory"] == "on" and int(facts["processors"]) > 0


@pytest.mark.parametrize("size_bytes", [1000, 5 * MIB + 1])
@pytest.mark.parametrize("shared", [False, True])
def test_both_sides_copy_each_byte_once(daemon: Any, size_bytes: int, shared: bool) -> None:
    data = np.arange(size_bytes, dtype=np.uint8)
    with hg.connect(daemon.tcp, shared_memory=shared, direct=False) as session:
        assert np.array_equal(session.put(data).get(), data)
        counts = session.statistics().traffic, session.server_traffic()
    for one in counts:
        assert one.written_bytes == one.read_bytes == one.copied_out_bytes == size_bytes
        # The server puts the small last piece of a transfer together before it writes it.
        assert size_bytes <= one.copied_in_bytes <= size_bytes + 64 * 1024


# The command


brief = doctor_measurements.brief


@pytest.fixture
def measured(url: str, brief: None, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What it prints for programs, over each transport."""
    assert main(["doctor", url, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found: dict[str, Any] = json.loads(printed.out)
    return found


def test_every_transport_is_measured_both_ways(url: str, measured: dict[str, Any]) -> None:
    found = measured["measurements"]
    kinds = ["this process"] if url == "local:" else ["shared memory", "gRPC"]
    if url.startswith("grpc:"):
        kinds.insert(1, "direct connections")
    assert [one["kind"] for one in found["transports"]] == [*kinds, "mapped tensor"]
    for one in found["transports"]:
        for way in ("up", "down"):
            assert one[way]["rate"]["bytes_per_second"] > 0 and one[way]["rate"]["transfers"] >= 1
    for trips in (found["empty"], found["run"]):
        assert trips["samples"] >= 2 and 0 < trips["median_seconds"] <= trips["p90_seconds"]
    assert found["in_process"] == (url == "local:") and found["local_address"]
    assert found["shared_memory"] == (url != "local:") == (not found["why_not_shared"])
    assert bool(found["why_no_command_socket"]) == (url == "local:")
    assert found["chunk_bytes"] == MIB and "tickets" in found["features"]
    assert found["devices"][0]["name"] == "cpu0" and found["compression"].startswith(
        "none" if url == "local:" else "on slow links"
    )
    for finding in measured["findings"]:
        assert set(finding) == {"name", "level", "seen", "cost", "advice"}


@pytest.mark.usefixtures("brief")
def test_people_see_tables_and_findings(daemon: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--server", f"{daemon.unix}#cpu0"]) == 0
    printed = capsys.readouterr().out
    assert "does not support" not in printed and "(head)" not in printed
    for words in (
        "round trip",
        "shared memory",
        "gRPC",
        "mapped tensor",
        "event loop",
        "shared memory: on",
        "commands: over a socket of their own",
        "cpu0",
    ):
        assert words in printed
    assert "on this host" in printed and "compression: on slow links" in printed


@pytest.mark.usefixtures("brief")
def test_a_device_of_its_own_has_no_memory_to_map(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "local:#fake", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["measurements"]
    assert found["transports"][0]["up"] and "shared" in found["transports"][1]["why_not"]
    assert found["devices"][0]["name"] == "fake0"


@pytest.mark.usefixtures("brief")
def test_a_daemon_without_shared_memory_is_found_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "server.toml"
    config.write_text('devices = ["cpu:threads=1"]\nshared_memory = false\n')
    with running_daemon("--config", str(config)) as url:
        assert main(["doctor", url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["kind"] for one in found["measurements"]["transports"]] == [
        "direct connections",
        "gRPC",
    ]
    (finding,) = [one for one in found["findings"] if one["name"] == "shared_memory"]
    assert "it is off in the configuration" in finding["seen"]


OLDER = """
import heliograph_proto
newer = ("shared-memory",)
heliograph_proto.FEATURES = tuple(one for one in heliograph_proto.FEATURES if one not in newer)
import heliograph_server.telemetry.process_facts
heliograph_server.telemetry.process_facts.server_facts = lambda *_: {}
from heliograph.cli import main
main(["serve", "--listen", "grpc://127.0.0.1:0", "--device", "cpu:threads=1"])
"""


@contextmanager
def older_daemon() -> Iterator[str]:
    """A daemon that knows no facts and no shared memory."""
    with subprocess.Popen([sys.executable, "-c", OLDER], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("listening on ").strip()
            wait_until_serving(url)
            yield url
        finally:
            process.terminate()


@pytest.mark.usefixtures("brief")
def test_an_older_server_is_measured_and_what_it_does_not_tell_is_said(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with older_daemon() as url:
        with hg.connect(url) as session:
            assert session.server_facts() == {}
        assert main(["doctor", url]) == 0
    printed = capsys.readouterr().out
    assert "it does not report its event loop" in printed
    assert "does not support shared-memory" in printed


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["grpc://127.0.0.1:1"], "no server answers"),
        (["unix:///no/such/socket"], "there is no such file"),
        (["ftp://x"], "unknown scheme"),
        (["local:", "--server", "local:"], "give one of them"),
        (["local:", "--timeout", "-1"], "timeout"),
        (["local:", "--timeout", "nan"], "timeout"),
        (["local:#gpu7"], "gpu7"),
    ],
)
def test_what_cannot_be_measured_is_an_error_with_advice(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("error: ") and words in printed.err and "advice: " in printed.err
    assert printed.out == ""


def test_a_transport_that_a_quota_closed_is_not_blamed_on_the_network() -> None:
    refused = "the quota of tenant 'a' is 10 bytes of device memory: 0 are used, so not 20 more"
    found = only(replace(FAR, transports=(PathMeasurement(TransportKind.GRPC, why_not=refused),)))
    assert "raise the quota" in found.advice and "network" not in found.advice


def test_a_transfer_that_takes_too_long_is_a_finding_and_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    device, steps = FakeDevice(), list[str]()

    def tell(step: str) -> None:
        steps.append(step)
        if step == "this process, up":
            device.script.delay("set", 1.0)

    monkeypatch.setattr("heliograph_backends.registry.open_registry", lambda: Registry.of(device))
    found = measure("local:", 0.3, tell)
    assert steps == ["connecting", "round trips", "this process, up", "mapped tensor", "this machine"]
    assert found.transports[0].up is None and "0.3 s" in found.transports[0].why_not
    assert "broken_transport" in [one.name for one in find(found)]


def test_what_is_measured_is_shown_where_somebody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console = pytest.importorskip("rich.console").Console(file=io.StringIO(), force_terminal=True)
    with doctor.step_progress(console) as tell:
        tell("round trips")
    assert "round trips" in console.file.getvalue()
    with doctor.step_progress() as tell:
        tell("nobody sees this")

"""The output of `heliograph doctor` for people: measurements as tables, and findings as lines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heliograph.cli.common.style import say
from heliograph.cli.common.tables import print_table
from heliograph.cli.common.text import MOST, plain, time_text
from heliograph.cli.doctor.expectations import expected_rate
from heliograph.cli.doctor.findings import Finding, first_change, said
from heliograph.cli.doctor.measurements import (
    Direction,
    MemberSeen,
    PathMeasurement,
    PoolSeen,
    TransportKind,
    TransportMeasurements,
)
from heliograph_proto import PACKING, ZSTD
from heliograph_proto.devices import Link
from heliograph_proto.types import size_text

#: Rows of the table of both sides, by the names of facts.
FACTS = {
    "python": "Python",
    "grpc": "gRPC",
    "protobuf": "protobuf",
    "numpy": "NumPy",
    "numba": "numba",
    "rich": "rich",
    "event_loop": "event loop",
    "processors": "processors",
    "allocator": "allocator",
    "allocator_settings": "its settings",
    "system": "system",
}
#: Facts of one side alone; and facts that are not packages, which may be missing.
OF_SERVER, OF_CLIENT = ("event_loop", "processors"), ("rich",)
NO_PACKAGES = ("python", *OF_SERVER, "allocator", "system")
NOT_TOLD = "not reported"
#: The most links that are shown; those with a problem come first.
MOST_LINKS = 40


def show(found: TransportMeasurements, findings: Sequence[Finding]) -> None:
    """Print the measurements as tables, and the findings."""
    program, connected = plain(found.server.program), time_text(found.connect_seconds)
    print(f"{found.url}: {program}, {_where(found)}; connected in {connected}\n")
    trips = {"empty command": found.empty, "run of one op, 64 bytes": found.run}
    print_table(
        ["round trip", "median", "90th percentile", "samples"],
        [
            [name, time_text(one.median_seconds), time_text(one.p90_seconds), str(one.samples)]
            for name, one in trips.items()
        ],
    )
    print()
    if found.pool is not None:
        _show_pool(found.pool)
    if found.transports:
        header = ["transport", "up", "down", "usual here", "largest", "copies up", "copies down", "note"]
        print_table(header, [_transport(found, one) for one in found.transports])
        if (machine := found.machine) is not None:
            rates = {"memory": machine.copy, "TCP": machine.tcp, "unix socket": machine.unix}
            shown = ", ".join(f"{name} {_rate(rate)}" for name, rate in rates.items())
            print(f"this machine without gRPC: {shown}")
        print("copies: of each byte, by the code of client, server; gRPC and the kernel copy too")
        if any(one.kind is TransportKind.GRPC for one in found.transports):
            print(f"gRPC carries {size_text(found.chunk_bytes)} a message")
        print()
    sides = ["this process"] if found.in_process else ["client", "server"]
    rows = [_fact(found, *one) for one in FACTS.items() if not (found.in_process and one[0] in OF_SERVER)]
    print_table(["", *sides], [row[: len(sides) + 1] for row in rows])
    print()
    header = ["device", "type", "backend", "free", "total", "kernels", "BLAS", "description"]
    print_table(header, list(_devices(found)))
    print("\n".join(["", *_agreed(found), "", *said(findings), ""]))
    say(first_change(findings), "title")


def compression_of(found: TransportMeasurements) -> str:
    """Say whether tensors are compressed on their way."""
    if found.in_process or PACKING not in found.features:
        return "none"
    if ZSTD in found.features:
        return "on slow links, with zstd"
    return "on slow links, of f32 that is exact in bf16 alone: heliograph[compression] on both sides has zstd"


def _where(found: TransportMeasurements) -> str:
    if found.pool is not None and found.pool.in_process:
        return "a pool in this process"
    where = "this process" if found.in_process else "on this host" if found.local_address else "elsewhere"
    return where if found.pool is None else f"{where}, the head of a pool"


def _show_pool(pool: PoolSeen) -> None:
    for header, *rows in (member_rows(pool), link_rows(pool)):
        if rows:
            print_table(header, rows)
            print()
    if more := more_links(pool):
        print(f"{more}\n")


def _rate(bytes_per_second: float) -> str:
    return f"{size_text(bytes_per_second)}/s" if bytes_per_second else "not measured"


def _transport(found: TransportMeasurements, one: PathMeasurement) -> list[str]:
    directions = (one.up, one.down)
    rates = ["-" if way is None else f"{size_text(way.rate.bytes_per_second)}/s" for way in directions]
    sizes = [way.rate.size_bytes for way in directions if way is not None]
    largest = size_text(max(sizes)) if sizes else "-"
    note = "only the caller copies" if one.kind is TransportKind.MAPPED and sizes else plain(one.why_not)
    expected = expected_rate(found, one.kind)
    usual = "-" if expected is None else f"{size_text(expected.least)}/s or more"
    return [one.kind.value, *rates, usual, largest, *map(_copies, directions), note]


def _copies(way: Direction | None) -> str:
    if way is None:
        return "-"
    return ", ".join(map(_times, (way.copies.client, way.copies.server)))


def _times(copies: float | None) -> str:
    if copies is None:
        return NOT_TOLD
    return f"{round(copies, 2):g}" if 0 <= copies < MOST else "unknown"


def _fact(found: TransportMeasurements, name: str, shown: str) -> list[str]:
    client = "-" if name in OF_SERVER else found.client.facts.get(name, _absent(name))
    server = found.server.facts.get(name, _absent(name) if found.server.facts else NOT_TOLD)
    if name in OF_CLIENT:
        server = "-"
    return [shown, plain(client), plain(server)]


def _absent(name: str) -> str:
    if name == "allocator_settings":
        return "the defaults"
    return "unknown" if name in NO_PACKAGES else "not installed"


def _devices(found: TransportMeasurements) -> Iterator[list[str]]:
    for one in found.devices:
        sizes = [size_text(size) for size in (one.free_bytes, one.total_bytes)]
        if not one.total_bytes:
            sizes = [NOT_TOLD, NOT_TOLD]
        kernels = one.features.get("native_kernels") or ("none" if "native_kernels" in one.missing else "-")
        blas = one.features.get("blas", "-")
        cells = (one.name, one.type, one.backend, *sizes, kernels, blas, one.description)
        yield [plain(text) for text in cells]


def _agreed(found: TransportMeasurements) -> Iterator[str]:
    features = ", ".join(map(plain, found.features)) or "no features"
    yield f"contract: version {found.version}; both sides support {features}"
    off = "not needed in this process" if found.in_process else f"off: {plain(found.why_not_shared)}"
    yield f"shared memory: {'on' if found.shared_memory else off}"
    by_grpc = "in this process" if found.in_process else f"by gRPC: {plain(found.why_no_command_socket)}"
    yield f"commands: {by_grpc if found.why_no_command_socket else 'over a socket of their own'}"
    yield f"compression: {compression_of(found)}"


# Pools


def member_rows(pool: PoolSeen) -> list[Sequence[str]]:
    """A header, and a row for each member."""
    header = ["member", "state", "address", "runs", "devices", "weights from here"]
    return [header, *map(_member, pool.members)]


def _member(one: MemberSeen) -> Sequence[str]:
    devices = ", ".join(name.removeprefix(f"{one.name}/") for name in one.devices)
    cells = one.name, one.state, one.address, one.server or "-", devices or "-", _from_here(one)
    return [plain(cell) for cell in cells]


def _from_here(one: MemberSeen) -> str:
    if one.reached is None:
        return "-" if one.state != "ready" else "direct"
    if one.reached:
        return f"direct, {time_text(one.round_trip_seconds)}"
    return f"through the head: {one.why_not_reached}"


def link_rows(pool: PoolSeen) -> list[Sequence[str]]:
    """A header, and a row for each pair of linked daemons."""
    pairs = _pairs(pool)
    chosen = sorted(pairs, key=_is_well)[:MOST_LINKS]
    header = ["link between", "and", "round trip", "bandwidth", "values"]
    return [header, *(_link(*pair) for pair in pairs if pair in chosen)]


def more_links(pool: PoolSeen) -> str:
    """A note on the links that are not shown; empty if all are."""
    left = len(_pairs(pool)) - MOST_LINKS
    return f"and {left} more; --json has all" if left > 0 else ""


def _pairs(pool: PoolSeen) -> list[tuple[Link, Link | None]]:
    """Each link with the one back. The head's links have none, as the head both fetches and
    sends."""
    back = {(one.b, one.a): one for one in pool.links}
    found: dict[frozenset[str], tuple[Link, Link | None]] = {}
    for one in pool.links:
        found.setdefault(frozenset((one.a, one.b)), (one, back.get((one.a, one.b))))
    return list(found.values())


def _is_well(pair: tuple[Link, Link | None]) -> bool:
    return all(one is None or one.reachable is True for one in pair)


def _link(one: Link, back: Link | None) -> Sequence[str]:
    trip, speed = time_text(one.round_trip_seconds), f"{size_text(one.bytes_per_second)}/s"
    cells = [
        one.a or "(head)",
        one.b,
        trip if one.round_trip_measured else f"{trip} (assumed)",
        speed if one.bandwidth_measured else f"{speed} (assumed)",
        _values(one, back),
    ]
    return [plain(cell) for cell in cells]


def _values(one: Link, back: Link | None) -> str:
    links = (one,) if back is None else (one, back)
    cut = [link for link in links if link.reachable is False]
    if not cut:
        return "direct" if all(link.reachable for link in links) else "not probed yet"
    if len(cut) == len(links):
        return "relayed by the head"
    return f"direct to {cut[0].b}, relayed by the head to {cut[0].a}"

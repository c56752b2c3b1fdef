"""`heliograph devices`: list the devices of a daemon, and the backends that could not start."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import heliograph as hg
from heliograph.cli.common.arguments import add_json_argument, add_server_argument
from heliograph.cli.common.tables import print_table
from heliograph_proto.devices import Memory
from heliograph_proto.errors import DeviceLostError, MemberLostError
from heliograph_proto.types import size_text

#: The timeout of each call.
SECONDS = 10.0
#: The largest buffer of a device without a limit.
NO_LIMIT = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --json."""
    add_server_argument(parser)
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the devices of a server; with -v, also their buffer types and features, and all
    backends."""
    with hg.connect(arguments.server) as session:
        devices = list(_described(session))
        backends = [asdict(one) for one in session.backends(timeout=SECONDS)]
        members = [
            asdict(one) | {"state": one.state.name.lower()} for one in session.members(timeout=SECONDS)
        ]
        server = session.info.server
    if arguments.json:
        found = {"server": server, "devices": devices, "backends": backends, "members": members}
        print(json.dumps(found, indent=2))
        return 0
    tables = [pool_table(devices, members) if members else device_table(devices)]
    if arguments.verbose:
        tables += [member_table(members), buffer_type_table(devices), feature_table(devices)]
    tables += [backend_table(backends, everything=bool(arguments.verbose))]
    print_tables([table for table in tables if len(table) > 1])
    return 0


def _described(session: hg.Session) -> Iterator[dict[str, Any]]:
    """The devices, without those of members that are lost, whose member has the reason."""
    for device in session.devices:
        with suppress(MemberLostError):
            if not (device.lost and device.backend == "remote"):
                yield describe(device)


def print_tables(tables: Sequence[Sequence[Sequence[str]]]) -> None:
    """Print tables, each with its header first, separated by empty lines."""
    for number, (header, *rows) in enumerate(tables):
        if number:
            print()
        print_table(header, rows)


# As JSON


def describe(device: hg.Device) -> dict[str, Any]:
    """The JSON of a device; memory in bytes."""
    memory = _memory(device)
    can = device.capabilities
    return {
        "name": device.name,
        "type": device.type.name.lower(),
        "backend": device.backend,
        "description": device.description,
        "id": device.id,
        "memory": {"free_bytes": memory.free_bytes, "total_bytes": memory.total_bytes},
        "capabilities": {
            "async": can.async_,
            "host_buffer": can.host_buffer,
            "buffer_from_host": can.buffer_from_host,
            "events": can.events,
        },
        "buffer_types": [asdict(one) | {"role": one.role.name.lower()} for one in device.buffer_types],
        "features": dict(sorted(device.features.items())),
        "missing": dict(sorted(device.missing.items())),
        "lost": device.lost,
    }


def _memory(device: hg.Device) -> Memory:
    """The memory of a device; none of a lost one, or one that gets lost meanwhile."""
    try:
        return Memory() if device.lost else device.memory(timeout=SECONDS)
    except MemberLostError:
        raise
    except DeviceLostError:
        return Memory()


# For people


def device_table(devices: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    """A header, and a row for each device."""
    header = ["name", "type", "backend", "free", "total", "threads/id", "description"]
    return [header, *map(_device_row, devices)]


def _device_row(one: dict[str, Any]) -> Sequence[str]:
    memory = one["memory"]
    sizes = [size_text(memory[name]) for name in ("free_bytes", "total_bytes")]
    if not memory["total_bytes"]:
        sizes = ["unknown", "unknown"]
    if one["lost"]:
        return [one["name"], one["type"], one["backend"], "-", "-", "-", f"lost: {one['lost']}"]
    threads_or_id = one["id"] or one["features"].get("threads", "-")
    return [one["name"], one["type"], one["backend"], *sizes, threads_or_id, one["description"]]


def pool_table(devices: Sequence[dict[str, Any]], members: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    """A header, and a row for each device of a pool's head and members, and for each member without
    any."""
    header = ["member", "state", *device_table(())[0]]
    return [[*header[:-1], "description, or why it is missing"], *_pool_rows(devices, members)]


def _pool_rows(
    devices: Sequence[dict[str, Any]], members: Sequence[dict[str, Any]]
) -> Iterator[Sequence[str]]:
    """The head's rows first. Name and state of a member are in its first row only."""
    remote = {name for member in members for name in member["devices"]}
    groups = [("(head)", "-", [one for one in devices if one["name"] not in remote], "")]
    for member in members:
        found = [one for one in devices if one["name"] in member["devices"]]
        groups.append((member["name"], member["state"], found, member["why"] or "it has no device"))
    for name, state, found, why in groups:
        rows = [_device_row(_as_on_member(one)) for one in found]
        if not rows and name != "(head)":
            rows = [[*(["-"] * 6), why]]
        for number, row in enumerate(rows):
            yield [*(("", "") if number else (name, state)), *row]


def _as_on_member(one: dict[str, Any]) -> dict[str, Any]:
    """A member's device with its backend there, and without the address that its description ends
    with."""
    features = one["features"]
    backend = features.get("member backend", one["backend"])
    where = f", at {features.get('member', '')}"
    return one | {"backend": backend, "description": one["description"].removesuffix(where)}


def member_table(members: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    """A header, and a row for each member of the server's pool."""
    header = ["member", "address", "state", "runs", "to do"]
    names = ("name", "address", "state", "server", "advice")
    return [header, *([one[name] or "-" for name in names] for one in members)]


def buffer_type_table(devices: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    """A header, and a row for each buffer type of each device."""
    header = ["device", "buffer type", "role", "alignment", "largest", "host memory", "read in place by"]
    return [header, *(_buffer_type_row(one, kind) for one in devices for kind in one["buffer_types"])]


def _buffer_type_row(one: dict[str, Any], kind: dict[str, Any]) -> Sequence[str]:
    largest = kind["max_size_bytes"]
    return [
        one["name"],
        kind["name"],
        kind["role"],
        str(kind["alignment_bytes"]),
        "no limit" if largest >= NO_LIMIT else size_text(largest),
        "yes" if kind["is_host"] else "no",
        ", ".join(kind["readable_by"]) or "none",
    ]


def feature_table(devices: Sequence[dict[str, Any]]) -> list[Sequence[str]]:
    """A header, and a row for each feature of each device, and for each missing one."""
    return [["device", "feature", "value"], *(row for one in devices for row in _feature_rows(one))]


def _feature_rows(one: dict[str, Any]) -> Iterator[Sequence[str]]:
    yield from ([one["name"], name, value] for name, value in one["features"].items())
    yield from ([one["name"], name, f"missing: {why}"] for name, why in one["missing"].items())


def backend_table(backends: Sequence[dict[str, Any]], *, everything: bool) -> list[Sequence[str]]:
    """A header, and a row for each backend that could not start, or for all of them."""
    shown = [one for one in backends if everything or one["why"]]
    return [["backend", "from", "state"], *([one["name"], one["origin"], _state(one)] for one in shown)]


def _state(one: dict[str, Any]) -> str:
    if one["why"]:
        return f"not available: {one['why']}"
    return ", ".join(one["devices"]) or "no device was asked for"

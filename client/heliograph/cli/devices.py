"""`heliograph devices`: what a daemon computes on."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import heliograph as hg
from heliograph.cli import add_server_argument
from heliograph.cli.tables import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--server, --json."""
    add_server_argument(parser)
    parser.add_argument("--json", action="store_true", help="one JSON array, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Prints the devices of a server."""
    with hg.connect(arguments.server) as session:
        found = [describe(device) for device in session.devices]
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    print_table(["name", "type", "backend", "free", "total", "description"], [_row(one) for one in found])
    return 0


def describe(device: hg.Device) -> dict[str, Any]:
    """A device as JSON has it; memory in bytes."""
    memory = device.memory(timeout=10.0)
    can = device.capabilities
    return {
        "name": device.name,
        "type": device.type.name.lower(),
        "backend": device.backend,
        "description": device.description,
        "memory": {"free_bytes": memory.free_bytes, "total_bytes": memory.total_bytes},
        "capabilities": {
            "async": can.async_,
            "host_buffer": can.host_buffer,
            "buffer_from_host": can.buffer_from_host,
            "events": can.events,
        },
    }


def _row(one: dict[str, Any]) -> Sequence[str]:
    memory = (f"{one['memory'][name] / 2**30:.1f} GiB" for name in ("free_bytes", "total_bytes"))
    return [one["name"], one["type"], one["backend"], *memory, one["description"]]

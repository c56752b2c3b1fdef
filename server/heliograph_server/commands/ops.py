"""`heliograph ops`: the op table; with --device what a device makes of it."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from typing import Any

from heliograph.ops import describe_attribute
from heliograph_proto.ops.table import OPS, Op, op
from heliograph_proto.types import DType

#: Longer lines are hard to read, however wide the terminal is.
WIDEST = 100
INDENT = "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--device, --json, the ops."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these ops (default: all)")
    parser.add_argument(
        "--device",
        metavar="URL#DEVICE",
        help="what this device makes of each op and its data types: whether it supports them, whether what "
        "it computes is right, and by which path; as for `heliograph conformance`",
    )
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        dest="backends",
        metavar="PLUGIN",
        help="a module, a FILE.py or a DIRECTORY/ of such that has the device, whose code is run",
    )
    parser.add_argument(
        "--quick", action="store_true", help="with --device: only the first case of each kind"
    )
    parser.add_argument("--ask", action="store_true", help="with --device: only ask, compute nothing")
    parser.add_argument("--json", action="store_true", help="one JSON array, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Prints the ops; with --device 1 if a case fails. Raises UnknownOpError, and what the device does."""
    found = [op(name) for name in arguments.names] or list(OPS.values())
    if arguments.device:
        from heliograph_server.commands import op_support

        return op_support.run(arguments, [row.name for row in found])
    if arguments.json:
        print(json.dumps([as_json(row) for row in found], indent=2))
        return 0
    width = min(WIDEST, shutil.get_terminal_size().columns)
    print("\n".join(line for row in found for line in described(row, width)))
    return 0


def described(row: Op, width: int) -> list[str]:
    """An op's call and group, and under them what it gives, in lines of at most `width` characters."""
    words = ", ".join([*row.operands, *map(describe_attribute, row.attributes)])
    call = textwrap.wrap(f"{row.name}({words})  [{row.group}]", width, subsequent_indent=2 * INDENT)
    doc = textwrap.wrap(row.doc, width, initial_indent=INDENT, subsequent_indent=INDENT)
    return [*call, *doc]


def as_json(row: Op) -> dict[str, Any]:
    """A row of the table."""
    return {
        "name": row.name,
        "group": row.group,
        "operands": row.operands,
        "attributes": [
            {"name": one.name, "kind": one.kind, "default": _plain(one.default)} for one in row.attributes
        ],
        "is_view": row.is_view,
        "in_place": row.in_place,
        "tolerance": row.tolerance,
        "doc": row.doc,
    }


def _plain(value: Any) -> Any:
    return value.name if isinstance(value, DType) else value

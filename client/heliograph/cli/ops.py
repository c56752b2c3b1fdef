"""`heliograph ops`: the op table."""

from __future__ import annotations

import argparse
import json
from typing import Any

from heliograph.cli.tables import print_table
from heliograph.raw_ops import describe_attribute
from heliograph_proto.ops import OPS, Op, op
from heliograph_proto.types import DType


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--json, the ops."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="only these ops (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON array, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Prints the ops. Raises UnknownOpError."""
    found = [op(name) for name in arguments.names] or list(OPS.values())
    if arguments.json:
        print(json.dumps([as_json(row) for row in found], indent=2))
        return 0
    rows = [
        [
            row.name,
            row.group,
            ", ".join(row.operands),
            ", ".join(map(describe_attribute, row.attributes)),
            row.doc,
        ]
        for row in found
    ]
    print_table(["op", "group", "operands", "attributes", "result"], rows)
    return 0


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

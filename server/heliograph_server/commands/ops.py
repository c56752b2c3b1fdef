"""`heliograph ops`: print the op table; with --device, the support of a device for it."""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from typing import Any

from heliograph.cli.common.arguments import add_json_argument
from heliograph.op_functions import describe_attribute
from heliograph_proto.ops.table import OPS, Op, op
from heliograph_proto.types import DType
from heliograph_server.commands.conformance import add_backend_argument

#: The longest line, however wide the terminal is.
WIDEST = 100
INDENT = "    "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add NAME ..., --device, --backend, --quick, --ask, --json."""
    parser.add_argument("names", metavar="NAME", nargs="*", help="print only these ops (default: all)")
    parser.add_argument(
        "--device",
        metavar="URL#DEVICE",
        help="print the device's support, results and op path for each op and its data types; the form is "
        "that of `heliograph conformance`",
    )
    add_backend_argument(parser)
    parser.add_argument(
        "--quick", action="store_true", help="with --device: run only the first case of each kind"
    )
    parser.add_argument("--ask", action="store_true", help="with --device: query support, compute nothing")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the ops. With --device, returns 1 if a case fails.

    Raises UnknownOpError, the errors of the device.
    """
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
    """The call, the group and the documentation of an op, in lines of at most `width`
    characters."""
    words = ", ".join([*row.operands, *map(describe_attribute, row.attributes)])
    call = textwrap.wrap(f"{row.name}({words})  [{row.group}]", width, subsequent_indent=2 * INDENT)
    doc = textwrap.wrap(row.doc, width, initial_indent=INDENT, subsequent_indent=INDENT)
    return [*call, *doc]


def as_json(row: Op) -> dict[str, Any]:
    """A row of the table for programs."""
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

"""`heliograph backends`: list, unload and load the backends of a running daemon."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from heliograph import admin
from heliograph.admin import BackendUse
from heliograph.cli.common.arguments import add_json_argument, add_server_argument
from heliograph.cli.common.tables import print_table
from heliograph.cli.common.text import plain


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions ls, unload and load."""
    parser.epilog = (
        "A backend that sessions use is not unloaded; the error names them. Native libraries of a backend "
        "stay in the process until it ends. Backends of Heliograph, of installed packages and of the setting "
        "`backends` can be loaded."
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listing = actions.add_parser("ls", help="list the backends (default)")
    unloading = actions.add_parser("unload", help="close the devices of a backend, and remove its code")
    unloading.add_argument("name", metavar="NAME", help="the backend")
    loading = actions.add_parser("load", help="load a backend, and start its devices")
    loading.add_argument("name", metavar="NAME|SOURCE", help="the backend, or its source in `backends`")
    loading.add_argument(
        "--device",
        action="append",
        default=[],
        metavar="NAME[:KEY=VALUE,...]",
        help="a device to start (default: one without parameters); may be repeated",
    )
    for one in (parser, listing):
        add_json_argument(one)
    for one in (parser, listing, unloading, loading):
        add_server_argument(one)


def run(arguments: argparse.Namespace) -> int:
    """List, unload or load. Raises ConfigurationError, and errors of calls."""
    with admin.connect(arguments.server) as daemon:
        if arguments.action == "unload":
            found = daemon.unload_backend(arguments.name)
            print(f"backend {plain(found.name)} is unloaded, with {_names(found.devices)}")
            return 0
        if arguments.action == "load":
            found = daemon.load_backend(arguments.name, arguments.device)
            print(f"backend {plain(found.name)} is loaded, with {_names(found.devices)}")
            return 0
        backends = daemon.backends()
    if arguments.json:
        shown = [asdict(one.backend) | {"sessions": one.sessions} for one in backends]
        print(json.dumps({"backends": shown}, indent=2))
        return 0
    header = ["backend", "version", "contract", "from", "devices", "sessions", "why it has none"]
    print_table(header, [_row(one) for one in backends])
    return 0


def _row(one: BackendUse) -> Sequence[str]:
    found = one.backend
    contract = str(found.contract_version or "-")
    version, origin, why = plain(found.version) or "-", plain(found.origin), plain(found.why)
    return [plain(found.name), version, contract, origin, _names(found.devices), str(one.sessions), why]


def _names(devices: Sequence[str]) -> str:
    return ", ".join(map(plain, devices)) or "no devices"

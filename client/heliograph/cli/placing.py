"""What `heliograph explain`, `run` and `trace` share: on which devices a graph is to run, and how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import heliograph as hg


def add_placing_arguments(parser: argparse.ArgumentParser) -> None:
    """--device, --pin, --memory, --pipeline."""
    for name, metavar, help in (
        ("device", "NAME", "a device to use; again for more, by priority (default: the server's first)"),
        ("pin", "PATTERN=DEVICE", "nodes whose names match, as in fnmatch, run there; may be given again"),
        ("memory", "DEVICE=SIZE", "the most that it may take there, such as 512MiB; may be given again"),
    ):
        parser.add_argument(f"--{name}", metavar=metavar, action="append", default=[], help=help)
    parser.add_argument(
        "--pipeline", metavar="N", type=int, default=1, help="runs that may be under way at once (default: 1)"
    )


def placing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of `session.compile`. Raises InvalidArgumentError."""
    return {
        "devices": arguments.device or None,
        "pins": pairs("pin", arguments.pin),
        "memory": pairs("memory", arguments.memory),
        "pipeline": arguments.pipeline,
    }


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """What is behind the last "=" by what is before it. Raises InvalidArgumentError."""
    found: dict[str, str] = {}
    for one in given:
        key, _, value = one.rpartition("=")
        if not key or not value:
            form = "PATTERN=DEVICE" if option == "pin" else "DEVICE=SIZE"
            raise hg.InvalidArgumentError(f"--{option} {one!r:.80}", advice=f"write --{option} {form}")
        if key in found:
            raise hg.InvalidArgumentError(f"--{option} has {key!r:.80} twice", advice="give it once")
        found[key] = value
    return found

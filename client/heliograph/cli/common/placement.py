"""What `heliograph explain`, `run` and `trace` share: on which devices a graph is to run, and how."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import heliograph as hg

_SPLIT = "PATTERN=DEVICE:PART,..."
_FORMS = {"pin": "PATTERN=DEVICE", "memory": "DEVICE=SIZE", "split": _SPLIT, "buffer-type": "DEVICE=NAME"}


def add_placing_arguments(parser: argparse.ArgumentParser) -> None:
    """--device, --pin, --memory, --split, --buffer-type, --pipeline."""
    for name, metavar, help in (
        ("device", "NAME", "a device to use; again for more, by priority (default: the server's first)"),
        ("pin", "PATTERN=DEVICE", "nodes whose names match, as in fnmatch, run there; may be given again"),
        ("memory", "DEVICE=SIZE", "the most that it may take there, such as 512MiB; may be given again"),
        ("split", _SPLIT, "rows of weights whose names match lie over devices, joined on the first"),
        ("buffer-type", "DEVICE=NAME", "the buffer type in which it has weights; may be given again"),
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
        "split": {name: split_type(found) for name, found in pairs("split", arguments.split).items()},
        "buffer_types": pairs("buffer-type", arguments.buffer_type),
        "pipeline": arguments.pipeline,
    }


def pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """What is behind the last "=" by what is before it. Raises InvalidArgumentError."""
    found: dict[str, str] = {}
    for one in given:
        key, _, value = one.rpartition("=")
        if not key or not value:
            raise hg.InvalidArgumentError(
                f"--{option} {one!r:.80}", advice=f"write --{option} {_FORMS[option]}"
            )
        if key in found:
            raise hg.InvalidArgumentError(f"--{option} has {key!r:.80} twice", advice="give it once")
        found[key] = value
    return found


def split_type(given: str) -> hg.SplitBufferType:
    """Devices and their parts of rows, such as "cpu0:0.6,cpu1:0.4". Raises InvalidArgumentError."""
    fractions: dict[str, float] = {}
    for one in given.split(","):
        device, _, part = one.rpartition(":")
        if device in fractions:
            raise hg.InvalidArgumentError(f"--split names {device!r:.80} twice", advice="give each one part")
        try:
            fractions[device] = float(part)
        except ValueError:
            raise hg.InvalidArgumentError(f"--split {one!r:.80}", advice=f"write --split {_SPLIT}") from None
    return hg.SplitBufferType(next(iter(fractions)), fractions)

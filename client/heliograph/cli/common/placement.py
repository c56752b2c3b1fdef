"""The server and the placement of `heliograph explain`, `run` and `trace`, and of language models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, cast

import heliograph as hg
from heliograph.cli.common.arguments import add_server_argument

#: In place of names: every device.
EVERY_DEVICE = "all"
_OPTIONS = {
    "device": ("NAME", "device to use, by priority; repeatable (default: the server's first)"),
    "pin": ("PATTERN=DEVICE", "run nodes with matching names (as in fnmatch) there; repeatable"),
    "memory": ("DEVICE=SIZE", "limit the memory used there, such as 512MiB; repeatable"),
    "split": ("PATTERN=DEVICE:PART,...", "split rows of matching weights over devices, joined on the first"),
    "buffer-type": ("DEVICE=NAME", "buffer type for weights there; repeatable"),
}


def add_placing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --device, --pin, --memory, --split, --buffer-type, --pipeline."""
    add_server_argument(parser)
    for name in _OPTIONS:
        _add(parser, name)
    parser.add_argument(
        "--pipeline", metavar="N", type=int, default=1, help="maximum number of runs in flight (default: 1)"
    )


def _add(parser: argparse._ActionsContainer, name: str) -> None:
    metavar, help = _OPTIONS[name]
    parser.add_argument(f"--{name}", metavar=metavar, action="append", default=[], help=help)


def add_model_placing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --devices, --pin, --memory, --split, --buffer-type."""
    group = parser.add_argument_group("placement")
    group.add_argument(
        "--devices",
        "--device",
        metavar="NAME,...",
        action="append",
        default=[],
        help=f"devices to spread the layers over, by priority and memory; {EVERY_DEVICE}: each of the server "
        "or pool; repeatable (default: the server's first)",
    )
    for name in _OPTIONS:
        if name != "device":
            _add(group, name)


def placing(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `session.compile`. Raises InvalidArgumentError."""
    return {"devices": arguments.device or None, **_how(arguments), "pipeline": arguments.pipeline}


def model_placing(arguments: argparse.Namespace, session: hg.Session | hg.aio.Session) -> hg.CompileOptions:
    """Return those of the plans of a language model that were given. Raises
    InvalidArgumentError."""
    named = [name for given in arguments.devices for name in given.split(",")]
    if not all(named):
        raise hg.InvalidArgumentError(
            f"--devices {','.join(named)!r:.80} has an empty name", advice="write --devices NAME,NAME"
        )
    if EVERY_DEVICE in named:
        named = [one.name for one in session.devices if not one.lost]
    given = {"devices": named or None, **_how(arguments)}
    return cast(hg.CompileOptions, {name: value for name, value in given.items() if value})


def _how(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "pins": _pairs("pin", arguments.pin),
        "memory": _pairs("memory", arguments.memory),
        "split": {name: _split(found) for name, found in _pairs("split", arguments.split).items()},
        "buffer_types": _pairs("buffer-type", arguments.buffer_type),
    }


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Map the text before the last "=" to the text after it. Raises InvalidArgumentError."""
    found: dict[str, str] = {}
    for one in given:
        key, _, value = one.rpartition("=")
        if not key or not value:
            raise hg.InvalidArgumentError(
                f"--{option} {one!r:.80}", advice=f"write --{option} {_OPTIONS[option][0]}"
            )
        if key in found:
            raise hg.InvalidArgumentError(f"--{option} has {key!r:.80} twice", advice="give it once")
        found[key] = value
    return found


def _split(given: str) -> hg.SplitBufferType:
    """Parse devices and their parts of rows, as in "cpu0:0.6,cpu1:0.4". Raises
    InvalidArgumentError."""
    fractions: dict[str, float] = {}
    for one in given.split(","):
        device, _, part = one.rpartition(":")
        if device in fractions:
            raise hg.InvalidArgumentError(f"--split names {device!r:.80} twice", advice="give each one part")
        try:
            fractions[device] = float(part)
        except ValueError:
            raise hg.InvalidArgumentError(
                f"--split {one!r:.80}", advice=f"write --split {_OPTIONS['split'][0]}"
            ) from None
    return hg.SplitBufferType(next(iter(fractions)), fractions)

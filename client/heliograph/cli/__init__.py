"""The command line: `heliograph serve`, `devices`, `run`, `explain`, `compare`, `embed`, ...

Each subcommand is a module of this package with `add_arguments` and `run`, loaded when it is chosen; one
that needs an extra says which. Errors are one line and advice on stderr and exit status 1, Ctrl-C is
130, a closed pipe is quiet.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from heliograph_proto import __version__
from heliograph_proto.errors import ConfigurationError, HeliographError

#: Subcommands, in the order of the help.
COMMANDS = {
    "serve": "run a daemon that owns this host's devices",
    "pool": "daemons on the nodes of a cluster: up, status, down",
    "devices": "list the devices of a daemon",
    "health": "ask a daemon whether it lives and takes sessions (exit status 0, 1; 2: no answer)",
    "doctor": "measure the road to a daemon, and say what to change",
    "run": "run a graph from a file",
    "explain": "show where the nodes of a graph would run, and why",
    "trace": "write a run of a graph as a trace, for Perfetto or Chrome",
    "compare": "compare what two devices compute of a graph",
    "embed": "embed texts with a sentence-transformers model",
    "top": "show what a daemon does: devices, sessions, tenants, members",
    "sessions": "list the sessions of a daemon, or end one",
    "drain": "have a daemon end its work, and then stop",
    "log-level": "set from which level on a daemon logs",
    "token": "make, list and take back the tokens that a daemon asks for",
    "cache": "list, remove or check the weights that daemons keep on disk",
    "ops": "print the op table",
    "conformance": "check what a device computes against the op table",
    "warmup": "compile the CPU kernels before a daemon needs them",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the process's exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parsed, module = parse(given)
    except HeliographError as error:
        return complain(error, verbose=0)
    _log(parsed.verbose)
    try:
        status: int = module.run(parsed)
        sys.stdout.flush()
        return status
    except HeliographError as error:
        return complain(error, parsed.verbose)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads any more; what Python still holds for stdout must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(given: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    """The arguments, and the module of the subcommand. Loads no other subcommand."""
    parser = argparse.ArgumentParser(
        prog="heliograph", description="Compute graphs on other machines' devices."
    )
    parser.add_argument("--version", action="version", version=f"heliograph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    chosen = next((word for word in given if word in COMMANDS), None)
    if chosen is None:
        _require_command(given, parser)
    module: Any = None
    its_parser = parser
    for name, description in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=description,
            description=f"{description[0].upper()}{description[1:]}.",
            # What is nearly an option of the daemon is a mistake.
            allow_abbrev=name != "serve",
        )
        command.add_argument("-v", "--verbose", action="count", default=0, help="say more; twice: tracebacks")
        if name == chosen:
            module, its_parser = load(name), command
            module.add_arguments(command)
    parsed, unknown = parser.parse_known_args(given)
    if unknown and hasattr(module, "unknown"):
        raise module.unknown(unknown[0])
    if unknown:
        its_parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed, module


def _require_command(given: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Ends the process, with the commands or the one that was meant, where none is named but for --help."""
    word = next((one for one in given if not one.startswith("-")), None)
    if word is not None:
        near = get_close_matches(word, COMMANDS, 1)
        advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(COMMANDS)}"
        parser.error(f"there is no command {word!r}; {advice}")
    if not given:
        listed = "".join(f"  {name:12} {description}\n" for name, description in COMMANDS.items())
        parser.error(f"a command is needed:\n{listed}each has --help; `heliograph serve` starts a daemon")


def load(name: str) -> Any:
    """The module of a subcommand. Raises ConfigurationError when an extra is missing."""
    try:
        return importlib.import_module(f"heliograph.cli.{name.replace('-', '_')}")
    except ModuleNotFoundError as error:
        raise missing_extra(
            error, "server" if name in ("serve", "cache", "pool", "token") else "models"
        ) from None


def missing_extra(error: ModuleNotFoundError, extra: str) -> ConfigurationError:
    """What to install."""
    return ConfigurationError(
        f"the package {error.name!r} is not installed", advice=f"pip install 'heliograph[{extra}]'"
    )


def complain(error: HeliographError, verbose: int) -> int:
    """Prints an error for people; the exit status."""
    if verbose > 1:
        logging.getLogger("heliograph").error("the traceback", exc_info=error)
    print(f"error: {error}", file=sys.stderr)
    return 1


def add_server_argument(parser: argparse.ArgumentParser) -> None:
    """--server URL."""
    parser.add_argument(
        "--server",
        metavar="URL",
        help="local:, unix:///path, grpc[s]://host:port[?token=TOKEN] (default: $HELIOGRAPH_SERVER, else grpc://127.0.0.1:7070)",
    )


def _log(verbose: int) -> None:
    if verbose:
        level = logging.DEBUG if verbose > 1 else logging.INFO
        logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)-7s %(name)s: %(message)s")

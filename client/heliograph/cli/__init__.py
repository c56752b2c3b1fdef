"""The command line: `heliograph serve`, `devices`, `run`, `explain`, `compare`, `embed`, ...

Each command is a module with `add_arguments` and `run`, loaded when it is chosen: one of this package, or
one that an entry point of the group `heliograph.commands` names, as the server's are. Errors are one line
and advice on stderr and exit status 1, Ctrl-C is 130, a closed pipe is quiet.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from heliograph_proto import __version__
from heliograph_proto.errors import ConfigurationError, HeliographError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Our commands by what they are for, in the order of the help.
GROUPS = {
    "use devices": {
        "run": "run a graph from a file",
        "explain": "show where the nodes of a graph would run, and why",
        "trace": "write a run of a graph as a trace, for Perfetto or Chrome",
        "compare": "compare what two devices compute of a graph",
        "embed": "embed texts with a sentence-transformers model",
    },
    "look at a daemon": {
        "devices": "list the devices of a daemon",
        "health": "ask a daemon whether it lives and takes sessions (exit status 0, 1; 2: no answer)",
        "doctor": "measure the transport to a daemon, and say what to change",
        "ops": "print the op table",
        "conformance": "check what a device computes against the op table",
    },
    "operate daemons": {
        "serve": "run a daemon that owns this host's devices",
        "pool": "daemons on the nodes of a cluster: up, status, down",
        "top": "show what a daemon does: devices, sessions, tenants, members",
        "sessions": "list the sessions of a daemon, or end one",
        "drain": "have a daemon end its work, and then stop",
        "log-level": "set from which level on a daemon logs",
        "token": "make, list and take back the tokens that a daemon asks for",
        "cache": "list, remove or check the weights that daemons keep on disk",
        "warmup": "compile the CPU kernels before a daemon needs them",
    },
}
COMMANDS = {name: help for group in GROUPS.values() for name, help in group.items()}


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
    except ModuleNotFoundError as error:
        return complain(missing_extra(error, parsed.command), parsed.verbose)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads any more; what Python still holds for stdout must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(given: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    """The arguments, and the module of the command. Loads no other command."""
    name = next((word for word in given if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="heliograph",
        description="Compute graphs on other machines' devices.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=None if name else _listed(),
    )
    parser.add_argument("--version", action="version", version=f"heliograph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if not given:
        parser.error(f"a command is needed:\n{_listed()}each has --help; `heliograph serve` starts a daemon")
    if name is None:
        parser.parse_args(given)
        raise AssertionError
    module, help = _module(name, parser)
    command = commands.add_parser(
        name,
        description=f"{help[0].upper()}{help[1:]}.",
        # What is nearly an option of the daemon is a mistake.
        allow_abbrev=name != "serve",
    )
    command.add_argument("-v", "--verbose", action="count", default=0, help="say more; twice: tracebacks")
    module.add_arguments(command)
    parsed, unknown = parser.parse_known_args(given)
    if unknown and hasattr(module, "unknown"):
        raise module.unknown(unknown[0])
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed, module


def _module(name: str, parser: argparse.ArgumentParser) -> tuple[Any, str]:
    """The module of a command, and what it is for; ends the process if there is no such command."""
    if name in COMMANDS:
        return load(name), COMMANDS[name]
    found = {one.name: one for one in _plugins()}
    if name in found:
        return found[name].load(), _origin(found[name])
    known = (*COMMANDS, *found)
    near = get_close_matches(name, known, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    parser.error(f"there is no command {name!r}; {advice}")


def load(name: str) -> Any:
    """The module of one of our commands. Raises ConfigurationError when an extra is missing."""
    own = f"heliograph.cli.{name.replace('-', '_')}"
    try:
        if find_spec(own):
            return import_module(own)
        for one in _entry_points():
            if one.name == name:
                return one.load()
        raise ModuleNotFoundError(name="heliograph_server")
    except ModuleNotFoundError as error:
        raise missing_extra(error, name) from None


def _entry_points() -> Sequence[EntryPoint]:
    # Looking through what is installed takes a while, and most commands are here.
    from importlib.metadata import entry_points

    return tuple(entry_points(group="heliograph.commands"))


def _plugins() -> Iterator[EntryPoint]:
    """Commands of others."""
    return (one for one in _entry_points() if one.name not in COMMANDS)


def _origin(plugin: EntryPoint) -> str:
    return f"a command of {plugin.dist.name}" if plugin.dist else f"a command of {plugin.module}"


def _listed() -> str:
    """All commands in groups, a line each."""
    groups = {**GROUPS, "of other packages": {one.name: _origin(one) for one in _plugins()}}
    return "\n".join(
        f"{title}:\n" + "".join(f"  {name:12} {help}\n" for name, help in group.items())
        for title, group in groups.items()
        if group
    )


def missing_extra(error: ModuleNotFoundError, command: str) -> ConfigurationError:
    """What to install for a command."""
    extra = "models" if command == "embed" else "server"
    return ConfigurationError(
        f"the package {error.name!r} is not installed", advice=f"pip install 'heliograph[{extra}]'"
    )


def complain(error: HeliographError, verbose: int) -> int:
    """Prints an error for people; the exit status."""
    if verbose > 1:
        logging.getLogger("heliograph").error("the traceback", exc_info=error)
    print(f"error: {error}", file=sys.stderr)
    return 1


def _log(verbose: int) -> None:
    if verbose:
        level = logging.DEBUG if verbose > 1 else logging.INFO
        logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)-7s %(name)s: %(message)s")

"""The command line: `heliograph serve`, `devices`, `run`, `explain`, `compare`, `embed`, ...

Each command is a module with `add_arguments` and `run`, loaded on demand: a module of this package,
or one named by an entry point of the group `heliograph.commands`, as the server's are. An error
prints one line and advice to stderr and exits with status 1; Ctrl-C exits with 130; a closed pipe
prints nothing.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from heliograph.cli.completion import answer, is_asked
from heliograph_proto import __version__

# The help needs no errors, which load NumPy and protobuf.
if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from heliograph_proto.errors import ConfigurationError

#: The built-in commands in groups, in the order of the help.
GROUPS = {
    "use devices": {
        "run": "run a graph from a file",
        "explain": "show where the nodes of a graph would run, and why",
        "trace": "write a trace of a run, for Perfetto or Chrome",
        "compare": "compare the results of a graph on two devices",
        "embed": "embed texts with a sentence-transformers model",
        "generate": "continue a prompt with a language model",
        "chat": "talk to a language model",
        "llm-serve": "serve a language model by OpenAI's HTTP interface",
    },
    "inspect a daemon": {
        "devices": "list the devices of a daemon",
        "health": "check the health of a daemon",
        "doctor": "measure the connection to a daemon, and advise what to change",
        "bench": "measure a daemon in about a minute, and compare machines",
        "ops": "print the op table",
        "conformance": "check the results of a device against the op table",
    },
    "operate daemons": {
        "serve": "run a daemon that owns this host's devices",
        "pool": "start, show and stop daemons on the nodes of a cluster",
        "top": "show the load of a daemon: devices, sessions, tenants, members",
        "sessions": "list the sessions of a daemon, or end one",
        "backends": "list, unload and load the backends of a daemon",
        "drain": "end the work of a daemon, then stop it",
        "log-level": "set the log level of a daemon",
        "token": "create, list and revoke the tokens of a daemon",
        "cache": "list, remove or check the weights that daemons keep on disk",
        "warmup": "compile the CPU kernels before a daemon needs them",
        "completion": "print the completion script of a shell: bash, zsh, fish",
    },
}
COMMANDS = {name: help for group in GROUPS.values() for name, help in group.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return the exit status of the process."""
    if arguments is None and is_asked():
        return answer(COMMANDS, _plugins())
    given = list(sys.argv[1:] if arguments is None else arguments)
    verbose, command = 0, ""
    try:
        parsed, module = parse(given)
        verbose, command = parsed.verbose, parsed.command
        _log(verbose)
        status: int = module.run(parsed)
        sys.stdout.flush()
        return status
    except ModuleNotFoundError as error:
        return complain(missing_extra(error, command), verbose)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        _discard_output()
        return 141
    except Exception as error:
        from heliograph_proto.errors import HeliographError

        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            _discard_output()
        elif not isinstance(error, HeliographError):
            raise
        return complain(error, verbose)


def _discard_output() -> None:
    """Standard output takes no more; its flush at exit must not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def parse(given: Sequence[str]) -> tuple[argparse.Namespace, Any]:
    """Return the arguments and the module of the command. Loads no other command."""
    name = next((word for word in given if not word.startswith("-")), None)
    parser = argparse.ArgumentParser(
        prog="heliograph",
        description="Run compute graphs on the devices of other machines.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=None if name else _listed(),
    )
    parser.add_argument("--version", action="version", version=f"heliograph {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    if not given:
        parser.error(f"no command was given:\n{_listed()}each has --help; `heliograph serve` starts a daemon")
    if name is None:
        parser.parse_args(given)
        raise AssertionError
    module, help = _module(name, parser)
    command = commands.add_parser(
        name,
        description=f"{help[0].upper()}{help[1:]}.",
        # An abbreviated option of the daemon is a mistake.
        allow_abbrev=name != "serve",
    )
    command.add_argument("-v", "--verbose", action="count", default=0, help="print more; -vv: tracebacks")
    module.add_arguments(command)
    parsed, unknown = parser.parse_known_args(given)
    if unknown and hasattr(module, "unknown"):
        raise module.unknown(unknown[0])
    if unknown:
        command.error(f"unrecognized arguments: {' '.join(unknown)}")
    return parsed, module


def _module(name: str, parser: argparse.ArgumentParser) -> tuple[Any, str]:
    """Return the module and the help of a command. Exits if there is no such command."""
    if name in COMMANDS:
        return load(name), COMMANDS[name]
    found = _plugins()
    if name in found:
        return found[name].load(), _origin(found[name])
    known = (*COMMANDS, *found)
    near = get_close_matches(name, known, 1)
    advice = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    parser.error(f"there is no command {name!r}; {advice}")


def load(name: str) -> Any:
    """Import the module of a built-in command. Raises ConfigurationError if an extra is missing."""
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
    # The search of the installed packages is slow, and most commands do not need it.
    from importlib.metadata import entry_points

    return tuple(entry_points(group="heliograph.commands"))


def _plugins() -> dict[str, EntryPoint]:
    """The commands of other packages."""
    return {one.name: one for one in _entry_points() if one.name not in COMMANDS}


def _origin(plugin: EntryPoint) -> str:
    return f"a command of {plugin.dist.name if plugin.dist else plugin.module}"


def _listed() -> str:
    """The commands in groups, a line each."""
    groups = {**GROUPS, "other packages": {name: _origin(one) for name, one in _plugins().items()}}
    return "\n".join(
        f"{title}:\n" + "".join(f"  {name:12} {help}\n" for name, help in group.items())
        for title, group in groups.items()
        if group
    )


def missing_extra(error: ModuleNotFoundError, command: str) -> ConfigurationError:
    """The error for a command that needs an extra."""
    from heliograph_proto.errors import ConfigurationError

    extra = {"embed": "models", "generate": "llm", "chat": "llm"}.get(command, "server")
    return ConfigurationError(
        f"the package {error.name!r} is not installed", advice=f"pip install 'heliograph[{extra}]'"
    )


def complain(error: Exception, verbose: int) -> int:
    """Print an error and return the exit status."""
    if verbose > 1:
        logging.getLogger("heliograph").error("the traceback", exc_info=error)
    from heliograph.cli.common.style import print_error

    print_error(str(error))
    return 1


def _log(verbose: int) -> None:
    if verbose:
        level = logging.DEBUG if verbose > 1 else logging.INFO
        logging.basicConfig(level=level, stream=sys.stderr, format="%(levelname)-7s %(name)s: %(message)s")

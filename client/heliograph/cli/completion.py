"""`heliograph completion`: the completion script of a shell, and the answers to its questions.

The scripts and the protocol are argcomplete's: at the Tab key the shell runs `heliograph` with the
line so far in its environment (`is_asked`), which answers from the parser of that command alone.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from typing import Any

SHELLS = ("bash", "zsh", "fish")
_EPILOG = """bash: heliograph completion bash > ~/.local/share/bash-completion/completions/heliograph
zsh:  heliograph completion zsh > a file `_heliograph` in a folder of $fpath, before compinit
fish: heliograph completion fish > ~/.config/fish/completions/heliograph.fish
"""
#: Set by the scripts.
_VARIABLE = "_ARGCOMPLETE"
#: The longest time that a completion asks a daemon.
ASK_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add SHELL."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(arguments: argparse.Namespace) -> int:
    """Print the script. Raises ConfigurationError if argcomplete is not installed."""
    from heliograph_proto.errors import ConfigurationError

    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise ConfigurationError(
            "the package 'argcomplete' is not installed", advice="pip install 'heliograph[cli]'"
        ) from None
    print(shellcode(["heliograph"], shell=arguments.shell))
    return 0


def is_asked() -> bool:
    """True if a shell asks for completions."""
    return _VARIABLE in os.environ


def answer(commands: Mapping[str, str], plugins: Mapping[str, EntryPoint]) -> int:
    """Answer a shell that asks for completions; argcomplete ends the process."""
    try:
        import argcomplete
    except ImportError:
        return 1
    argcomplete.autocomplete(parser_of(_command(_line()), commands, plugins), always_complete_options="long")
    return 1


def _line() -> str:
    """The line so far, up to the cursor."""
    line = os.environ.get("COMP_LINE", "")
    point = os.environ.get("COMP_POINT", "")
    return line[: int(point)] if point.isdecimal() else line


def _command(line: str) -> str:
    """The command of a line; empty while its name is being written."""
    words = line.split(" ")[1:]
    return next((word for word in words[:-1] if word and not word.startswith("-")), "")


def parser_of(
    chosen: str, commands: Mapping[str, str], plugins: Mapping[str, EntryPoint]
) -> argparse.ArgumentParser:
    """The parser of all commands, of which only the chosen one is loaded and has its arguments."""
    from heliograph.cli import load

    parser = argparse.ArgumentParser(prog="heliograph")
    parser.add_argument("--version", action="store_true", help="print the version")
    rows = parser.add_subparsers()
    for name, help in {**commands, **dict.fromkeys(plugins, "")}.items():
        row = rows.add_parser(name, help=help)
        if name == chosen:
            row.add_argument("-v", "--verbose", action="count", help="print more")
            module: Any = plugins[name].load() if name in plugins else load(name)
            module.add_arguments(row)
            _complete(row)
    return parser


def _complete(parser: argparse.ArgumentParser) -> None:
    """Give arguments that are no files what completes them."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                _complete(one)
        elif action.metavar == "URL":
            action.completer = _urls  # type: ignore[attr-defined]
        elif action.metavar == "ID" and action.dest == "number":
            action.completer = _sessions  # type: ignore[attr-defined]
        elif action.type in (int, float) or action.metavar in ("NAME", "TEXT", "SECONDS"):
            action.completer = lambda **_: ()  # type: ignore[attr-defined]


def _urls(**_: Any) -> list[str]:
    from heliograph_proto.addresses import DEFAULT_URL

    given = os.environ.get("HELIOGRAPH_SERVER")
    return [*([given] if given else []), DEFAULT_URL, "local:", "unix:///", "grpc://", "grpcs://"]


def _sessions(parsed_args: argparse.Namespace, **_: Any) -> dict[str, str]:
    """The numbers of a daemon's sessions, with their clients; none if it does not answer at once."""
    from heliograph import admin
    from heliograph.cli.common.text import plain
    from heliograph_proto.errors import HeliographError

    try:
        with admin.connect(getattr(parsed_args, "server", None), timeout=ASK_SECONDS) as daemon:
            return {str(one.number): plain(one.client) for one in daemon.sessions()}
    except HeliographError:
        return {}

"""Code from outside: modules by name, and files that nobody else can have written.

Loading a plugin runs its code with all rights of this process. So a file is read only if nobody but this
user and root can write to it, or replace it or a folder above it; and what was checked is what runs: the
bytes come from the descriptor that was looked at, and no bytecode is cached beside it.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from heliograph_proto.errors import ConfigurationError

_numbers = itertools.count(1)


def import_module(name: str) -> tuple[ModuleType, tuple[str, ...]]:
    """A module by its name, and the names of what had to be imported of it. Raises what importing raises."""
    before = set(sys.modules)
    module = importlib.import_module(name)
    return module, tuple(one for one in sys.modules if one not in before and _is_within(one, name))


def _is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def import_file(path: Path) -> tuple[ModuleType, tuple[str, ...]]:
    """A module from a file, under a name of its own, and that name.

    Raises ConfigurationError for a file that others can write to, and what running it raises.
    """
    code = compile(read_trusted(path), str(path), "exec", dont_inherit=True)
    name = f"heliograph_plugin_{path.stem}_{next(_numbers)}"
    spec = ModuleSpec(name, loader=None, origin=str(path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    # Dataclasses, among others, look their module up while it runs.
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module, (name,)


def drop_modules(names: Iterable[str]) -> None:
    """Forgets modules, so that another import runs their code anew."""
    for name in names:
        sys.modules.pop(name, None)


def read_trusted(path: Path) -> bytes:
    """A file's bytes. Raises ConfigurationError, with the command to run, if others can write to it."""
    _check_parents(path)
    try:
        with open(path, "rb") as file:
            _check_status(path, os.fstat(file.fileno()))
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def check_trusted(path: Path) -> None:
    """Raises ConfigurationError, with the command to run, if others can write to a file or directory."""
    _check_parents(path)
    _check_status(path, os.stat(path))


def _check_parents(path: Path) -> None:
    """Raises ConfigurationError if somebody else can replace a folder on the way, links followed or not."""
    given, real = path.absolute(), path.resolve()
    for parent in dict.fromkeys((*given.parents, *real.parents)):
        _check_status(parent, os.stat(parent), sticky_is_safe=True)


def _check_status(path: Path, status: os.stat_result, *, sticky_is_safe: bool = False) -> None:
    if not hasattr(os, "getuid"):
        return
    if status.st_uid not in (0, os.getuid()):
        raise _refusal(path, "it belongs to another user", ("chown", str(os.getuid()), str(path)))
    # In a folder such as /tmp, nobody can rename or remove what belongs to others.
    if sticky_is_safe and status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(path, "others can write to it", ("chmod", "go-w", str(path)))


def _refusal(path: Path, why: str, command: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{path} is not used for backends, whose code runs with all rights of this process: {why}",
        advice=" ".join(command),
    )

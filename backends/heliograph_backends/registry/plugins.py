"""Sources of backends: built in, installed packages, modules and files. Listing runs no plugin
code.

Loading a plugin runs its code with all rights of this process. So a file is read only if no user
except this one and root can write to it, or replace it or a folder above it. The checked bytes are
what runs: they are read from the descriptor that was checked, and no bytecode is cached.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from heliograph_backends.contract import Backend
from heliograph_backends.registry.specification import BUILT_IN
from heliograph_proto import __version__
from heliograph_proto.errors import ConfigurationError

_numbers = itertools.count(1)


def import_module(name: str) -> tuple[ModuleType, tuple[str, ...]]:
    """Import a module; return it and the names of its modules that were newly imported.

    Raises the errors of the import.
    """
    before = set(sys.modules)
    module = importlib.import_module(name)
    added = (one for one in sys.modules if one not in before)
    return module, tuple(one for one in added if one == name or one.startswith(f"{name}."))


def import_file(path: Path) -> tuple[ModuleType, tuple[str, ...]]:
    """Run a file as a module with a unique name; return both.

    Raises ConfigurationError for a file that others can write to, and the errors of its code.
    """
    code = compile(read_trusted(path), str(path), "exec", dont_inherit=True)
    name = f"heliograph_plugin_{path.stem}_{next(_numbers)}"
    spec = ModuleSpec(name, loader=None, origin=str(path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    # Dataclasses, for example, look up their module while it runs.
    sys.modules[name] = module
    try:
        exec(code, module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module, (name,)


def drop_modules(names: Iterable[str]) -> None:
    """Drop modules, so that another import runs their code again."""
    for name in names:
        sys.modules.pop(name, None)


def read_trusted(path: Path) -> bytes:
    """Read a file. Raises ConfigurationError, with the command to run, if others can write it."""
    _check_parents(path)
    try:
        with open(path, "rb") as file:
            _check_status(path, os.fstat(file.fileno()))
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"cannot read {path}: {error.strerror}") from None


def check_trusted(path: Path) -> None:
    """Raise ConfigurationError, with the command to run, if others can write a file or folder."""
    _check_parents(path)
    _check_status(path, os.stat(path))


def _check_parents(path: Path) -> None:
    """Raise ConfigurationError if others can replace a folder of the given or resolved path."""
    given, real = path.absolute(), path.resolve()
    for parent in dict.fromkeys((*given.parents, *real.parents)):
        _check_status(parent, os.stat(parent), sticky_is_safe=True)


def _check_status(path: Path, status: os.stat_result, *, sticky_is_safe: bool = False) -> None:
    if not hasattr(os, "getuid"):
        return
    if status.st_uid not in (0, os.getuid()):
        raise _refusal(path, "it belongs to another user", ("chown", str(os.getuid()), str(path)))
    # In a folder such as /tmp, users cannot rename or remove files of others.
    if sticky_is_safe and status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise _refusal(path, "others can write to it", ("chmod", "go-w", str(path)))


def _refusal(path: Path, why: str, command: Sequence[str]) -> ConfigurationError:
    return ConfigurationError(
        f"{path} cannot be used for backends, whose code runs with all rights of this process: {why}",
        advice=" ".join(command),
    )


logger = logging.getLogger(__name__)

#: The group of entry points `NAME = "package.module:BackendClass"`.
ENTRY_POINT_GROUP = "heliograph.backends"

#: The name of a plugin's attribute with its class.
ATTRIBUTE = "BACKEND"

#: The supposed `Backend` class, and the modules to drop when it is unloaded.
Loaded: TypeAlias = tuple[object, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class BackendSource:
    """A backend that can be loaded."""

    #: Its name; for a plugin, a provisional one until it is loaded.
    name: str
    #: As in BackendInfo.
    origin: str
    #: Runs its code. Raises the errors of that code.
    load: Callable[[], Loaded]
    #: True if its class must have this name.
    is_named: bool = True
    #: The version of its package; empty for a plugin, whose module may have one.
    version: str = ""


def built_in() -> tuple[BackendSource, ...]:
    """Return the backends of this package."""
    return tuple(
        BackendSource(kind.name, "built in", partial(_already, kind), version=__version__)
        for kind in BUILT_IN
    )


def origin_of_package(name: str) -> str:
    """Return the origin of an installed package's backends."""
    return f"entry point of {name}"


def _already(kind: type[Backend]) -> Loaded:
    return kind, ()


def installed() -> tuple[BackendSource, ...]:
    """Return the backends of installed packages, by name."""
    found = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda one: (one.name, one.value))
    # A package that is installed twice, as in an overlay, counts once.
    unique = {(one.name, one.value): one for one in reversed(found)}
    return tuple(_of_entry_point(one) for one in sorted(unique.values(), key=lambda one: one.name))


def _of_entry_point(point: metadata.EntryPoint) -> BackendSource:
    package = point.dist.name if point.dist is not None else point.module

    def load() -> Loaded:
        _, modules = import_module(point.module)
        return point.load(), modules

    version = point.dist.version if point.dist is not None else ""
    return BackendSource(point.name, origin_of_package(package), load, version=version)


def sources_of(text: str) -> tuple[BackendSource, ...]:
    """Return the plugins of a module's name, a file ending in .py, or a directory.

    For a directory: every plugin directly inside, by name, except files that begin with _ or `.`.
    Raises ConfigurationError if there is none, or if others can write there.
    """
    if "/" not in text and not text.endswith(".py") and not is_folder(text):
        return (_of_module(text),)
    path = Path(text).absolute()
    try:
        if path.is_dir():
            return _of_directory(path)
        if path.is_file() and path.suffix == ".py":
            check_trusted(path)
            return (_of_file(path),)
    except OSError as error:
        raise ConfigurationError(f"cannot access {path}: {error.strerror}") from None
    advice = "give a file ending in .py, a directory of such files, or a module's name"
    raise ConfigurationError(f"there is no plugin at {path}", advice=advice)


def is_folder(text: str, where: Path = Path()) -> bool:
    """Return whether a name without a / means the folder of that name rather than a module."""
    if not text or not (where / text).is_dir():
        return False
    try:
        found = importlib.util.find_spec(text) if text.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    # A folder without __init__.py on the path is a namespace, which defines no backend.
    return found is None or found.origin is None


def _of_module(name: str) -> BackendSource:
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is None:
        advice = "use a name such as my_package.my_backend, my_backend.py or backends/"
        raise ConfigurationError(f"{name!r} is neither a module nor a file", advice=advice)

    def load() -> Loaded:
        return _plugin(*import_module(name))

    return BackendSource(name.rpartition(".")[2], f"module {name}", load, is_named=False)


def _of_file(path: Path) -> BackendSource:
    def load() -> Loaded:
        return _plugin(*import_file(path))

    return BackendSource(path.stem, str(path), load, is_named=False)


def _of_directory(path: Path) -> tuple[BackendSource, ...]:
    check_trusted(path)
    files = sorted(one for one in path.iterdir() if one.suffix == ".py" and one.name[0] not in "._")
    if not files:
        logger.warning("there is no plugin in %s", path)
    return tuple(map(_of_file, files))


def _plugin(module: ModuleType, modules: tuple[str, ...]) -> Loaded:
    if ATTRIBUTE not in vars(module):
        drop_modules(modules)
        raise ConfigurationError(f"it defines no {ATTRIBUTE}", advice=f"add {ATTRIBUTE} = YourBackend")
    return vars(module)[ATTRIBUTE], modules

"""Where backends come from. Looking for them runs no code of theirs."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TypeAlias

from heliograph_backends.contract import Backend
from heliograph_backends.registry.loading import (
    check_trusted,
    drop_modules,
    import_file,
    import_module,
)
from heliograph_backends.registry.specification import BUILT_IN
from heliograph_proto.errors import ConfigurationError

logger = logging.getLogger(__name__)

#: Of entry points: `NAME = "package.module:BackendClass"`.
ENTRY_POINT_GROUP = "heliograph.backends"

#: What a plugin calls its class.
ATTRIBUTE = "BACKEND"

#: What is to be a `Backend` class, and the modules that go with it when it is unloaded.
Loaded: TypeAlias = tuple[object, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Source:
    """One backend that may be there."""

    #: What it is called, or, of a plugin, until it was loaded.
    name: str
    #: As in BackendInfo.
    origin: str
    #: Runs its code. Raises whatever that raises.
    load: Callable[[], Loaded]
    #: Whether `name` is what others have to call it.
    is_named: bool = True


def built_in() -> tuple[Source, ...]:
    """The backends of this package."""
    return tuple(Source(kind.name, "built in", partial(_already, kind)) for kind in BUILT_IN)


def origin_of_package(name: str) -> str:
    """Where an installed package's backends are said to come from."""
    return f"entry point of {name}"


def _already(kind: type[Backend]) -> Loaded:
    return kind, ()


def installed() -> tuple[Source, ...]:
    """The backends of installed packages, by name."""
    found = sorted(metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda one: (one.name, one.value))
    # A package that is installed twice, as in an overlay, is one.
    unique = {(one.name, one.value): one for one in reversed(found)}
    return tuple(_of_entry_point(one) for one in sorted(unique.values(), key=lambda one: one.name))


def _of_entry_point(point: metadata.EntryPoint) -> Source:
    package = point.dist.name if point.dist is not None else point.module

    def load() -> Loaded:
        _, modules = import_module(point.module)
        return point.load(), modules

    return Source(point.name, origin_of_package(package), load)


def sources_of(text: str) -> tuple[Source, ...]:
    """The plugins that a module's name, a file ending in .py, or a directory (with a / in it) names.

    Of a directory: every plugin directly inside, by name; files that begin with _ or . are none. Raises
    ConfigurationError where there is nothing, or where others can write.
    """
    if "/" not in text and not text.endswith(".py"):
        return (_of_module(text),)
    path = Path(text).absolute()
    try:
        if path.is_dir():
            return _of_directory(path)
        if path.is_file() and path.suffix == ".py":
            check_trusted(path)
            return (_of_file(path),)
    except OSError as error:
        raise ConfigurationError(f"cannot look at {path}: {error.strerror}") from None
    advice = "give a file ending in .py, a directory of such, or a module's name"
    raise ConfigurationError(f"there is no plugin at {path}", advice=advice)


def _of_module(name: str) -> Source:
    if re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", name) is None:
        advice = "such as my_package.my_backend, ./my_backend.py or ./backends/"
        raise ConfigurationError(f"{name!r} is neither a module nor a file", advice=advice)

    def load() -> Loaded:
        try:
            module, modules = import_module(name)
        except ModuleNotFoundError as error:
            if error.name == name and Path(name).is_dir():
                raise ConfigurationError(
                    f"no module is named {name!r}; for the directory write ./{name}"
                ) from None
            raise
        return _plugin(module, modules)

    return Source(name.rpartition(".")[2], f"module {name}", load, is_named=False)


def _of_file(path: Path) -> Source:
    def load() -> Loaded:
        return _plugin(*import_file(path))

    return Source(path.stem, str(path), load, is_named=False)


def _of_directory(path: Path) -> tuple[Source, ...]:
    check_trusted(path)
    files = sorted(one for one in path.iterdir() if one.suffix == ".py" and one.name[0] not in "._")
    if not files:
        logger.warning("there is no plugin in %s", path)
    return tuple(map(_of_file, files))


def _plugin(module: ModuleType, modules: tuple[str, ...]) -> Loaded:
    if ATTRIBUTE not in vars(module):
        drop_modules(modules)
        raise ConfigurationError(f"it defines no {ATTRIBUTE}", advice=f"write {ATTRIBUTE} = YourBackend")
    return vars(module)[ATTRIBUTE], modules

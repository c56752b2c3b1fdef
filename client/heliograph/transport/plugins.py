"""Transports that other packages bring, by the scheme of their URLs: `local:` is the server's."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

from heliograph_proto.errors import ConfigurationError

#: The entry points of transports. SCHEME is a callable that makes a BlockingShell of an address, a timeout
#: in seconds and credentials; SCHEME.aio one that gives an AioShell when it is awaited.
GROUP = "heliograph.transports"


@cache
def transport(name: str) -> Any:
    """What the entry point of a name makes shells with. Raises ConfigurationError where none is installed."""
    found = next(iter(_installed(name)), None)
    if found is None:
        raise _missing("heliograph_server")
    try:
        return found.load()
    except ModuleNotFoundError as error:
        raise _missing(error.name or found.module) from None


def _installed(name: str) -> list[metadata.EntryPoint]:
    """Those of this package's own distribution, else of any: to read all of them takes some 20 ms."""
    try:
        points = metadata.distribution("heliograph").entry_points.select(group=GROUP, name=name)
    except metadata.PackageNotFoundError:
        points = None
    return list(points or metadata.entry_points(group=GROUP, name=name))


def _missing(package: str) -> ConfigurationError:
    return ConfigurationError(
        f"the package {package!r} is not installed", advice="pip install 'heliograph[server]'"
    )

"""Transports of other packages, by URL scheme: `local:` belongs to the server package."""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

from heliograph_proto.errors import ConfigurationError

#: The entry points of transports. SCHEME is a function of an address, a timeout in seconds and
#: credentials that returns a BlockingShell; SCHEME.aio returns an awaitable of an AioShell.
GROUP = "heliograph.transports"


@cache
def transport(name: str) -> Any:
    """Return the function that an entry point names.

    Raises ConfigurationError if none is installed.
    """
    found = next(iter(_installed(name)), None)
    if found is None:
        raise _missing("heliograph_server")
    try:
        return found.load()
    except ModuleNotFoundError as error:
        raise _missing(error.name or found.module) from None


def _installed(name: str) -> list[metadata.EntryPoint]:
    """Return this distribution's entry points, else those of any; reading all takes some 20 ms."""
    try:
        points = metadata.distribution("heliograph").entry_points.select(group=GROUP, name=name)
    except metadata.PackageNotFoundError:
        points = None
    return list(points or metadata.entry_points(group=GROUP, name=name))


def _missing(package: str) -> ConfigurationError:
    return ConfigurationError(
        f"the package {package!r} is not installed", advice="pip install 'heliograph[server]'"
    )

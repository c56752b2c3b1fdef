"""Which backends and devices there are.

    registry = open_registry(["cpu:threads=2", "sim:speed=3"], backends=["./plugins", "sim_backend"])
    registry.device("cpu0"), registry.by_type(DeviceType.GPU), registry.best()
    registry.load("more.py"), registry.start(["more:rows=2"]), registry.unload("more")

A backend is built in, an installed package's (entry points of the group "heliograph.backends"), or a
plugin: a module, a file or a directory of files, each with a `Backend` class as its `BACKEND`. The files,
bottom up: specification (text to parameters), loading (code from outside), sources (where backends come
from), entry (one backend, from found to started), registry.
"""

from heliograph_backends.registry.plugins import BackendSource
from heliograph_backends.registry.registry import DEFAULT_SPECIFICATIONS, Registry, open_registry
from heliograph_backends.registry.specification import parse_specification

__all__ = ["DEFAULT_SPECIFICATIONS", "Registry", "BackendSource", "open_registry", "parse_specification"]

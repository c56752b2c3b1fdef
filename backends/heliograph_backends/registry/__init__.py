"""The backends of this process and their devices.

    registry = open_registry(["cpu:threads=2", "sim:speed=3"], backends=["./plugins", "my_sim"])
    registry.device("cpu0"), registry.by_type(DeviceType.GPU), registry.best()
    registry.load("more.py"), registry.start(["more:rows=2"]), registry.unload("more")

A backend is built in, comes from an installed package (entry points of the group
"heliograph.backends"), or is a plugin: a module, a file or a directory of files, each with a
`Backend` class as its `BACKEND`. The modules, bottom up: specification (text to parameters),
plugins (sources of backends, and code from outside), entry (one backend, from found to started),
registry.
"""

from heliograph_backends.registry.plugins import BackendSource
from heliograph_backends.registry.registry import DEFAULT_SPECIFICATIONS, Registry, open_registry
from heliograph_backends.registry.specification import parse_specification

__all__ = ["DEFAULT_SPECIFICATIONS", "Registry", "BackendSource", "open_registry", "parse_specification"]

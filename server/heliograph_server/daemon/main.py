"""`heliograph serve`: one process, one event loop."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from heliograph.transport.allocator import tune_allocator, use_one_arena
from heliograph_backends.registry.plugins import origin_of_package
from heliograph_proto import __version__
from heliograph_proto.errors import HeliographError
from heliograph_proto.types import size_text
from heliograph_server.config.config import ServerConfig, Sources
from heliograph_server.daemon.daemon import Daemon, is_starting, leave, serve
from heliograph_server.telemetry import logs

if TYPE_CHECKING:
    from heliograph_server.auth.sharing import Share

logger = logging.getLogger("heliograph")

#: The origin of the backends of this distribution.
OWN = origin_of_package("heliograph")

#: The limit of descriptors to request at the start, if the system allows it.
MOST_DESCRIPTORS = 2**20

#: For so long at most the event loop waits for a thread that compiles. Python's own 5 ms are ten
#: times a small run.
SWITCH_SECONDS = 0.0005


def run(config: ServerConfig, sources: Sources | None = None, share: Share | None = None) -> int:
    """Serve until SIGTERM or SIGINT, and return the exit status: 0, or 1 if the daemon could not
    start.

    `sources`: the sources of the configuration, if it may change meanwhile. `share`: the URL to
    print for clients on other hosts.
    """
    _open_standard_streams()
    logs.configure(config.log_level, config.log_format)
    use_one_arena()
    if not tune_allocator():
        logger.info("cannot tune the C library's allocator to keep memory: transfers over TCP are slower")
    _raise_descriptor_limit()
    sys.setswitchinterval(SWITCH_SECONDS)
    # The imports' objects stay to the end, so no collection looks at them from here on.
    gc.freeze()
    factory, loop_name = _loop_factory()
    logger.info("heliograph %s on Python %s, %s", __version__, platform.python_version(), loop_name)
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(serve(config, partial(_announce, share=share), sources))
    except HeliographError as error:
        # One line, as all of the log.
        logger.error("%s", error.in_a_line())
        return 1
    if is_starting():
        # Otherwise the interpreter would be finalized while the thread runs native code.
        leave(0)
    return 0


def _open_standard_streams() -> None:
    """Open closed ones on the null device.

    Otherwise a descriptor of gRPC gets the number of stderr, and libraries write messages into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - it stays open


def _raise_descriptor_limit() -> None:
    """Raise the limit of descriptors, which connections and shared memory use; the default is
    low."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= limit:
        return
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _loop_factory() -> tuple[Callable[[], asyncio.AbstractEventLoop] | None, str]:
    try:
        import uvloop
    except ImportError:
        return None, "asyncio (uvloop is not installed: pip install 'heliograph[server]' is faster)"
    return uvloop.new_event_loop, "uvloop"


def _announce(daemon: Daemon, share: Share | None = None) -> None:
    """Log the devices, and print the addresses on stdout, where programs read them."""
    assert daemon.host is not None
    found = daemon.host.device_list()
    for device in found.devices:
        size = size_text(device.memory.total_bytes)
        logger.info("device %s: %s, %s", device.name, device.description, size)
    for backend in found.backends:
        if backend.why:
            # A missing device of `devices` ends the daemon, so this backend was not requested.
            level = logging.INFO if backend.origin == OWN else logging.WARNING
            logger.log(
                level, "backend %s (%s) is not available: %s", backend.name, backend.origin, backend.why
            )
        elif not backend.devices and backend.origin != "built in":
            logger.info("backend %s (%s) can be used with --device", backend.name, backend.origin)
    assert daemon.access is not None
    if daemon.telemetry.url:
        logger.info("metrics at %s", daemon.telemetry.url)
    for address in daemon.addresses:
        # Not logged: both go to one place in many setups, and a first token is printed here, once.
        url = share.url(address) if share is not None else daemon.access.shown(address)
        print(f"listening on {url}", flush=True)
    for gateway, place in daemon.gateways.addresses:
        print(f"{gateway} at {place}", flush=True)
    if daemon.dashboard.url:
        print(f"dashboard at {daemon.dashboard.url}", flush=True)
    if share is not None:
        print(share.notice(daemon.addresses), flush=True)

"""`heliograph warmup`: compile the CPU kernels into the cache, so that daemons start faster."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from heliograph.cli.common.arguments import add_json_argument
from heliograph.cli.common.progress import COUNTED, progress_bar
from heliograph_proto.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from heliograph_backends.cpu.kernels import CacheState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --json."""
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Compile the kernels, or load compiled ones. Raises ConfigurationError if they cannot be
    kept."""
    began = time.monotonic()
    with kernel_progress() as progress:
        state = warm(progress)
    seconds = time.monotonic() - began
    if arguments.json:
        print(json.dumps({"compiled": state.compiled, "seconds": seconds, "folder": str(state.folder)}))
    else:
        print(said(state, seconds))
    return 0


def warm(progress: Callable[[int, int, str], None] | None) -> CacheState:
    """Fill the cache with all kernels, and return its state. Raises ConfigurationError."""
    from heliograph_backends.cpu import kernels

    if not kernels.available():
        raise ModuleNotFoundError(name="numba")
    refusal = kernels.find_cache().refusal
    if refusal is not None:
        raise ConfigurationError(
            f"the kernels cannot be kept: {refusal.value}",
            advice="set $HELIOGRAPH_KERNEL_CACHE to another folder that only this user can access",
        )
    return kernels.warmup(progress=progress)


def said(state: CacheState, seconds: float) -> str:
    """The result as a text."""
    if not state.compiled:
        return f"all kernels are warm, loaded in {seconds:.1f} s from {state.folder}"
    if state.read_only:
        lost = f"and not kept: {state.folder} is read-only"
        return f"{state.compiled} kernels compiled in {seconds:.1f} s, {lost}"
    return f"{state.compiled} kernels compiled in {seconds:.1f} s; the kernels are in {state.folder}"


@contextmanager
def kernel_progress(
    console: Console | None = None,
) -> Iterator[Callable[[int, int, str], None] | None]:
    """Show on stderr which kernel was compiled last. Gives None without a terminal."""
    with progress_bar("loading the kernels", None, console, *COUNTED) as update:
        if update is None:
            yield None
            return

        def show(done: int, total: int, name: str) -> None:
            update(completed=done, total=total, description=f"compiled {name}")

        yield show

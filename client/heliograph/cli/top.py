"""`heliograph top`: what a daemon does, live in a terminal, or once as plain text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from heliograph import admin
from heliograph.admin import Admin
from heliograph.cli.common.arguments import add_server_argument
from heliograph.cli.common.status_view import Line, frame
from heliograph_proto.errors import (
    CancelledError,
    ConnectionError,
    HeliographError,
    InvalidArgumentError,
    ProtocolError,
    UnauthenticatedError,
)
from heliograph_proto.sessions import Snapshot

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

#: How soon after a daemon went it is tried again.
AGAIN_SECONDS = 1.0
#: How often the keyboard is looked at.
KEY_SECONDS = 0.1
#: How wide plain text is, where there is no terminal that would say.
PLAIN_WIDTH = 160
STYLES = {"title": "bold", "header": "bold cyan", "warning": "bold red", "": ""}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--server, --interval, --once, --json."""
    parser.epilog = "q or Ctrl-C ends it. A daemon that is restarted is found again."
    add_server_argument(parser)
    add = parser.add_argument
    add("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks (%(default)g)")
    add("--once", action="store_true", help="one look, as plain text; so without a terminal, too")
    add("--json", action="store_true", help="one look, as one JSON object with everything, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Shows it until q or Ctrl-C, or once. Raises what asking a daemon raises."""
    if not 0.1 <= arguments.interval <= 3600:
        raise InvalidArgumentError(f"--interval {arguments.interval:g}", advice="0.1 to 3600")
    live = sys.stdout.isatty() and not arguments.once and not arguments.json
    with admin.connect(arguments.server) as daemon:
        # Also before the first look of many: a wrong address is an error, not something to wait for.
        first = daemon.snapshot()
        if live and has_rich():
            Top(daemon, arguments.interval).show(first)
        else:
            print(as_json(first) if arguments.json else as_text(first, str(daemon.address)))
    return 0


def as_json(found: Snapshot) -> str:
    """Everything, as one JSON object; times in seconds, memory in bytes."""
    return json.dumps(asdict(found), indent=2, default=_plain)


def _plain(value: Any) -> str:
    return value.name.lower() if isinstance(value, Enum) else bytes(value).hex()


def as_text(found: Snapshot, where: str) -> str:
    """Plain lines."""
    width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns if sys.stdout.isatty() else PLAIN_WIDTH
    return "\n".join(text for text, _ in frame(found, where, width))


def has_rich() -> bool:
    """Whether the package is there."""
    try:
        import rich.live  # noqa: F401
    except ImportError:
        return False
    return True


class Look:
    """Looks at a daemon from a thread of its own, again and again, also when it was restarted."""

    def __init__(self, daemon: Admin, interval: float) -> None:
        self._daemon = daemon
        self._interval = interval
        self._over = threading.Event()
        #: Snapshots, and why there is none.
        self.found: SimpleQueue[Snapshot | HeliographError] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="heliograph-top", daemon=True)

    def __enter__(self) -> Look:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # Ends what it waits for.
        self._daemon.close()
        self._thread.join(2 * AGAIN_SECONDS)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                for snapshot in self._daemon.watch(self._interval):
                    self.found.put(snapshot)
            except HeliographError as error:
                self.found.put(error)
            except ValueError:
                # The channel was closed meanwhile.
                return
            self._over.wait(AGAIN_SECONDS)


class Top:
    """The live view."""

    def __init__(self, daemon: Admin, interval: float) -> None:
        self._daemon = daemon
        self._interval = interval
        self._incarnation = b""
        self._note = ""

    def show(self, first: Snapshot) -> None:
        """Until q or Ctrl-C. Raises the errors that no waiting heals."""
        from rich.live import Live

        with (
            Live(screen=True, auto_refresh=False) as live,
            _keys() as pressed,
            Look(self._daemon, self._interval) as look,
        ):
            snapshot = self.heed(first, first)
            self._draw(live, snapshot)
            while b"q" not in pressed():
                try:
                    found = look.found.get(timeout=KEY_SECONDS)
                except Empty:
                    continue
                snapshot = self.heed(found, snapshot)
                self._draw(live, snapshot)

    def heed(self, found: Snapshot | HeliographError, last: Snapshot) -> Snapshot:
        """What is to be shown now: what was found, or what was seen last with a note. Raises the errors that
        no waiting heals."""
        if isinstance(found, HeliographError):
            hopeless = isinstance(found, UnauthenticatedError | ProtocolError)
            if hopeless or not isinstance(found, ConnectionError | CancelledError):
                raise found
            self._note = f"the daemon does not answer; asking again. {found.message}"
            return last
        is_other = self._incarnation not in (b"", found.incarnation)
        self._incarnation = found.incarnation
        if is_other:
            self._note = "the daemon was restarted: its sessions are others"
        elif self._note.startswith("the daemon does not answer"):
            self._note = ""
        return found

    @property
    def note(self) -> str:
        """What is wrong now; empty if nothing is."""
        return self._note

    def _draw(self, live: Live, snapshot: Snapshot) -> None:
        size = live.console.size
        lines = frame(snapshot, str(self._daemon.address), size.width, size.height, self._note)
        live.update(_rich(lines), refresh=True)


def _rich(lines: tuple[Line, ...]) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    for line, style in lines:
        text.append(line + "\n", style=STYLES[style])
    return text


@contextmanager
def _keys() -> Iterator[Callable[[], bytes]]:
    """What asks for the keys that were pressed, without waiting; as far as there are keys."""
    if not sys.stdin.isatty() or sys.platform == "win32":
        yield lambda: b""
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda: os.read(descriptor, 64) if select.select([descriptor], [], [], 0)[0] else b""
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)

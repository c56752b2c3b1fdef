"""`heliograph top`: the load of a daemon, live in a terminal, or once as plain text or JSON."""

from __future__ import annotations

import argparse
import json
import os
import re
import select
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from heliograph import admin
from heliograph.admin import Admin
from heliograph.cli.common.arguments import add_json_argument, add_server_argument
from heliograph.cli.common.status_view import BUSIEST, ORDERS, History, Line, Shown, frame, ordered
from heliograph_proto.errors import (
    CancelledError,
    ConnectionError,
    HeliographError,
    InvalidArgumentError,
    ProtocolError,
    SessionClosedError,
    UnauthenticatedError,
)
from heliograph_proto.sessions import Snapshot

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

#: The pause before a lost daemon is tried again.
RETRY_SECONDS = 1.0
#: How often the keyboard is polled.
KEY_SECONDS = 0.1
#: The width of plain text without a terminal.
PLAIN_WIDTH = 160
_NO_ANSWER = "the daemon does not answer"
STYLES = {
    "title": "bold",
    "header": "bold cyan",
    "warning": "bold red",
    "quiet": "dim",
    "marked": "reverse",
    "": "",
}
KEYS = "q quit · s sort: {order} · ↑ ↓ choose · Enter one session · Esc all"
ONE_KEYS = "q quit · Esc all sessions"
#: The bytes that terminals send for keys.
_UP, _DOWN, _ESCAPE = (b"\x1b[A", b"\x1bOA", b"k"), (b"\x1b[B", b"\x1bOB", b"j"), b"\x1b"
_KEY = re.compile(rb"\x1b[\[O][A-D]|.", re.S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --interval, --once, --json."""
    parser.epilog = (
        "Keys: q or Ctrl-C quits, s sorts by the next column, up and down choose a session, Enter shows it "
        "alone, Esc all again. A restarted daemon is found again."
    )
    add_server_argument(parser)
    parser.add_argument(
        "--interval", type=float, default=1.0, metavar="SECONDS", help="refresh interval (default: 1)"
    )
    parser.add_argument(
        "--once", action="store_true", help="print once as plain text; the default without a terminal"
    )
    parser.add_argument(
        "--sort", choices=tuple(ORDERS), default=BUSIEST, help="sort sessions by (default: %(default)s)"
    )
    parser.add_argument("--session", type=int, default=0, metavar="ID", help="show this session alone")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the view until q or Ctrl-C, or print it once. Raises the errors of calls to a daemon."""
    if not 0.1 <= arguments.interval <= 3600:
        raise InvalidArgumentError(f"--interval is {arguments.interval:g}", advice="give 0.1 to 3600")
    live = sys.stdout.isatty() and not arguments.once and not arguments.json
    with admin.connect(arguments.server) as daemon:
        # The live view starts with one too, so that a wrong address is an error and no reason to
        # wait.
        first = daemon.snapshot()
        shown = Shown(arguments.sort, arguments.session)
        if shown.session and not any(one.number == shown.session for one in first.sessions):
            raise SessionClosedError(
                f"there is no session {shown.session}", advice="`heliograph sessions ls` lists them"
            )
        if live and has_rich():
            Top(daemon, arguments.interval, shown).show(first)
        else:
            print(as_json(first) if arguments.json else as_text(first, str(daemon.address), shown))
    return 0


def as_json(found: Snapshot) -> str:
    """The snapshot as one JSON object; times in seconds, memory in bytes."""
    return json.dumps(asdict(found), indent=2, default=_plain)


def _plain(value: Any) -> str:
    return value.name.lower() if isinstance(value, Enum) else bytes(value).hex()


def as_text(found: Snapshot, where: str, shown: Shown | None = None) -> str:
    """The snapshot as plain lines."""
    width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns if sys.stdout.isatty() else PLAIN_WIDTH
    return "\n".join(text for text, _ in frame(found, where, width, shown=shown))


def has_rich() -> bool:
    """True if rich is installed."""
    try:
        import rich.live  # noqa: F401
    except ImportError:
        return False
    return True


class Watcher:
    """Takes snapshots of a daemon on a thread of its own, and tries again when the daemon is
    gone."""

    def __init__(self, daemon: Admin, interval: float) -> None:
        self._daemon = daemon
        self._interval = interval
        self._over = threading.Event()
        #: Snapshots, and errors when there is none.
        self.found: SimpleQueue[Snapshot | HeliographError] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="heliograph-top", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        # Ends the call that the thread waits for.
        self._daemon.close()
        self._thread.join(2 * RETRY_SECONDS)

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
            self._over.wait(RETRY_SECONDS)


class Top:
    """The live view."""

    def __init__(self, daemon: Admin, interval: float, shown: Shown | None = None) -> None:
        self._daemon = daemon
        self._interval = interval
        self._incarnation = b""
        self._note = ""
        self.shown = replace(shown or Shown(), history=History())

    def show(self, first: Snapshot) -> None:
        """Show snapshots until q or Ctrl-C. Raises the errors that a retry does not solve."""
        from rich.live import Live

        with (
            Live(screen=True, auto_refresh=False) as live,
            _keys() as pressed,
            Watcher(self._daemon, self._interval) as watcher,
        ):
            snapshot = self.heed(first, first)
            self._draw(live, snapshot)
            while self.press(keys := pressed(), snapshot):
                try:
                    snapshot = self.heed(watcher.found.get(timeout=KEY_SECONDS), snapshot)
                except Empty:
                    if not keys:
                        continue
                self._draw(live, snapshot)

    def press(self, keys: bytes, found: Snapshot) -> bool:
        """Heed keys. Returns False if the view is to end."""
        return all(self._press(key, found) for key in _KEY.findall(keys))

    def _press(self, key: bytes, found: Snapshot) -> bool:
        shown = self.shown
        if key == b"s":
            orders = list(ORDERS)
            after = orders[(orders.index(shown.order) + 1) % len(orders)]
            self.shown = replace(shown, order=after)
        elif key in _UP or key in _DOWN:
            self.shown = replace(shown, marked=self._moved(found, 1 if key in _DOWN else -1))
        elif key in (b"\r", b"\n"):
            self.shown = replace(shown, session=shown.marked)
        elif key == _ESCAPE:
            self.shown = replace(shown, session=0)
        return key != b"q"

    def _moved(self, found: Snapshot, by: int) -> int:
        """The number of the session after or before the marked one; of the first one if none is."""
        numbers = [one.number for one in ordered(found.sessions, self.shown.order)]
        if self.shown.marked not in numbers:
            return numbers[0] if numbers else 0
        return numbers[min(max(0, numbers.index(self.shown.marked) + by), len(numbers) - 1)]

    def heed(self, found: Snapshot | HeliographError, last: Snapshot) -> Snapshot:
        """Return the snapshot to show: the new one, or the last one with a note on the error.

        Raises the errors that a retry does not solve.
        """
        if isinstance(found, HeliographError):
            hopeless = isinstance(found, UnauthenticatedError | ProtocolError)
            if hopeless or not isinstance(found, ConnectionError | CancelledError):
                raise found
            self._note = f"{_NO_ANSWER}; retrying. {found.message}"
            return last
        self.shown.history.add(found)
        is_other = self._incarnation not in (b"", found.incarnation)
        self._incarnation = found.incarnation
        if is_other:
            self._note = "the daemon was restarted: its sessions are new"
        elif self._note.startswith(_NO_ANSWER):
            self._note = ""
        return found

    @property
    def note(self) -> str:
        """The current problem; empty if there is none."""
        return self._note

    def _draw(self, live: Live, snapshot: Snapshot) -> None:
        size = live.console.size
        hint = ONE_KEYS if self.shown.session else KEYS.format(order=self.shown.order)
        how = replace(self.shown, hint=hint)
        lines = frame(snapshot, str(self._daemon.address), size.width, size.height, self._note, how)
        live.update(_rich(lines), refresh=True)


def _rich(lines: tuple[Line, ...]) -> Text:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="crop")
    for line, style in lines:
        text.append(line + "\n", style=STYLES[style])
    return text


@contextmanager
def _keys() -> Iterator[Callable[[], bytes]]:
    """Give a function that returns the keys pressed so far, without waiting; none without a
    terminal."""
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

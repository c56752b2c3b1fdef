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
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from enum import Enum
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from heliograph import admin
from heliograph.admin import Admin
from heliograph.cli.common.arguments import add_json_argument, add_server_argument
from heliograph.cli.common.columns import Line
from heliograph.cli.common.plan_view import Key
from heliograph.cli.common.status_view import BUSIEST, ORDERS, History, Shown, frame, ordered
from heliograph_proto.errors import (
    CancelledError,
    ConnectionError,
    HeliographError,
    InvalidArgumentError,
    PermissionDeniedError,
    ProtocolError,
    SessionClosedError,
    UnauthenticatedError,
    UnknownHandleError,
)
from heliograph_proto.plans import PlanList
from heliograph_proto.sessions import Snapshot

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

T = TypeVar("T")
#: A snapshot, the reason why there is none, or plans with what was asked for.
Found: TypeAlias = Snapshot | HeliographError | tuple[Key, PlanList | HeliographError]

#: The pause before a lost daemon is tried again.
RETRY_SECONDS = 1.0
#: How often the keyboard is polled.
KEY_SECONDS = 0.1
#: The width of plain text without a terminal.
PLAIN_WIDTH = 160
_NO_ANSWER = "the daemon does not answer"
_NO_PLANS = "the daemon does not tell of plans"
STYLES = {
    "title": "bold",
    "header": "bold cyan",
    "warning": "bold red",
    "quiet": "dim",
    "marked": "reverse",
    "": "",
}
KEYS = "q quit · s sort: {order} · ↑ ↓ choose · Enter one session · Esc all"
SESSION_KEYS = "q quit · ↑ ↓ choose · Enter one plan · Esc all sessions"
OWN_KEYS = "q quit · ↑ ↓ choose · Enter one plan"
PLAN_KEYS = "q quit · Esc all plans"
#: The bytes that terminals send for keys.
_UP, _DOWN, _ESCAPE = (b"\x1b[A", b"\x1bOA", b"k"), (b"\x1b[B", b"\x1bOB", b"j"), b"\x1b"
_KEY = re.compile(rb"\x1b[\[O][A-D]|.", re.S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --server, --interval, --once, --sort, --session, --plan, --json."""
    parser.epilog = (
        "Keys: q or Ctrl-C quits, s sorts by the next column, up and down choose a session, Enter shows it "
        "alone with its plans, of which one can be chosen likewise, Esc all again. A restarted daemon is "
        "found again. A token without the right admin shows the plans of its tenant."
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
    parser.add_argument(
        "--plan", type=int, default=0, metavar="ID", help="with --session: show this plan of it alone"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Show the view until q or Ctrl-C, or print it once. Raises the errors of calls to a daemon."""
    if not 0.1 <= arguments.interval <= 3600:
        raise InvalidArgumentError(f"--interval is {arguments.interval:g}", advice="give 0.1 to 3600")
    if arguments.plan and not arguments.session:
        raise InvalidArgumentError(
            f"--plan {arguments.plan} needs a session", advice="`heliograph top --session ID` lists its plans"
        )
    live = sys.stdout.isatty() and not arguments.once and not arguments.json and has_rich()
    with admin.connect(arguments.server) as daemon:
        # The live view starts with one too, so that a wrong address is an error and no reason to
        # wait.
        first, shown = _first(daemon, Shown(arguments.sort, arguments.session, plan=arguments.plan))
        if live:
            Top(daemon, arguments.interval, shown).show(first)
            return 0
        if shown.asks is not None:
            # Rates need another look.
            time.sleep(arguments.interval)
            shown.looks.add(shown.asks, daemon.plans(*shown.asks))
        print(as_json(first, shown) if arguments.json else as_text(first, str(daemon.address), shown))
    return 0


def _first(daemon: Admin, shown: Shown) -> tuple[Snapshot, Shown]:
    """Look once. Raises SessionClosedError, UnknownHandleError."""
    try:
        first = daemon.snapshot()
    except PermissionDeniedError:
        shown = replace(shown, is_own=True)
        first = Snapshot("")
    if not shown.is_own and shown.session and all(one.number != shown.session for one in first.sessions):
        raise SessionClosedError(
            f"there is no session {shown.session}", advice="`heliograph sessions ls` lists them"
        )
    if (asks := shown.asks) is not None:
        found = daemon.plans(*asks)
        shown.looks.add(asks, found)
        first = _snapshot_of(found) if shown.is_own else first
    return first, shown


def _snapshot_of(found: PlanList) -> Snapshot:
    """The little that a caller without the right "admin" sees besides plans."""
    return Snapshot(found.server, found.incarnation, found.uptime_seconds)


def as_json(found: Snapshot, shown: Shown | None = None) -> str:
    """The snapshot as one JSON object, with the plans that are shown; times in seconds or as their
    names say, memory in bytes."""
    plans = [looks[-1][1] for looks in shown.looks.plans.values()] if shown is not None else []
    told = {"plans": [asdict(one) for one in plans]} if shown is not None and shown.asks else {}
    return json.dumps(asdict(found) | told, indent=2, default=_plain)


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

    def __init__(self, daemon: Admin, interval: float, shown: Shown) -> None:
        self._daemon = daemon
        self._interval = interval
        self._over = threading.Event()
        #: The plans to look at.
        self.asks, self._is_own = shown.asks, shown.is_own
        #: Snapshots, errors when there is none, and the plans that were asked for.
        self.found: SimpleQueue[Found] = SimpleQueue()
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
                for snapshot in self._snapshots():
                    self.found.put(snapshot)
                    if self._over.is_set():
                        return
            except HeliographError as error:
                self.found.put(error)
            except ValueError:
                # The channel was closed meanwhile.
                return
            self._over.wait(RETRY_SECONDS)

    def _snapshots(self) -> Iterator[Snapshot]:
        """Snapshots, each after the plans that belong to it."""
        if not self._is_own:
            for snapshot in self._daemon.watch(self._interval):
                self._look(self.asks)
                yield snapshot
            return
        while not self._over.is_set():
            yield _snapshot_of(self._look(self.asks or (0, 0)) or self._daemon.plans())
            self._over.wait(self._interval)

    def _look(self, asks: Key | None) -> PlanList | None:
        """Look at the plans that are asked for. None without any, and if they are gone."""
        if asks is None:
            return None
        try:
            found = self._daemon.plans(*asks)
        except (SessionClosedError, UnknownHandleError):
            self.found.put((asks, PlanList("", b"", 0.0)))
        except HeliographError as error:
            is_older = isinstance(error, ProtocolError)
            if not is_older and isinstance(error, ConnectionError | CancelledError | UnauthenticatedError):
                raise
            # A host of the plan has failed, or the daemon is older: the rest is seen nevertheless.
            self.found.put((asks, error))
        else:
            self.found.put((asks, found))
            return found
        return None


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
            Watcher(self._daemon, self._interval, self.shown) as watcher,
        ):
            snapshot = self.heed(first, first)
            self._draw(live, snapshot)
            while self.press(keys := pressed(), snapshot):
                watcher.asks = self.shown.asks
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
            by = 1 if key in _DOWN else -1
            if shown.plan:
                return True
            if shown.asks is not None:
                marked = _moved(list(shown.looks.plans), shown.marked_plan, by, (0, 0))
                self.shown = replace(shown, marked_plan=marked)
            else:
                numbers = [one.number for one in ordered(found.sessions, shown.order)]
                self.shown = replace(shown, marked=_moved(numbers, shown.marked, by, 0))
        elif key in (b"\r", b"\n"):
            self._open()
        elif key == _ESCAPE:
            keeps = bool(shown.plan) and not shown.is_own
            self.shown = replace(shown, session=shown.session if keeps else 0, plan=0)
        return key != b"q"

    def _open(self) -> None:
        """Show what is marked alone."""
        shown = self.shown
        if shown.asks is None:
            self.shown = replace(shown, session=shown.marked, marked_plan=(0, 0))
        elif not shown.plan and shown.marked_plan in shown.looks.plans:
            session, plan = shown.marked_plan
            self.shown = replace(shown, session=session, plan=plan)

    def heed(self, found: Found, last: Snapshot) -> Snapshot:
        """Return the snapshot to show: the new one, or the last one with a note on the error, or
        with plans.

        Raises the errors that a retry does not solve.
        """
        if isinstance(found, tuple):
            asked, plans = found
            # An answer to what was asked before a key was pressed tells nothing of what is shown.
            if asked == self.shown.asks:
                self._heed_plans(asked, plans)
            return last
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

    def _heed_plans(self, asked: Key, found: PlanList | HeliographError) -> None:
        if isinstance(found, HeliographError):
            self._note = f"{_NO_PLANS}: {found.message}"
            return
        self.shown.looks.add(asked, found)
        if self._note.startswith(_NO_PLANS):
            self._note = ""

    @property
    def note(self) -> str:
        """The current problem; empty if there is none."""
        return self._note

    def _hint(self) -> str:
        shown = self.shown
        if shown.plan:
            return PLAN_KEYS
        if shown.is_own:
            return OWN_KEYS
        return SESSION_KEYS if shown.session else KEYS.format(order=shown.order)

    def _draw(self, live: Live, snapshot: Snapshot) -> None:
        size = live.console.size
        how = replace(self.shown, hint=self._hint())
        lines = frame(snapshot, str(self._daemon.address), size.width, size.height, self._note, how)
        live.update(_rich(lines), refresh=True)


def _moved(known: list[T], marked: T, by: int, nothing: T) -> T:
    """Return the one after or before the marked one; the first one if none is marked."""
    if marked not in known:
        return known[0] if known else nothing
    return known[min(max(0, known.index(marked) + by), len(known) - 1)]


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

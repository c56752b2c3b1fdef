"""A notebook's kernel, as a front end uses it: cells, their outputs, interrupts and completions."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

SECONDS = 60.0


@dataclass
class Shown:
    """The outputs of a cell."""

    text: str = ""
    #: HTML of results and displays, with that of their updates.
    html: list[str] = field(default_factory=list)
    #: The name of an error, and its traceback without colours.
    error: str = ""
    traceback: str = ""


class Kernel:
    """A running kernel and a client of it."""

    def __init__(self, manager: Any, client: Any) -> None:
        self._manager, self._client = manager, client

    def run(self, cell: str, *, interrupt_at: str = "", after: float = 0.0) -> Shown:
        """Run a cell to its end. Interrupts it `after` seconds once it has printed a text."""
        number = self._client.execute(cell)
        shown = Shown()
        end = time.monotonic() + SECONDS
        while True:
            message = self._client.get_iopub_msg(timeout=max(0.1, end - time.monotonic()))
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return shown
            _take(shown, kind, content)
            if interrupt_at and interrupt_at in shown.text:
                interrupt_at = ""
                time.sleep(after)
                self._manager.interrupt_kernel()

    def completions(self, code: str) -> list[str]:
        """The completions that a front end offers at the end of the code."""
        answer = self._client.complete(code, reply=True, timeout=SECONDS)
        found: list[str] = answer["content"]["matches"]
        return found


def _take(shown: Shown, kind: str, content: dict[str, Any]) -> None:
    if kind == "stream":
        shown.text += content["text"]
    elif kind in ("execute_result", "display_data", "update_display_data"):
        if html := content["data"].get("text/html"):
            shown.html.append(html)
    elif kind == "error":
        shown.error = content["ename"]
        shown.traceback = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(content["traceback"]))


@contextmanager
def running_kernel() -> Iterator[Kernel]:
    """Start a kernel of this Python, and end it."""
    from jupyter_client.manager import KernelManager

    manager = KernelManager()
    # A kernel of this very Python, wherever others are registered.
    manager.kernel_spec.argv[0] = sys.executable
    manager.start_kernel()
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=SECONDS)
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()

"""Network namespaces without names, and commands and processes in them."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

CLONE_NEWNET = 0x40000000
#: How long one command that sets something up may take.
COMMAND_SECONDS = 30
#: How long a process may take to end after SIGKILL, and a wire after its standard input has ended.
END_SECONDS = 10.0


class NetworkError(Exception):
    """The system refused what a network needs; the text is what it said."""


class Namespace:
    """A network namespace with only its loopback interface. It lasts until it is closed and empty."""

    def __init__(self) -> None:
        self.descriptor = _new_namespace()
        self.inode = os.stat(self.descriptor).st_ino

    @property
    def path(self) -> str:
        """A file that stands for it, for commands of this process' children."""
        return f"/proc/{os.getpid()}/fd/{self.descriptor}"

    def close(self) -> None:
        os.close(self.descriptor)

    def ip(self, *commands: str) -> None:
        """Does what `ip` would be told, one command each. Raises NetworkError."""
        self._tell(["ip", "-batch", "-"], "\n".join(commands) + "\n")

    def nft(self, rules: str) -> None:
        """Adds rules to the packet filter. Raises NetworkError, also where there is none."""
        if shutil.which("nft") is None:
            raise NetworkError("no nft command: install nftables")
        self._tell(["nft", "-f", "-"], rules)

    def _tell(self, command: Sequence[str], text: str) -> None:
        inside = ["nsenter", f"--net={self.path}", "--", *command]
        done = subprocess.run(inside, input=text, capture_output=True, text=True, timeout=COMMAND_SECONDS)
        if done.returncode:
            raise NetworkError(f"{' '.join(command)}: {done.stderr.strip()}")

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """A process in it, started as `subprocess.Popen` would.

        The kernel kills it when the thread that calls this has ended. Its id is that of the command itself.
        """
        mortal = ["setpriv", "--pdeathsig", "KILL", "--"]
        return subprocess.Popen([*mortal, "nsenter", f"--net={self.path}", "--", *command], **options)


def _new_namespace() -> int:
    """A descriptor of a new namespace. A thread enters it, which ends at once; this one stays where it is."""
    found: list[int] = []
    refused: list[OSError] = []

    def enter() -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            refused.append(OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno())))
        else:
            found.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC))
            # IPv6 would send things by itself; a kernel or container may lack it.
            with contextlib.suppress(OSError):
                Path("/proc/sys/net/ipv6/conf/default/disable_ipv6").write_text("1")

    thread = threading.Thread(target=enter, name="namespace")
    thread.start()
    thread.join()
    if not found:
        reason = "no CAP_SYS_ADMIN" if isinstance(refused[0], PermissionError) else refused[0].strerror
        raise NetworkError(f"no network namespace can be made: {reason}")
    return found[0]


def processes_in(inodes: Collection[int]) -> Iterator[int]:
    """The ids of all processes whose network namespace is one of these."""
    for entry in Path("/proc").iterdir():
        # A process may end meanwhile, or be another user's.
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and os.stat(entry / "ns/net").st_ino in inodes:
                yield int(entry.name)


def kill(pid: int) -> None:
    """Kills a process that is no child of this one, and waits until it has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            select.select([descriptor], [], [], END_SECONDS)
        finally:
            os.close(descriptor)


@functools.cache
def rights() -> str:
    """Why no network can be made here, found by trying; empty if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    for command, package in (("ip", "iproute2"), ("nsenter", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(command) is None:
            return f"no {command} command: install {package}"
    try:
        with contextlib.closing(Namespace()) as namespace:
            namespace.ip("link add bridge0 type bridge", "link add veth0 type veth peer name veth1")
    except NetworkError as error:
        return "no CAP_NET_ADMIN" if "not permitted" in str(error) else str(error)
    return ""

"""A plugin of the soaked daemons: it tells what they have allocated, and plants leaks.

The resident size of a daemon rises for minutes, since its allocator keeps up to 128 MiB of freed
memory for reuse. The memory in use does not, and only the process itself knows that.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from heliograph_backends.contract import CONTRACT_VERSION, Backend
from heliograph_backends.fake import FakeDevice
from heliograph_server.runtime.host import Host

#: The environment variables with the folder of the sockets, and with the names of leaks.
FOLDER, PLANTED = "SOAKING_FOLDER", "SOAKING_PLANTS"
LEAK_BYTES, LEAK_OBJECTS = 64 * 1024, 1000
#: The bound of an answer, also on a machine that is busy.
ANSWER_SECONDS = 30.0


def _path(pid: int) -> str:
    return str(Path(os.environ[FOLDER], f"heap-{pid}"))


def measure(pid: int) -> tuple[int, int]:
    """Return a daemon's bytes in use in the C library and its blocks in use in Python's allocator.

    It collects its garbage before. Raises OSError.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(_path(pid))
        heap, blocks = json.loads(connection.recv(1000))
        return heap, blocks


class _Heap(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "mapped", "usmblks", "fsmblks", "used"),
            *("fordblks", "keepcost"),
        )
    )


def _serve(listener: socket.socket) -> None:
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _Heap
    while True:
        connection, _ = listener.accept()
        with connection:
            gc.collect()
            heap = ask()
            answer = heap.used + heap.mapped, sys.getallocatedblocks()
            connection.sendall(json.dumps(answer).encode())


def _thread() -> threading.Thread:
    thread = threading.Thread(target=threading.Event().wait, daemon=True)
    thread.start()
    return thread


#: The leak of one session, by the name of the series that shows it.
PLANTS: Mapping[str, Callable[[Host], Any]] = {
    "descriptors": lambda host: os.open(os.devnull, os.O_RDONLY),
    "threads": lambda host: _thread(),
    "heap": lambda host: bytearray(os.urandom(LEAK_BYTES)),
    "blocks": lambda host: [object() for _ in range(LEAK_OBJECTS)],
    "device": lambda host: host.devices[0].buffer_type.allocate(LEAK_BYTES),
}


class SoakingBackend(Backend):
    """A small device, so that the plugin is a backend."""

    name = "soaking"
    contract_version = CONTRACT_VERSION

    def __init__(self, parameters: Sequence[Mapping[str, Any]] = ({},)) -> None:
        self._device = FakeDevice("soaking0", 2**20)
        self._install()

    def devices(self) -> Sequence[FakeDevice]:
        return (self._device,)

    def _install(self) -> None:
        """Answer questions, and leak in each session that is opened."""
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(_path(os.getpid()))
        listener.listen()
        threading.Thread(target=_serve, args=(listener,), name="measure", daemon=True).start()
        plants = [PLANTS[name] for name in os.environ.get(PLANTED, "").split(",") if name]
        kept: list[Any] = []
        opening = Host.open_session

        def leaking(host: Host, *arguments: Any, **keywords: Any) -> Any:
            kept.extend(plant(host) for plant in plants)
            return opening(host, *arguments, **keywords)

        if plants:
            Host.open_session = leaking  # type: ignore[method-assign]


BACKEND = SoakingBackend

"""`hg.connect` and `hg.Session`: what a client has on a server."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from heliograph import _common
from heliograph._arguments import timeout_ms
from heliograph._blocking import BlockingShell, GrpcShell
from heliograph._common import DeviceBase, SessionBase, device_name
from heliograph._procedures import Progress, synchronize
from heliograph._tensors import allocate, checked_type
from heliograph.builder import Graph
from heliograph.plan import Plan
from heliograph.stream import Device, Stream
from heliograph.tensor import Tensor
from heliograph_proto.addresses import DEFAULT_URL, Address, parse_address
from heliograph_proto.errors import InvalidArgumentError
from heliograph_proto.types import DTypeArgument

#: The environment variable that names the server when no URL is given.
SERVER_VARIABLE = "HELIOGRAPH_SERVER"


def address_of(url: str | None) -> Address:
    """The address of a URL, of $HELIOGRAPH_SERVER, or the default. Raises InvalidArgumentError."""
    if url is not None and not isinstance(url, str):
        raise InvalidArgumentError(
            f"a URL is a string, not {type(url).__name__}",
            advice="such as 'grpc://127.0.0.1:7070', 'unix:///path' or 'local:'; one server at a time",
        )
    if url is not None and not url.strip():
        raise InvalidArgumentError(
            "the URL is empty",
            advice=f"name a server, or leave the URL out for ${SERVER_VARIABLE}, else {DEFAULT_URL}",
        )
    return parse_address(url or os.environ.get(SERVER_VARIABLE) or DEFAULT_URL)


def connect(url: str | None = None, *, timeout: float = 10.0, progress: Progress | None = None) -> Session:
    """Opens a session on a server: local:, unix:///path, or grpc://host:port; URL#device names a device.

    Without a URL: $HELIOGRAPH_SERVER, else grpc://127.0.0.1:7070. `progress` is called, from any thread,
    with (bytes done, bytes in all) while weights are uploaded.

    Raises UnavailableError when nobody answers within `timeout` seconds, NotHeliographError when
    something else does, VersionMismatchError, DrainingError, LimitExceededError.
    """
    address = address_of(url)
    timeout_ms(timeout)
    shell: BlockingShell
    if address.scheme == "local":
        from heliograph._local import LocalShell

        shell = LocalShell(address)
    else:
        shell = GrpcShell(address, timeout)
    try:
        return Session(shell, progress)
    except BaseException:
        shell.close()
        raise


class Session(SessionBase):
    """A client's tensors, plans and variables on a server. Made by `hg.connect`; thread-safe.

    A context manager: leaving it ends the session, and the server frees everything of it.
    """

    _shell: BlockingShell

    def __init__(self, shell: BlockingShell, progress: Progress | None = None) -> None:
        super().__init__(shell)
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    @property
    def devices(self) -> list[Device]:
        """The server's devices, in the order of their priority."""
        return [Device(self._shell, info) for info in self._shell.info.devices]

    def compile(
        self,
        graph: Graph,
        devices: Sequence[DeviceBase | str] | DeviceBase | str | None = None,
        *,
        fusion: bool = True,
        timeout: float | None = None,
    ) -> Plan:
        """A plan for a graph, on the named devices by priority (default: the server's first).

        Weights that the session does not hold are uploaded first. Errors name the line that built
        the node. Raises InvalidGraphError, UnsupportedError, OutOfMemoryError, LimitExceededError,
        UnknownDeviceError, DeadlineExceededError.
        """
        procedure = self._compiling(graph, devices, fusion, self._progress)
        return Plan(self._shell, self._shell.drive(procedure, timeout, lambda: f"compiling {graph!r}"))

    def empty(
        self, shape: Sequence[int] | int, dtype: DTypeArgument, device: DeviceBase | str | None = None
    ) -> Tensor:
        """A new tensor of zeros. Errors, such as OutOfMemoryError, appear at its first use."""
        where, type_ = device_name(self._shell, device), checked_type(dtype, shape)
        return Tensor(self._shell, allocate(self._shell, type_, where), type_, where)

    def put(
        self, array: Any, device: DeviceBase | str | None = None, *, timeout: float | None = None
    ) -> Tensor:
        """A new tensor with the elements of an array, which may be overwritten afterwards."""
        found = np.asarray(array)
        tensor = self.empty(found.shape, found.dtype, device)
        tensor.set(found, timeout=timeout)
        return tensor

    def stream(self, device: DeviceBase | str | None = None) -> Stream:
        """A new stream, on the session's device unless told otherwise."""
        return _common.make_stream(self._shell, device_name(self._shell, device), Stream)

    def synchronize(self, timeout: float | None = None) -> None:
        """Blocks until everything sent so far is done. Raises the first error that nobody has seen."""
        self._shell.drive(
            synchronize(self._shell.core, self._all_streams()), timeout, "the work of the session"
        )

    def close(self) -> None:
        """Ends the session; what is pending fails with SessionClosedError. Idempotent."""
        self._shell.close()

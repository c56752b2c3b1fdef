"""Uploads of missing contents, to the server or directly to the daemon that will hold them.

If that daemon cannot be reached, the server passes them on.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from heliograph.core.arrays import byte_view
from heliograph.core.effects import Procedure, StartUpload, UnreachableError, WaitFor, ask
from heliograph.core.future import Outcome, Transfer
from heliograph.core.methods import FIND_MISSING, FindMissing, Missing
from heliograph.core.progress.bars import Meter, Progress
from heliograph.core.protocol import ClientCore
from heliograph.procedures.transfer import stop
from heliograph_proto.errors import ContentMismatchError, PermissionDeniedError, UnavailableError
from heliograph_proto.plans import ContentOffer

#: The number of simultaneous uploads to each daemon.
_WINDOW = 3
#: The number of attempts before an upload's error is raised.
_TRIES = 3

Contents: TypeAlias = Mapping[bytes, "np.ndarray[Any, Any]"]
#: Returns the server's offers for missing contents: the daemons that take them.
Place: TypeAlias = Callable[[tuple[bytes, ...]], Procedure[tuple[ContentOffer, ...]]]


def upload_missing(
    core: ClientCore, contents: Contents, progress: Progress | None, place: Place | None
) -> Procedure[None]:
    """Send the contents that the session does not hold, a few at a time.

    `place` is asked for their places first; None: they go to the server, which finds some.
    """
    if not contents:
        return
    for tries_left in reversed(range(_TRIES)):
        missing = yield from ask(FIND_MISSING, FindMissing(tuple(contents)))
        offers: Sequence[ContentOffer] = ()
        if missing and place is not None:
            offers = yield from place(tuple(digest for digest, _ in missing))
        try:
            yield from _upload(core, contents, missing, offers, progress)
            return
        except (UnavailableError, ContentMismatchError) as error:
            # The connection for bulk data may have broken alone; or the part of a content that an
            # earlier upload left is gone or damaged.
            core.check()
            was_resumed = any(start for _, start in missing)
            if not tries_left or not (was_resumed or isinstance(error, UnavailableError)):
                raise


def _upload(
    core: ClientCore,
    contents: Contents,
    missing: Missing,
    offers: Sequence[ContentOffer],
    progress: Progress | None,
) -> Procedure[None]:
    """Send contents, each from the byte where an earlier upload ended."""
    views = [(digest, byte_view(contents[digest]), start) for digest, start in missing]
    meter = Meter("uploading weights", sum(view.nbytes - start for _, view, start in views), progress)
    uploads = _Uploads(core)
    direct = {one.digest: one for one in offers if one.address not in core.unreachable}
    for digest, view, start in views:
        uploads.add(
            StartUpload(digest, view, min(start, view.nbytes), progress=meter, offer=direct.get(digest))
        )
    try:
        yield from uploads.run()
        if uploads.sent:
            yield from _settle(tuple(uploads.sent))
    except BaseException:
        stop(core, [], list(uploads.running))
        raise
    finally:
        meter.end()


def _settle(sent: tuple[bytes, ...]) -> Procedure[None]:
    """Wait until the server knows of the contents that other daemons received.

    Raises UnavailableError.
    """
    missing = yield from ask(FIND_MISSING, FindMissing(sent, sent))
    if missing:
        raise UnavailableError(
            f"{len(missing)} contents were sent to other daemons, but the server does not know of them",
            advice="try again; is a member of its pool gone?",
        )


class _Uploads:
    """Waiting uploads by their address ("" is the server), and running ones."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._waiting: dict[str, deque[StartUpload]] = {}
        self.running: dict[Transfer, StartUpload] = {}
        #: Digests of contents that other daemons received.
        self.sent: list[bytes] = []

    def add(self, upload: StartUpload) -> None:
        self._waiting.setdefault(_address(upload), deque()).append(upload)

    def run(self) -> Procedure[None]:
        """Run until all uploads have ended. Raises the first error."""
        while True:
            yield from self._start()
            if not self.running:
                return
            first = Outcome()
            for transfer in self.running:
                transfer.ended.add_callback(first.finish)
            if not first.done:
                yield WaitFor(first)
            for transfer in [one for one in self.running if one.ended.done]:
                self._ended(transfer, self.running.pop(transfer))

    def _start(self) -> Procedure[None]:
        """Start as many uploads as may run at once."""
        busy = Counter(map(_address, self.running.values()))
        for address, waiting in self._waiting.items():
            while waiting and busy[address] < _WINDOW:
                upload = waiting.popleft()
                self.running[(yield upload)] = upload
                busy[address] += 1

    def _ended(self, transfer: Transfer, upload: StartUpload) -> None:
        error = transfer.ended.error
        if upload.offer is not None and isinstance(error, UnreachableError | PermissionDeniedError):
            self.add(replace(upload, offer=None))
            if isinstance(error, UnreachableError):
                self._give_up(upload.offer.address)
            return
        self._core.raise_error(transfer.ended)
        if upload.offer is not None and isinstance(upload.target, bytes):
            self.sent.append(upload.target)

    def _give_up(self, address: str) -> None:
        """Leave contents for a daemon that cannot be reached to the server, from now on."""
        self._core.unreachable.add(address)
        for left in self._waiting.pop(address, ()):
            self.add(replace(left, offer=None))


def _address(upload: StartUpload) -> str:
    return upload.offer.address if upload.offer is not None else ""

"""Uploading the contents that a server lacks: to it, or to the daemon in whose memory they will lie.

Generators as in `_procedures`. What a daemon is to have that is not reachable, the server passes on.
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
from heliograph.core.progress import Meter, Progress
from heliograph.core.protocol import ClientCore
from heliograph.procedures.transfer import stop
from heliograph_proto.errors import ContentMismatchError, PermissionDeniedError, UnavailableError
from heliograph_proto.plans import ContentOffer

#: How many contents are uploaded at once, to each daemon.
_WINDOW = 3
#: How often what is missing is asked for and sent before an upload's error is the caller's.
_TRIES = 3

Contents: TypeAlias = Mapping[bytes, "np.ndarray[Any, Any]"]
#: Asks the server who takes missing contents.
Place: TypeAlias = Callable[[tuple[bytes, ...]], Procedure[tuple[ContentOffer, ...]]]


def upload_missing(
    core: ClientCore, contents: Contents, progress: Progress | None, place: Place
) -> Procedure[None]:
    """Sends the contents that the session does not hold, a few at a time."""
    if not contents:
        return
    for tries_left in reversed(range(_TRIES)):
        missing = yield from ask(FIND_MISSING, FindMissing(tuple(contents)))
        offers: Sequence[ContentOffer] = ()
        if missing and core.places_contents:
            offers = yield from place(tuple(digest for digest, _ in missing))
        try:
            yield from _upload(core, contents, missing, offers, progress)
            return
        except (UnavailableError, ContentMismatchError) as error:
            # Bulk has a connection of its own, which may have broken alone; or the beginning of a content,
            # where an upload was to go on, is gone or not what it should be.
            core.check()
            went_on = any(start for _, start in missing)
            if not tries_left or not (went_on or isinstance(error, UnavailableError)):
                raise


def _upload(
    core: ClientCore,
    contents: Contents,
    missing: Missing,
    offers: Sequence[ContentOffer],
    progress: Progress | None,
) -> Procedure[None]:
    """Sends contents, each from the byte where an earlier upload broke off."""
    views = [(digest, byte_view(contents[digest]), start) for digest, start in missing]
    meter = Meter("uploading weights", sum(view.nbytes - start for _, view, start in views), progress)
    uploads = _Uploads(core)
    ways = {one.digest: one for one in offers if one.address not in core.unreachable}
    for digest, view, start in views:
        uploads.add(
            StartUpload(digest, view, min(start, view.nbytes), progress=meter, offer=ways.get(digest))
        )
    try:
        yield from uploads.run()
        if uploads.sent:
            yield from _settle(tuple(uploads.sent))
    except BaseException:
        stop(core, [], list(uploads.under_way))
        raise
    finally:
        meter.end()


def _settle(sent: tuple[bytes, ...]) -> Procedure[None]:
    """Until the server has heard of what was brought to others. Raises UnavailableError."""
    missing = yield from ask(FIND_MISSING, FindMissing(sent, sent))
    if missing:
        raise UnavailableError(
            f"{len(missing)} contents came to other daemons, and the server does not know of them",
            advice="try again; is a member of its pool gone?",
        )


class _Uploads:
    """Uploads that wait, by the address to which they go ("": the server), and those under way."""

    def __init__(self, core: ClientCore) -> None:
        self._core = core
        self._waiting: dict[str, deque[StartUpload]] = {}
        self.under_way: dict[Transfer, StartUpload] = {}
        #: Digests that came to other daemons.
        self.sent: list[bytes] = []

    def add(self, upload: StartUpload) -> None:
        """One more."""
        self._waiting.setdefault(_address(upload), deque()).append(upload)

    def run(self) -> Procedure[None]:
        """Until all have ended. Raises the first error."""
        while True:
            yield from self._start()
            if not self.under_way:
                return
            yield from _any_ended(self.under_way)
            for transfer in [one for one in self.under_way if one.ended.done]:
                self._ended(transfer, self.under_way.pop(transfer))

    def _start(self) -> Procedure[None]:
        """Begins as many as may be under way."""
        busy = Counter(map(_address, self.under_way.values()))
        for address, waiting in self._waiting.items():
            while waiting and busy[address] < _WINDOW:
                upload = waiting.popleft()
                self.under_way[(yield upload)] = upload
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
        """A daemon cannot be reached: from now on the server passes on what goes there."""
        self._core.unreachable.add(address)
        for left in self._waiting.pop(address, ()):
            self.add(replace(left, offer=None))


def _address(upload: StartUpload) -> str:
    return upload.offer.address if upload.offer is not None else ""


def _any_ended(transfers: Mapping[Transfer, StartUpload]) -> Procedure[None]:
    first = Outcome()
    for transfer in transfers:
        transfer.ended.add_callback(first.finish)
    if not first.done:
        yield WaitFor(first)

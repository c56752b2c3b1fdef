"""Snapshots, and plans that are made again on a daemon that was restarted; see `core/replay.py`."""

from __future__ import annotations

from dataclasses import replace

from heliograph.core.effects import Procedure, ask
from heliograph.core.methods import COMPILE, RESERVE, SNAPSHOT
from heliograph.core.protocol import ClientCore
from heliograph.core.replay.journal import MadePlan
from heliograph.procedures.transfer import arrive, wait_for
from heliograph.procedures.upload import upload_missing
from heliograph_proto.errors import (
    HandleExistsError,
    HeliographError,
    MissingContentError,
    NotReplayableError,
    UnavailableError,
    UnknownHandleError,
    UnsupportedError,
)
from heliograph_proto.plans import CompileRequest
from heliograph_proto.sessions import SessionSnapshot


def repeat(core: ClientCore) -> Procedure[None]:
    """Make plans again, each in its turn, and wait until the daemon has every command.

    Raises NotReplayableError for a plan that cannot be made again, and UnavailableError if the
    connection breaks.
    """
    while (made := core.repetition.plan()) is not None:
        yield from wait_for(core, made.due)
        try:
            yield from _make(core, made)
        except UnavailableError:
            raise
        except HeliographError as error:
            raise NotReplayableError(
                f"the daemon was restarted, and a plan cannot be made again: {error.message}",
                advice="open another session, compile and run",
            ) from None
        core.repetition.made(made)
    yield from arrive(core)
    core.repetition.is_of_restart = False


def take_snapshot(core: ClientCore, wait_seconds: float | None) -> Procedure[SessionSnapshot]:
    """Take a snapshot after the commands sent so far.

    Raises UnsupportedError for a session that is not durable, and SnapshotFailedError.
    """
    if core.journal is None:
        raise UnsupportedError(
            "no snapshots are taken of this session",
            advice="hg.connect(url, durable=True), of a daemon with a folder: heliograph serve --state DIR",
        )
    yield from arrive(core)
    asked_after = core.last_sent
    found = yield from ask(SNAPSHOT, wait_seconds or 0.0)
    core.journal.durable_through(found.sequence, asked_after=asked_after)
    return found


def _make(core: ClientCore, made: MadePlan) -> Procedure[None]:
    request = made.request
    try:
        if not isinstance(request, CompileRequest):
            yield from ask(RESERVE, request)
            return
        yield from upload_missing(core, made.contents, None, None)
        try:
            yield from ask(COMPILE, request)
        except MissingContentError:
            yield from upload_missing(core, made.contents, None, None)
            yield from ask(COMPILE, request)
        except UnknownHandleError:
            # The plan that it updates is gone, since the snapshot has this one in its place.
            if not request.updates:
                raise
            yield from ask(COMPILE, replace(request, updates=0))
    except HandleExistsError:
        pass  # the snapshot has it

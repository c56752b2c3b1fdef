"""A command's work, as a lane sees it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from heliograph_backends.contract import Abort
from heliograph_proto.commands import Completion
from heliograph_server.core.handles import Lane
from heliograph_server.core.occupancy import Occupancy
from heliograph_server.core.ordering import Entry
from heliograph_server.core.several import SeveralPlan
from heliograph_server.core.tasks import RunTask

if TYPE_CHECKING:
    from heliograph_server.core.session_work import SessionWork


class Work:
    """One entry on its lane. Its methods report to the session as they go."""

    __slots__ = ("abort", "entry", "is_queued", "lane", "occupancy", "result", "session")

    def __init__(self, session: SessionWork, entry: Entry, lane: Lane, occupancy: Occupancy) -> None:
        self.session = session
        self.entry = entry
        self.lane = lane
        self.occupancy = occupancy
        self.abort = Abort()
        self.is_queued = False
        self.result = Completion(entry.sequence)

    def note_queued(self) -> None:
        """It waits in its lane. One on several devices comes to each of them at some other time."""
        task = self.entry.task
        if isinstance(task, RunTask) and not isinstance(task.plan.plan.plan, SeveralPlan):
            self.is_queued = True
            self.occupancy.run_queued()

    def note_done(self) -> None:
        """It is done, or will not be."""
        if self.is_queued:
            self.is_queued = False
            self.occupancy.run_done()

    def run(self) -> None:
        """On the lane's thread."""
        if self.session.begin_work(self):
            # What waits for bytes uses none of the device's workers.
            with nullcontext() if self.entry.takes_upload else self.occupancy:
                self._perform()

    def run_at_once(self) -> None:
        """On the thread that brought the command, which holds the session's lock."""
        if self.session.begin_work(self):
            self._perform()

    def _perform(self) -> None:
        try:
            self.result = self.session.do_work(self)
        except BaseException as error:  # it becomes the command's error
            self.session.work_failed(self, error)

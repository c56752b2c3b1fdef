"""Decisions of a model that serves many answers. Pure: no time, no input or output."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import heliograph as hg
from heliograph.llm.chunks import Chunk, cut, shared

#: The rows of decoding plans.
SIZES = (1, 2, 4, 8, 16, 32)
#: The steps of a decoding loop, and while a prompt waits for its next chunk.
STEPS = 16
STEPS_BETWEEN_CHUNKS = 4
#: The tokens of prompts, with their padding, that are computed between two loops.
TURN = 512
#: A slot that begins with fewer tokens of a prompt than these is as good as any other.
WORTH_REUSE = 16


class QueueFullError(hg.LimitExceededError):
    """As many requests wait for a slot as may."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most of each thing."""

    #: Answers at a time.
    slots: int = 8
    #: Requests that wait for a slot.
    queue: int = 64


@dataclass(eq=False, slots=True)
class Job:
    """A prompt, and the tokens of its answer so far."""

    tenant: str
    prompt: list[int]
    #: The most tokens of the answer.
    limit: int
    #: The model's variant, by which keys and values differ: an adapter's name.
    variant: str = ""
    answer: list[int] = field(default_factory=list)
    #: -1: it waits.
    slot: int = -1
    #: The tokens of its slot's cache that are right.
    filled: int = 0
    #: Those that were there when it began.
    reused: int = 0
    is_over: bool = False

    @property
    def tokens(self) -> list[int]:
        """The prompt and the answer so far."""
        return self.prompt + self.answer

    @property
    def is_filled(self) -> bool:
        """True if all but the last token are in the cache, which a decoding step takes."""
        return self.filled >= len(self.prompt) - 1


@dataclass(frozen=True, slots=True)
class Fill:
    """Take a chunk of a prompt into its slot."""

    job: Job
    chunk: Chunk


@dataclass(frozen=True, slots=True)
class Decode:
    """Run the plan of `rows` slots for up to `steps` steps."""

    jobs: tuple[Job, ...]
    rows: int
    steps: int


@dataclass(slots=True)
class _Slot:
    number: int
    job: Job | None = None
    #: The tokens whose keys and values it has.
    kept: list[int] = field(default_factory=list)
    #: The variant that computed them.
    variant: str = ""
    #: The order of use.
    used: int = 0

    def shares(self, job: Job) -> int:
        """The tokens of a prompt that it has."""
        return shared(self.kept, job.prompt) if self.variant == job.variant else 0


class Scheduler:
    """Decides which requests have slots, and what is computed next.

    Tenants take turns for slots; the requests of one are served in their order. Chunks of prompts
    and decoding loops take turns.
    """

    def __init__(self, bounds: Bounds, rows: int) -> None:
        """`rows` are the rows of a slot."""
        self.bounds = bounds
        self._rows = rows
        self._slots = [_Slot(number) for number in range(bounds.slots)]
        self._waiting: dict[str, deque[Job]] = {}
        self._uses = 0
        #: The tokens that were computed since the last loop.
        self._turn = 0

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a slot."""
        return sum(map(len, self._waiting.values()))

    @property
    def jobs(self) -> list[Job]:
        """The requests that have slots, in the order of these."""
        return [slot.job for slot in self._slots if slot.job is not None]

    @property
    def all_jobs(self) -> Iterator[Job]:
        """These, and those that wait."""
        yield from self.jobs
        for queue in self._waiting.values():
            yield from queue

    @property
    def could_admit(self) -> bool:
        """True if a request waits that could begin."""
        return bool(self._waiting) and any(slot.job is None for slot in self._slots)

    def room_for(self, count: int) -> None:
        """Raises QueueFullError unless so many more requests may come."""
        free = sum(slot.job is None for slot in self._slots)
        if self.waiting + count > self.bounds.queue + free:
            raise QueueFullError(
                f"{self.waiting} requests wait already, of at most {self.bounds.queue}",
                advice="send it again later",
            )

    def add(self, job: Job) -> None:
        """Queue a request. Raises as `room_for`."""
        self.room_for(1)
        self._waiting.setdefault(job.tenant, deque()).append(job)

    def end(self, job: Job) -> None:
        """End a request, and free its slot, which keeps its tokens. Idempotent."""
        job.is_over = True
        if (queue := self._waiting.get(job.tenant)) is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[job.tenant]
        slot = self._slots[job.slot] if job.slot >= 0 else None
        if slot is not None and slot.job is job:
            slot.kept = job.tokens[: job.filled]
            slot.job = None

    def forget(self) -> None:
        """Note that the cache may have lost everything."""
        for slot in self._slots:
            slot.kept = []

    def next(self) -> Fill | Decode | None:
        """Give slots to requests that wait, and return what is to be computed; None: nothing."""
        self._admit()
        filling = [job for job in self.jobs if not job.is_filled]
        decoding = [job for job in self.jobs if job.is_filled]
        if filling:
            job = min(filling, key=lambda one: self._slots[one.slot].used)
            chunk = next(cut(job.filled, len(job.prompt) - 1, self._rows))
            if not decoding or not self._turn or self._turn + chunk.size <= TURN:
                self._turn += chunk.size
                return Fill(job, chunk)
        self._turn = 0
        if not decoding:
            return None
        rows = next(size for size in SIZES if size > decoding[-1].slot)
        most = STEPS_BETWEEN_CHUNKS if filling else STEPS
        steps = min(most, *(job.limit - len(job.answer) for job in decoding))
        return Decode(tuple(decoding), rows, steps)

    def filled(self, fill: Fill) -> None:
        """Note that a chunk is in the cache."""
        fill.job.filled = fill.chunk.start + fill.chunk.count

    def chosen(self, job: Job, token: int) -> None:
        """Note the next token of an answer."""
        job.filled = len(job.prompt) + len(job.answer)
        job.answer.append(token)

    def _admit(self) -> None:
        while self._waiting and (free := [slot for slot in self._slots if slot.job is None]):
            # The tenant that had its turn goes to the end.
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            job = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            slot = min(free, key=lambda one: self._cost(one, job))
            self._uses += 1
            slot.used, slot.job, job.slot = self._uses, job, slot.number
            # The prompt's last token is computed once more: its row chooses the answer's first.
            job.filled = job.reused = min(slot.shares(job), len(job.prompt) - 1)
            slot.kept, slot.variant = [], job.variant

    def _cost(self, slot: _Slot, job: Job) -> tuple[int, int, int]:
        """The least is best: much of the prompt, then a small plan, then an old use."""
        found = slot.shares(job)
        size = next(size for size in SIZES if size > slot.number)
        return (-found if found >= WORTH_REUSE else 0, size, slot.used)

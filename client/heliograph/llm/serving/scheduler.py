"""Decisions of a model that serves many answers. Pure: no time, no input or output."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import heliograph as hg
from heliograph.llm.chunks import SIZES as CHUNKS
from heliograph.llm.chunks import Chunk, cut
from heliograph.llm.serving.pages import PAGE, Owner, Pages, Table, pages_of

#: The rows of decoding plans.
SIZES = (1, 2, 4, 8, 16, 32)
#: The most steps of a decoding loop, and while a prompt, or an answer of another kind, waits for
#: its turn.
STEPS = 4096
STEPS_BETWEEN_CHUNKS = 2
#: The steps for which an answer has pages. It gets another one when it has fewer.
AHEAD = PAGE // 2
#: The most tokens of prompts, with their padding, that are computed between two loops.
TURN = 512
#: The pages of a plan's tables: so many, and each time so many times more.
FEWEST_PAGES, GROWTH = 32, 4
#: The answers of a whole context that the cache holds, unless told otherwise.
WHOLE_CONTEXTS = 8


class QueueFullError(hg.LimitExceededError):
    """As many requests wait as may."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most of each thing."""

    #: Answers at a time.
    answers: int = SIZES[-1]
    #: Requests that wait.
    queue: int = 64
    #: Tokens whose keys and values the cache has; None: those of eight answers of a whole context.
    cache_tokens: int | None = None

    def pages(self, context: int) -> int:
        """The pages of the cache of a model with this context."""
        if self.cache_tokens is None:
            return min(self.answers, WHOLE_CONTEXTS) * pages_of(context)
        return self.cache_tokens // PAGE


@dataclass(eq=False, slots=True)
class Job:
    """A prompt, and the tokens of its answer so far."""

    tenant: str
    prompt: Sequence[int]
    #: The most tokens of the answer.
    limit: int
    #: Answers of different kinds are written by loops of different plans.
    kind: int = 0
    #: The model's variant, by which keys and values differ: an adapter's name.
    variant: str = ""
    #: The prompt and the answer so far.
    tokens: list[int] = field(init=False)
    #: Its pages; None: it waits.
    table: Table | None = None
    #: The tokens of its pages that are right.
    filled: int = 0
    #: Tokens of the prompt that pages of others had.
    reused: int = 0
    #: True if it was put back into the queue.
    was_put_back: bool = False
    is_over: bool = False

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def owner(self) -> Owner:
        """The sequences that its pages may be shared with."""
        return self.tenant, self.variant

    @property
    def pages(self) -> list[int]:
        """The places of its pages in the cache."""
        return [] if self.table is None else self.table.numbers

    @property
    def left(self) -> int:
        """The most tokens that the answer may still get."""
        return self.limit - (len(self.tokens) - len(self.prompt))

    @property
    def end(self) -> int:
        """The position before which steps may write to its pages."""
        pages = 0 if self.table is None else len(self.table.pages)
        return min(pages * PAGE, len(self.prompt) + self.limit - 1)

    @property
    def room(self) -> int:
        """The steps that its pages have room for."""
        return self.end - len(self.tokens) + 1

    @property
    def is_filled(self) -> bool:
        """True if all but the last token are in the cache, which a decoding step takes."""
        return self.filled >= len(self.tokens) - 1


@dataclass(frozen=True, slots=True)
class Fill:
    """Take a chunk of the tokens of a job into its pages, by the plan of tables of so many
    `pages`."""

    job: Job
    chunk: Chunk
    pages: int


@dataclass(frozen=True, slots=True)
class Decode:
    """Run a loop of the plan of `rows` answers, with tables of so many `pages`.

    It ends after `steps` steps, when `Scheduler.ends` says so, and when no answer can go on.
    """

    jobs: tuple[Job, ...]
    rows: int
    pages: int
    steps: int


class Scheduler:
    """Decides which requests are answered, and what is computed next.

    Tenants take turns; the requests of one are served in their order, and none overtakes another
    that waits for pages. Chunks of prompts and decoding loops take turns. An answer that needs a
    page when there is none puts the youngest one back to the front of the queue, which goes on
    later with the tokens that it has.
    """

    def __init__(self, bounds: Bounds, context: int) -> None:
        self.bounds = bounds
        #: The sizes of chunks, in falling order.
        self.chunks: Sequence[int] = CHUNKS
        #: The tokens of prompts between two loops, while answers that have begun wait: what takes
        #: the time of some steps. A chunk of the least size is computed in any case.
        self.turn = TURN
        self.pages = Pages(bounds.pages(context))
        #: Those with pages, in the order in which they got them.
        self.jobs: list[Job] = []
        #: The answers that were put back into the queue.
        self.puts_back = 0
        #: The pages that plans have tables of.
        self.table_sizes = table_sizes(min(pages_of(context), self.pages.total))
        self._waiting: dict[str, deque[Job]] = {}
        #: The tokens that were computed since the last loop.
        self._turn = 0
        #: The kind of the last loop.
        self._kind = 0
        #: The result of `could_admit`; None: something changed.
        self._could: bool | None = None

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def all_jobs(self) -> Iterator[Job]:
        """The requests that are answered, and those that wait."""
        yield from self.jobs
        for queue in self._waiting.values():
            yield from queue

    @property
    def could_admit(self) -> bool:
        """True if a request waits that could begin."""
        if self._could is None:
            first = self._first
            self._could = first is not None and self._fits(first)
        return self._could

    def room_for(self, count: int) -> None:
        """Raises QueueFullError unless so many more requests may come."""
        is_open = not self._waiting or self.could_admit
        free = self.bounds.answers - len(self.jobs) if is_open else 0
        if self.waiting + count > self.bounds.queue + free:
            raise QueueFullError(
                f"{self.waiting} requests wait already, of at most {self.bounds.queue}",
                advice="send it again later",
            )

    def add(self, job: Job) -> None:
        """Queue a request. Raises as `room_for`."""
        self.room_for(1)
        self._waiting.setdefault(job.tenant, deque()).append(job)
        self._could = None

    def end(self, job: Job) -> None:
        """End a request, and give its pages back. Idempotent."""
        job.is_over, self._could = True, None
        if (queue := self._waiting.get(job.tenant)) is not None and job in queue:
            queue.remove(job)
            if not queue:
                del self._waiting[job.tenant]
        self._close(job)

    def begin_again(self) -> None:
        """Put all answers back: the cache is lost. They go on with the tokens that they have."""
        while self.jobs:
            self._queue_again(self.jobs[-1])
        self._could, self._turn = None, 0
        self.forget()

    def forget(self) -> None:
        """Note that the cache may have lost everything. No request is being answered."""
        self.pages.forget()

    def next(self) -> Fill | Decode | None:
        """Give pages to requests that wait, and return what is to be computed; None: nothing.

        The work that was returned before has ended: pages that were given back are given away here.
        """
        self._could = None
        self.pages.collect()
        for job in self.jobs:
            self._adopt(job)
        self._admit()
        while self.jobs:
            filling = next((job for job in self.jobs if not job.is_filled), None)
            # Tokens that no step chose may need pages, too.
            if filling is not None and not self._grown([filling], 0):
                continue
            decoding = [job for job in self.jobs if job.is_filled]
            if filling is not None and (fill := self._fill(filling, decoding)) is not None:
                return fill
            self._turn = 0
            kinds = sorted({job.kind for job in decoding})
            self._kind = next((kind for kind in kinds if kind > self._kind), kinds[0])
            decoding = [job for job in decoding if job.kind == self._kind]
            steps = STEPS_BETWEEN_CHUNKS if filling or len(kinds) > 1 else STEPS
            if decoding := self._grown(decoding, AHEAD):
                pages = max(len(job.pages) for job in decoding)
                return Decode(tuple(decoding), _rows_for(len(decoding)), self._size(pages), steps)
        return None

    def grow(self, loop: Decode) -> list[tuple[int, Job]]:
        """Give answers of a running loop the pages that they soon need, and return those that got
        some, with their rows.

        An answer without pages waits in its row until the loop ends.
        """
        return [(row, job) for row, job in enumerate(loop.jobs) if self._grow(job, loop.pages)]

    def reserve(self, job: Job, steps: int, most: int) -> bool:
        """Give an answer pages for so many steps; False if there are too few, or if its table has
        more than `most` pages then."""
        tokens = len(job.tokens) - 1 + steps
        return job.table is not None and pages_of(tokens) <= most and self.pages.grow(job.table, tokens)

    def _grow(self, job: Job, most: int) -> bool:
        if job.table is None or job.room >= min(AHEAD, job.left):
            return False
        pages = len(job.table.pages)
        return pages < most and self.pages.grow(job.table, (pages + 1) * PAGE)

    def ends(self, loop: Decode) -> bool:
        """Return whether a running loop is to end after its present step: a request could begin, an
        answer needs a page or a chunk, or a plan of fewer rows does."""
        there = [job for job in loop.jobs if job.table is not None]
        if not there or self.could_admit or _rows_for(len(there)) < loop.rows:
            return True
        return not all(job.is_filled and job.room for job in there)

    def filled(self, fill: Fill) -> None:
        """Note that a chunk is in the cache."""
        self._note(fill.job, fill.chunk.start + fill.chunk.count)

    def chosen(self, job: Job, token: int) -> None:
        """Note the next token of an answer."""
        self._note(job, len(job.tokens))
        job.tokens.append(token)

    def _note(self, job: Job, filled: int) -> None:
        job.filled = filled
        if job.table is not None:
            self.pages.publish(job.table, job.tokens, filled)

    @property
    def _first(self) -> Job | None:
        """The request that is next to begin: of the tenant whose turn it is."""
        return next((queue[0] for queue in self._waiting.values()), None)

    def _fits(self, job: Job) -> bool:
        """True if a request may begin, with a page more for each answer in progress, so that it is
        not put back at once."""
        is_open = len(self.jobs) < self.bounds.answers
        return is_open and self.pages.fits(job.owner, job.tokens, len(self.jobs))

    def forced(self, job: Job, tokens: Sequence[int]) -> None:
        """Note tokens of an answer that no step chose: they are taken into the cache as a
        prompt."""
        job.tokens += tokens

    def _admit(self) -> None:
        while (job := self._first) is not None and self._fits(job):
            # The tenant that had its turn goes to the end.
            queue = self._waiting.pop(job.tenant)
            queue.popleft()
            if queue:
                self._waiting[job.tenant] = queue
            job.table = self.pages.open(job.owner, job.tokens)
            self.jobs.append(job)
            self._adopt(job)

    def _adopt(self, job: Job) -> None:
        """Share pages that became known before the job computed them."""
        table = job.table
        assert table is not None
        if job.filled <= table.found * PAGE:
            self.pages.adopt(table, job.tokens)
            found = table.found * PAGE
            if not job.was_put_back:
                job.reused += found - job.filled
            job.filled = found

    def _fill(self, job: Job, decoding: Sequence[Job]) -> Fill | None:
        """Return the next chunk of a prompt, unless it is the loop's turn."""
        has_begun = any(len(one.tokens) > len(one.prompt) for one in decoding)
        most = min(self.turn, TURN) if has_begun else TURN
        sizes = [size for size in self.chunks if size <= most] or self.chunks[-1:]
        chunk = next(cut(job.filled, len(job.tokens) - 1, sys.maxsize, sizes))
        if decoding and self._turn and self._turn + chunk.size > most:
            return None
        self._turn += chunk.size
        return Fill(job, chunk, self._size(pages_of(chunk.start + chunk.count)))

    def _grown(self, jobs: Sequence[Job], steps: int) -> list[Job]:
        """Give answers pages for so many steps, and return those that have them. The oldest first:
        the youngest ones are put back as long as there are too few."""
        for job in jobs:
            tokens = len(job.tokens) - 1 + min(steps, job.left)
            while job.table is not None and not self.pages.grow(job.table, tokens):
                self._put_back(self.jobs[-1])
        return [job for job in jobs if job.table is not None]

    def _put_back(self, job: Job) -> None:
        self._queue_again(job)
        self.puts_back += 1

    def _queue_again(self, job: Job) -> None:
        """Put an answer to the front of the queue, without its pages."""
        self._close(job)
        self.pages.collect()
        job.filled, job.was_put_back = 0, True
        queue = self._waiting.pop(job.tenant, deque())
        queue.appendleft(job)
        self._waiting = {job.tenant: queue, **self._waiting}

    def _close(self, job: Job) -> None:
        if job.table is not None:
            self.pages.close(job.table)
            job.table = None
            self.jobs.remove(job)

    def _size(self, pages: int) -> int:
        """Return the pages of the least tables that have so many."""
        return next(size for size in self.table_sizes if size >= pages)


def _rows_for(count: int) -> int:
    """Return the rows of the least plan that has so many."""
    return next(size for size in SIZES if size >= count)


def table_sizes(most: int) -> list[int]:
    """Return the numbers of pages that plans have tables of."""
    sizes, size = [], FEWEST_PAGES
    while size < most:
        sizes.append(size)
        size *= GROWTH
    return [*sizes, most]


def places_of(numbers: Sequence[int], chunk: Chunk, spare: int) -> list[int]:
    """Return the rows of the cache that a chunk's tokens are written to; padding goes to those of a
    spare page."""
    places = range(chunk.start, chunk.start + chunk.count)
    own = [numbers[place // PAGE] * PAGE + place % PAGE for place in places]
    return own + [spare * PAGE + place % PAGE for place in range(chunk.size - chunk.count)]

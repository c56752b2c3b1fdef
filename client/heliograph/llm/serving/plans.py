"""The plans of a served model: compiled when they are first needed, and freed when too many are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import heliograph as hg
from heliograph.llm import chunks
from heliograph.llm.current_session import CurrentSession
from heliograph.llm.effects import awaiting
from heliograph.llm.files.adapters import Lora
from heliograph.llm.generating import built
from heliograph.llm.graphs import Decoder
from heliograph.llm.sampling import CANDIDATES, Form
from heliograph.llm.serving.graphs import PagedDecoder
from heliograph.llm.serving.scheduler import SIZES, Scheduler
from heliograph.llm.spreading import Spreading

#: The most plans.
MOST_PLANS = 64


class ServedPlans:
    """The plans of a model whose cache is the pages of a scheduler.

    `loras` are the adapters of its variants; `options` are those of compiles.
    """

    def __init__(
        self,
        session: CurrentSession,
        decoder: Decoder,
        scheduler: Scheduler,
        loras: tuple[Lora, ...],
        options: Any,
    ) -> None:
        self._session, self._decoder, self._scheduler, self._loras = session, decoder, scheduler, loras
        self._spreading = Spreading(session, partial(built, decoder.weights, self._whole), options)
        #: The plans, the least recently used first.
        self._plans: dict[Any, Any] = {}
        self._cache = replace(decoder.cache, name=f"{decoder.cache.name}-pages")

    def __repr__(self) -> str:
        return f"<ServedPlans: {len(self._plans)}>"

    @property
    def known(self) -> Mapping[Any, Any]:
        """The plans by their keys, the least recently used first."""
        return self._plans

    @property
    def spare(self) -> int:
        """The page for rows that are not read: the one after those of answers."""
        return self._scheduler.pages.total

    def decoder(self, *, is_adapted: bool) -> PagedDecoder:
        """Return what builds the graphs."""
        made, loras = self._decoder, self._loras if is_adapted else ()
        return PagedDecoder(made.config, made.weights, self._cache, self.spare, loras)

    async def prepare(self) -> None:
        """Compile the plan that has all weights first, and those of all numbers of rows. Sizes of
        chunks whose plans do not fit beside them are left out."""
        sizes = [size for size in chunks.SIZES if size <= self._decoder.cache.rows]
        async for _ in awaiting(self._spreading.fit(sizes, self._later), self._fitted):
            pass
        pages, most = self._scheduler.table_sizes[0], self._scheduler.bounds.answers
        for rows in SIZES:
            for is_adapted in {False, bool(self._loras)}:
                await self.decoding(rows, pages, Form(CANDIDATES), is_adapted=is_adapted)
            if rows >= most:
                break

    async def decoding(self, rows: int, pages: int, form: Form, *, is_adapted: bool) -> Any:
        """Return the plan of `PagedDecoder.decode`. Raises as `plan`."""
        build = partial(self.decoder(is_adapted=is_adapted).decode, rows, pages, form)
        return await self.plan((rows, pages, form, is_adapted), build)

    async def filling(self, size: int, pages: int, *, is_adapted: bool) -> Any:
        """Return the plan of `PagedDecoder.fill`. Raises as `plan`."""
        build = partial(self.decoder(is_adapted=is_adapted).fill, size, pages)
        return await self.plan(("fill", size, pages, is_adapted), build)

    async def plan(self, key: Any, build: Callable[[], hg.Graph]) -> Any:
        """Return a plan, which is compiled unless it is there. Frees the one that was not used for
        the longest time if there are too many; that with all weights stays. Raises the errors of
        `session.compile`."""
        if key in self._plans:
            self._plans[key] = self._plans.pop(key)
        else:
            keep = partial(self._plans.__setitem__, key)
            async for _ in awaiting(self._spreading.compiled(built(self._decoder.weights, build)), keep):
                pass
            others = [one for one in self._plans if one != self._first]
            for oldest in others[: max(0, len(self._plans) - MOST_PLANS)]:
                self._plans.pop(oldest).free()
        return self._plans[key]

    def forget(self) -> None:
        """Note that the plans and the cache went with their session. The next plan makes them
        anew."""
        self._plans.clear()
        self._spreading.forget()

    async def free(self) -> None:
        """Free the plans and the cache. The next plan makes them anew, without devices that are
        lost."""
        names = {name for plan in self._plans.values() for name in plan.variables}
        for plan in self._plans.values():
            plan.free()
        self.forget()
        # Plans read a draft's proposals too, which are not theirs. Names begin with their scopes.
        for name in sorted(name for name in names if f"/{self._cache.name}/" in f"/{name}"):
            # The step after tells of a connection that is lost, too.
            with suppress(hg.WorkError, hg.ConnectionError):
                await self._session.free_variable(name)

    @property
    def _first(self) -> tuple[int, int, Form, bool]:
        """The key of the plan that has all weights."""
        return SIZES[0], self._scheduler.table_sizes[0], Form(CANDIDATES), bool(self._loras)

    def _whole(self) -> hg.Graph:
        rows, pages, form, is_adapted = self._first
        return self.decoder(is_adapted=is_adapted).decode(rows, pages, form)

    def _later(self, sizes: Sequence[int]) -> Iterator[hg.Graph]:
        """Yield the graphs of prompts and of a choice among candidates, for the largest tables."""
        decoder, pages = self.decoder(is_adapted=bool(self._loras)), self._scheduler.table_sizes[-1]
        yield from (built(self._decoder.weights, partial(decoder.fill, size, pages)) for size in sizes)
        rows = next(size for size in SIZES if size >= self._scheduler.bounds.answers)
        yield decoder.decode(rows, pages, Form(CANDIDATES, is_biased=True, has_logprobs=True))

    def _fitted(self, found: tuple[Any, Sequence[int]]) -> None:
        self._plans[self._first], self._scheduler.chunks = found

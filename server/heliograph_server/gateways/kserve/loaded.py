"""A version of a model that takes requests."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol

from heliograph_proto.errors import InvalidInputError, UnsupportedError
from heliograph_server.gateways.kserve.dispatcher import Dispatcher
from heliograph_server.gateways.kserve.models import AnyModel, ModelPorts, OpenedModel, WritingModel
from heliograph_server.gateways.kserve.prompts import ANSWER, REASON, prompt_of
from heliograph_server.gateways.kserve.repository import ModelSettings
from heliograph_server.gateways.kserve.requests import InferOptions
from heliograph_server.gateways.kserve.sequences import Sequences
from heliograph_server.gateways.kserve.statistics import ModelStatistics, RunTimes
from heliograph_server.gateways.kserve.tensors import Array, text
from heliograph_server.gateways.kserve.writers import Writer

#: Outputs by name, and whether they are the last ones of their request.
Answer = tuple[dict[str, Array], bool]


class _Work(Protocol):
    """The way in which a model does its requests."""

    @property
    def waiting(self) -> int:
        """The number of requests that have not begun."""
        ...

    def answers(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float
    ) -> AsyncGenerator[Answer]:
        """Yield the answers to a request."""
        ...

    async def infer(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float
    ) -> dict[str, Array]:
        """Return the answers to a request as one."""
        ...

    async def end_idle(self) -> None:
        """Give back what is not in use."""
        ...

    async def close(self) -> None:
        """Answer the requests that wait, and end."""
        ...


class _Runs:
    """Requests that share runs, or are the next ones of sequences."""

    def __init__(
        self,
        name: str,
        opened: OpenedModel,
        settings: ModelSettings,
        statistics: ModelStatistics,
        open_another: Callable[[], OpenedModel],
    ) -> None:
        self._name, self._settings = name, settings
        policy = settings.policy(opened.ports.most_rows)
        self._dispatcher = Dispatcher(name, opened.run, policy, settings.instances, statistics)
        idle_seconds = settings.sequence_idle_seconds
        self._sequences = Sequences(name, open_another, statistics, settings.sequences, idle_seconds)
        self._close = opened.close

    @property
    def waiting(self) -> int:
        return self._dispatcher.waiting

    async def answers(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float
    ) -> AsyncGenerator[Answer]:
        yield await self.infer(tenant, feeds, options, seconds), True

    async def infer(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float
    ) -> dict[str, Array]:
        if self._settings.sequences:
            if not options.sequence:
                raise InvalidInputError(
                    f"the model {self._name!r:.80} keeps state for each sequence, and sequence_id is missing"
                )
            return await self._sequences.infer(tenant, feeds, options, seconds)
        check_no_sequence(self._name, options)
        seconds = min(options.seconds, seconds)
        return await self._dispatcher.infer(feeds, options.priority, seconds, tenant)

    async def end_idle(self) -> None:
        await self._sequences.end_idle()

    async def close(self) -> None:
        await self._sequences.close()
        await asyncio.to_thread(self._dispatcher.close)
        await asyncio.to_thread(self._close)


class _Texts:
    """Prompts that are continued, many at a time."""

    def __init__(self, name: str, writer: Writer, statistics: ModelStatistics) -> None:
        self._name, self._writer, self._statistics = name, writer, statistics

    @property
    def waiting(self) -> int:
        return self._writer.waiting

    async def answers(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float
    ) -> AsyncGenerator[Answer]:
        check_no_sequence(self._name, options)
        prompt = prompt_of(feeds, options.parameters)
        began, is_answered = time.monotonic(), False
        kept = prompt.text if prompt.has_text else ""
        pieces = self._writer.answer(tenant, prompt, min(options.seconds, seconds))
        try:
            async with aclosing(pieces):
                async for piece in pieces:
                    kept += piece.text
                    if piece.reason:
                        self._count(time.monotonic() - began, piece.prompt_seconds)
                        is_answered = True
                    if prompt.is_stream or piece.reason:
                        outputs = {ANSWER: text(kept), REASON: text(piece.reason)}
                        kept = ""
                        yield outputs, bool(piece.reason)
        finally:
            self._statistics.answered(time.monotonic() - began, failed=not is_answered)

    async def infer(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float
    ) -> dict[str, Array]:
        found = [one async for one, _ in self.answers(tenant, feeds, options, seconds)]
        whole = b"".join(one[ANSWER].item() for one in found)
        return {**found[-1], ANSWER: text(whole.decode())}

    def _count(self, seconds: float, prompt_seconds: float) -> None:
        times = RunTimes(prompt_seconds, max(seconds - prompt_seconds, 0.0), 0.0)
        self._statistics.ran(1, [0.0], times)

    async def end_idle(self) -> None:
        pass

    async def close(self) -> None:
        await asyncio.to_thread(self._writer.close)


def check_no_sequence(name: str, options: InferOptions) -> None:
    """Raises UnsupportedError for a request of a sequence."""
    if options.sequence:
        raise UnsupportedError(
            f"the model {name!r:.80} keeps no state for sequences",
            advice="leave sequence_id out; sequences in model.toml allows them",
        )


class LoadedModel:
    """A version of a model that takes requests."""

    def __init__(
        self,
        name: str,
        version: str,
        opened: AnyModel,
        settings: ModelSettings,
        open_another: Callable[[], Any],
    ) -> None:
        """`open_another` opens the same version in a further session; it blocks."""
        self.name, self.version, self.settings = name, version, settings
        self.policy = settings.policy(opened.ports.most_rows)
        #: The counts and times of its requests.
        self.statistics = ModelStatistics()
        self._opened = opened
        self._work: _Work
        if isinstance(opened, WritingModel):
            self._work = _Texts(name, opened.writer, self.statistics)
        else:
            self._work = _Runs(name, opened, settings, self.statistics, open_another)

    @property
    def ports(self) -> ModelPorts:
        """Its inputs and outputs."""
        return self._opened.ports

    @property
    def writes(self) -> bool:
        """True for a language model that continues prompts: a request may have several answers."""
        return isinstance(self._opened, WritingModel)

    @property
    def is_lost(self) -> bool:
        """True if its session has ended."""
        return self._opened.is_lost

    @property
    def waiting(self) -> int:
        """The number of requests that wait for their run, but for those of sequences."""
        return self._work.waiting

    async def infer(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float = math.inf
    ) -> dict[str, Array]:
        """Run a request, and return its outputs: those of a text in pieces, joined.

        Raises UnsupportedError and InvalidInputError for a sequence that the model cannot have, and
        the errors of `Dispatcher.infer` and `Writer.answer`.
        """
        return await self._work.infer(tenant, feeds, options, seconds)

    def answers(
        self, tenant: str, feeds: Mapping[str, Array], options: InferOptions, seconds: float = math.inf
    ) -> AsyncGenerator[Answer]:
        """Run a request, and yield its answers. Raises as `infer`."""
        return self._work.answers(tenant, feeds, options, seconds)

    async def end_idle(self) -> None:
        """End the sequences that had no request for a while."""
        await self._work.end_idle()

    async def close(self) -> None:
        """Answer the requests that wait, and end its sessions."""
        await self._work.close()

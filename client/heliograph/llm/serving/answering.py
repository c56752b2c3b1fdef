"""An answer that a server of many writes, as its reader sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import heliograph as hg
from heliograph.llm.constraints import Matcher
from heliograph.llm.generating import AnyPieces, Array, Logprob, Reason, Request, Result, take
from heliograph.llm.serving.scheduler import Job
from heliograph.llm.speculating import Lookup
from heliograph.llm.tools import ToolCall


@dataclass(frozen=True, slots=True)
class Delta:
    """The addition of a token, or of the end, to an answer."""

    text: str = ""
    logprob: Logprob | None = None
    #: Whether it came with a token.
    is_token: bool = False
    #: The model's thoughts, and the tools that it calls.
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def has_parts(self) -> bool:
        """True if it adds something that a reader sees."""
        return bool(self.text or self.reasoning or self.tool_calls or self.logprob is not None)


class Answering:
    """An answer in progress: an asynchronous iterator of what is added to it.

    Its length is bounded by the context, so a slow reader costs memory for one answer at most.
    """

    def __init__(
        self, job: Job, request: Request, pieces: AnyPieces, result: Result, deadline: float
    ) -> None:
        self.job = job
        #: Its grammar, if it follows one.
        self.matcher: Matcher | None = None
        #: Proposes its next tokens, if its text so far does.
        self.lookup = Lookup([])
        self.request = request
        self.result = result
        #: The end of its time, by `time.monotonic`.
        self.deadline = deadline
        #: By `time.perf_counter`.
        self.begun = time.perf_counter()
        #: The seconds between each two of its tokens.
        self.gaps: list[float] = []
        self._last = self.begun
        self._pieces = pieces
        #: The sessions that were lost since its last token, and its tokens then.
        self._losses = self._had = 0
        #: The parts of the result's reasoning and calls that were given.
        self._thought = self._calls = 0
        self._deltas: asyncio.Queue[Delta | hg.HeliographError | None] = asyncio.Queue()
        self._leave: Callable[[Answering], None] = lambda _: None

    def on_leave(self, leave: Callable[[Answering], None]) -> None:
        """Set what gives its pages back."""
        self._leave = leave

    def close(self) -> None:
        """End the answer here. Its pages are free after the present step or later. Idempotent."""
        self._leave(self)

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield what is added. Raises the error that ended the answer."""
        try:
            while (found := await self._deltas.get()) is not None:
                if isinstance(found, hg.HeliographError):
                    raise found
                yield found
        finally:
            self.close()

    # The server's side

    def add(self, chosen: Array) -> bool:
        """Add a token, and return whether the answer is complete."""
        result, now = self.result, time.perf_counter()
        if not result.tokens:
            result.prompt_seconds = now - self.begun
        else:
            self.gaps.append(now - self._last)
        self._last = now
        result.seconds = now - self.begun - result.prompt_seconds
        has_logprob = self.request.settings.logprobs
        token = take(chosen if has_logprob else chosen[:1], result)
        logprob = result.logprobs[-1] if has_logprob else None
        if token in self.request.ends:
            self._give("", logprob, is_token=True)
            self.end("stop")
            return True
        self._give(self._pieces.add(token), logprob, is_token=True)
        # An answer with a grammar may end with its last token: `is_complete` tells.
        is_full = self.matcher is None and len(result.tokens) >= self.job.limit
        if self._pieces.is_stopped or is_full:
            self.end("stop" if self._pieces.is_stopped else "length")
            return True
        return False

    def is_complete(self) -> bool:
        """Return whether an answer with a grammar is complete, after the grammar has its tokens."""
        assert self.matcher is not None
        is_full = len(self.result.tokens) >= self.job.limit
        if self.matcher.is_over or is_full:
            self.end("stop" if self.matcher.is_over else "length")
            return True
        return False

    def end(self, reason: Reason) -> None:
        """Complete the answer."""
        self._give(self._pieces.rest())
        self.result.end("stop" if self._pieces.is_stopped else reason)
        self._deltas.put_nowait(None)

    def lose(self) -> int:
        """Note that its session is lost, and return how often that was so since its last token."""
        self._losses = self._losses + 1 if len(self.result.tokens) == self._had else 1
        self._had = len(self.result.tokens)
        return self._losses

    def fail(self, error: hg.HeliographError) -> None:
        """End the answer with an error."""
        self._deltas.put_nowait(error)

    def _give(self, text: str, logprob: Logprob | None = None, *, is_token: bool = False) -> None:
        """Give what was added, with what the pieces kept in the result."""
        result = self.result
        result.text += text
        thought, calls = result.reasoning[self._thought :], tuple(result.tool_calls[self._calls :])
        self._thought, self._calls = len(result.reasoning), len(result.tool_calls)
        if is_token or text or thought or calls:
            self._deltas.put_nowait(Delta(text, logprob, is_token, thought, calls))

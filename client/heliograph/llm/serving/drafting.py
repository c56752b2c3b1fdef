"""An answer of a server whose proposed tokens are checked in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from heliograph.llm.configuration import Configuration
from heliograph.llm.effects import Ask, Procedure
from heliograph.llm.generating import Array
from heliograph.llm.graphs import Decoder
from heliograph.llm.sampling import Form
from heliograph.llm.serving.graphs import PagedDecoder


@dataclass(frozen=True, slots=True)
class Checking:
    """The pages of an answer, as `speculating.Checked` wants them."""

    decoder: PagedDecoder
    #: The pages of the plan's table.
    pages: int
    #: The inputs that are the answer's: its table, its places, and its adapter.
    own: Mapping[str, Array]
    #: Returns a plan by its key and what builds its graph.
    plan: Callable[..., Any]

    @property
    def config(self) -> Configuration:
        """The sizes of the model."""
        return self.decoder.config

    def key(self, form: Form, count: int) -> Any:
        """Return the key of the plan that checks so many proposals."""
        return "check", self.pages, form, count, bool(self.decoder.loras)

    def checking(self, form: Form, count: int, proposer: Decoder | None, most: int) -> Procedure[Any, Any]:
        """Return the plan of `PagedDecoder.check`."""
        build = partial(self.decoder.check, self.pages, form, count, proposer, most)
        return (yield Ask(partial(self.plan, self.key(form, count), build)))

    def given(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Return the inputs of such a plan."""
        return {**inputs, **self.own}

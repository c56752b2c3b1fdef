"""Checks of one part of the contract, collected by a decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from heliograph_backends.conformance.harness.bench import Bench
from heliograph_backends.conformance.harness.case import ContractCase

#: Raises MismatchError or NotSupportedError, or what the backend raised where it should not.
Check: TypeAlias = Callable[[Bench, np.random.Generator], None]


class ContractPart:
    """A part of the contract: its name, and its checks, each under the first line of its docstring."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._checks: list[Check] = []

    def __call__(self, check: Check) -> Check:
        """Registers a check."""
        self._checks.append(check)
        return check

    def cases(self) -> Iterator[ContractCase]:
        """A case of each check."""
        for check in self._checks:
            said = (check.__doc__ or "").strip().splitlines()[0].rstrip(".")
            yield ContractCase(self.name, said, check)

"""The suite as pytest cases. A backend needs a test module of two lines:

from heliograph_backends.conformance.pytest import conformance_tests
TestConformance = conformance_tests(lambda: MyDevice())
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from heliograph_backends.conformance.harness.bench import WORK_SECONDS
from heliograph_backends.conformance.harness.case import Case
from heliograph_backends.conformance.harness.outcome import CaseOutcome
from heliograph_backends.conformance.runner import SEED, Suite, select
from heliograph_backends.contract import Device


def conformance_tests(
    open_device: Callable[[], Device],
    *,
    op: str | None = None,
    match: str | None = None,
    seed: int = SEED,
    quick: bool = False,
    seconds: float = WORK_SECONDS,
) -> type:
    """Return a class with a test for each case, named by its id; the device is opened once for
    all."""
    cases = select(op=op, match=match, quick=quick)

    class Conformance:
        @pytest.fixture(scope="class")
        @classmethod
        def suite(cls) -> Iterator[Suite]:
            device = open_device()
            made = Suite(device, seed, seconds)
            try:
                made.begin()
                yield made
            finally:
                made.close()
                device.close()

        @pytest.mark.parametrize("case", cases, ids=[case.id for case in cases])
        def test_conformance(self, case: Case, suite: Suite) -> None:
            result = suite.run(case)
            if result.outcome is CaseOutcome.NOT_SUPPORTED:
                pytest.skip(result.detail)
            assert result.outcome is CaseOutcome.PASSED, f"{result} (seed {seed})"

    return Conformance

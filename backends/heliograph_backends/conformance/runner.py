"""Running cases on a device, each within a bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from heliograph_backends.conformance.cases import all_cases
from heliograph_backends.conformance.harness.bench import WORK_SECONDS, Bench
from heliograph_backends.conformance.harness.case import Case
from heliograph_backends.conformance.harness.outcome import (
    CaseOutcome,
    LostError,
    MismatchError,
    NotSupportedError,
    Result,
)
from heliograph_backends.conformance.report import Report
from heliograph_backends.contract import Device
from heliograph_proto.errors import InvalidArgumentError

SEED = 20250314
#: A case is several pieces of work: how many times their seconds it may take in all.
PIECES = 4
#: After so many cases whose work never ended the others are not run: each would take as long.
MOST_LOST = 3


def select(*, op: str | None = None, match: str | None = None, quick: bool = False) -> list[Case]:
    """The cases of an op or a part of the contract, whose ids contain a text, or of the quick subset.

    Raises InvalidArgumentError if there is none.
    """
    groups = dict.fromkeys(case.group for case in all_cases())
    if op is not None and op not in groups:
        near = get_close_matches(op, groups, 1)
        advice = f"did you mean {near[0]!r}?" if near else "`heliograph ops` lists the ops"
        raise InvalidArgumentError(f"the suite has no cases of {op[:64]!r}", advice=advice)
    found = [
        case
        for case in all_cases()
        if (op is None or case.group == op)
        and (match is None or match in case.id)
        and (case.quick or not quick)
    ]
    if not found:
        raise InvalidArgumentError(
            f"no case has {match!r} in its id", advice="`heliograph conformance --list` lists the cases"
        )
    return found


def run(
    device: Device,
    *,
    op: str | None = None,
    match: str | None = None,
    seed: int = SEED,
    quick: bool = False,
    seconds: float = WORK_SECONDS,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Runs the suite, or a part of it, on a device that is otherwise idle.

    A case's data depend on the seed and its id alone. `seconds`: what one piece of work may take.
    Raises InvalidArgumentError if there is no such case; what a device does wrong is in the report.
    """
    return run_cases(device, select(op=op, match=match, quick=quick), seed, seconds, on_result)


def run_cases(
    device: Device,
    cases: Sequence[Case],
    seed: int = SEED,
    seconds: float = WORK_SECONDS,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Runs these cases."""
    began, results = time.monotonic(), []
    suite = Suite(device, seed, seconds)
    try:
        for case in cases:
            result = suite.run(case)
            results.append(result)
            if on_result is not None:
                on_result(result)
    finally:
        suite.close()
    return Report(device.name, seed, tuple(results), time.monotonic() - began)


class Suite:
    """A device under test, one case after another."""

    def __init__(self, device: Device, seed: int = SEED, seconds: float = WORK_SECONDS) -> None:
        self._device, self._seconds = device, seconds
        self._bench = Bench(device, seconds)
        self._seed = seed
        self._lost = 0

    def begin(self) -> None:
        """Makes the stream now, and not with the first case. Raises what the device does."""
        self._bench.run(lambda: None)

    def run(self, case: Case) -> Result:
        """Runs a case; never raises for what the device does."""
        if self._lost >= MOST_LOST:
            return Result(
                case.id, case.group, CaseOutcome.FAILED, f"not run: {self._lost} cases before it never ended"
            )
        began = time.monotonic()
        outcome, detail, error = CaseOutcome.PASSED, "", 0.0
        try:
            error = self._within_bound(case)
        except NotSupportedError as why:
            outcome, detail = CaseOutcome.NOT_SUPPORTED, str(why)
        except LostError as why:
            outcome, detail = CaseOutcome.FAILED, str(why)
            self._begin_anew()
        except MismatchError as why:
            outcome, detail = CaseOutcome.FAILED, str(why)
        except Exception as why:
            outcome, detail = CaseOutcome.FAILED, f"{type(why).__name__}: {why}"
        return Result(case.id, case.group, outcome, detail, error, time.monotonic() - began)

    def _within_bound(self, case: Case) -> float:
        """On a thread of its own, so that a call that never returns does not keep the suite."""
        box: list[float | BaseException] = []

        bench = self._bench

        def work() -> None:
            try:
                box.append(case.run(bench, self._seed))
            except BaseException as error:  # it is raised again where it is waited for
                box.append(error)

        thread = threading.Thread(target=work, name="heliograph-conformance", daemon=True)
        thread.start()
        bound = PIECES * self._seconds
        thread.join(bound)
        if not box:
            raise LostError(f"the case did not end within {bound:g} s")
        if isinstance(box[0], BaseException):
            raise box[0]
        return box[0]

    def _begin_anew(self) -> None:
        """Leaves the lost work what it has, should it go on."""
        self._lost += 1
        self._bench.lost = True
        self._bench = Bench(self._device, self._seconds)

    def close(self) -> None:
        """Closes what the suite made on the device; the device stays open."""
        self._bench.close()

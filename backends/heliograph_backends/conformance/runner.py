"""Runs cases on a device, each with a time limit."""

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
#: The time limit of a case, in multiples of that of a piece of work: a case has several pieces.
PIECES = 4
#: The number of cases with lost work after which the rest is not run: each would take its time
#: limit.
MOST_LOST = 3


def select(*, op: str | None = None, match: str | None = None, quick: bool = False) -> list[Case]:
    """Return the cases of an op or a part of the contract, with a text in their ids, or of the
    quick subset.

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
    """Run the suite, or a part of it, on a device that is otherwise idle.

    A case's data depend only on the seed and its id. `seconds` is the time limit of a piece of
    work. Raises InvalidArgumentError if there is no such case. Failures of the device are in the
    report.
    """
    return run_cases(device, select(op=op, match=match, quick=quick), seed, seconds, on_result)


def run_cases(
    device: Device,
    cases: Sequence[Case],
    seed: int = SEED,
    seconds: float = WORK_SECONDS,
    on_result: Callable[[Result], None] | None = None,
) -> Report:
    """Run these cases."""
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
    """A device under test, which runs one case at a time."""

    def __init__(self, device: Device, seed: int = SEED, seconds: float = WORK_SECONDS) -> None:
        self._device, self._seconds = device, seconds
        self._bench = Bench(device, seconds)
        self._seed = seed
        self._lost = 0

    def begin(self) -> None:
        """Make the stream now instead of in the first case. Raises the device's errors."""
        self._bench.run(lambda: None)

    def run(self, case: Case) -> Result:
        """Run a case. The device's errors are in the result."""
        if self._lost >= MOST_LOST:
            return Result(
                case.id, case.group, CaseOutcome.FAILED, f"not run: {self._lost} cases before it never ended"
            )
        began = time.monotonic()
        outcome, detail, error = CaseOutcome.PASSED, "", 0.0
        missing: tuple[str, ...] = ()
        try:
            error = self._within_bound(case)
        except NotSupportedError as why:
            outcome, detail, missing = CaseOutcome.NOT_SUPPORTED, str(why), why.missing_ops
        except LostError as why:
            outcome, detail = CaseOutcome.FAILED, str(why)
            self._begin_anew()
        except MismatchError as why:
            outcome, detail = CaseOutcome.FAILED, str(why)
        except Exception as why:
            outcome, detail = CaseOutcome.FAILED, f"{type(why).__name__}: {why}"
        seconds = time.monotonic() - began
        return Result(case.id, case.group, outcome, detail, error, seconds, missing)

    def _within_bound(self, case: Case) -> float:
        """Run a case on a thread of its own, so that a call that never returns does not block the
        suite."""
        box: list[float | BaseException] = []
        bench = self._bench

        def work() -> None:
            try:
                box.append(case.run(bench, self._seed))
            except BaseException as error:  # raised again below, in the caller's thread
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
        """Switch to a new bench. The lost work keeps the old one's memory, as it may still run."""
        self._lost += 1
        self._bench.lost = True
        self._bench = Bench(self._device, self._seconds)

    def close(self) -> None:
        """Close the suite's stream; the device stays open."""
        self._bench.close()

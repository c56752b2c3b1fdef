"""The conformance suite finds what is wrong with a backend: each defect, by the case that is there for it."""

from __future__ import annotations

import broken_backends as broken
import broken_parts as parts
import pytest
from broken_backends import Intact, with_plan
from broken_parts import with_memory, with_stream

from heliograph_backends.conformance import CaseOutcome, Report, run, run_cases, select
from heliograph_backends.cpu import kernels

#: A lost piece of work is waited for no longer than this; what is not lost takes a thousandth of it.
SECONDS = 0.5

P, S, M = with_plan, with_stream, with_memory
#: A device with one defect, a part of the id of a case that must fail, and what the failure says.
DEFECTS: list[tuple[type[Intact], str, str]] = [
    (P(broken.OffByAHundredth), "exp(f32[7, 33])", "output 0: NMSE 0.0001, allowed 1e-07; largest error"),
    (P(broken.OneWrongElement), "mul_mat(f32[261, 259], f32[131, 259])", "output 0: NMSE"),
    (P(broken.OneWrongElement), "get_rows(i16[9, 5], i64[4] below 9)", "1 of 20 elements differ, first"),
    (P(broken.WritesBehind), "add(f32[7, 33], f32[7, 33])", "wrote the byte 0 behind output 0 (f32[7, 33])"),
    (P(broken.WritesBefore), "add(f32[7, 33], f32[7, 33])", "wrote the byte 1 before output 0"),
    (P(broken.WritesGaps), "graph(outputs in memory with strides)", "a gap in output 1"),
    (P(broken.WritesInputs), "neg(f32[7, 33])", "the run changed input0 (f32[7, 33]), byte 0"),
    (P(broken.WritesWeights), "mul_mat(f32[70, 33] weight, f32[65, 33])", "the run changed weight0"),
    (P(broken.ComputesIntegersAsFloats), "add(i64[5, 40] wide, i64[40] wide)", "expected exactly"),
    (P(broken.GivesNaN), "exp(f32[7, 33])", "1 elements are NaN on one side alone, first at (0, 0): nan"),
    (P(broken.SwallowsNaN), "sqrt(f32[13] special)", "are NaN on one side alone"),
    (P(broken.TurnsInfinities), "log(f32[13] special)", "are infinite on one side alone"),
    (P(broken.IgnoresStrides), "exp(f32[7, 33] transposed)", "NMSE"),
    (P(broken.IgnoresStrides), "exp(f32[7, 33] spaced)", "NaN"),
    (P(broken.IgnoresStrides), "add(f32[7, 33] repeated, f32[7, 33])", "output 0"),
    (P(broken.OverwritesWhatIsKept), "exp(f32[7, 33] kept)", "output 1: 231 of 231 elements differ"),
    (P(broken.NotReproducible), "graph(elementwise ops one after the other)", "the bits of the first run"),
    (P(broken.DependsOnFusion), "graph(a product with a weight", "fusion=False differ"),
    (P(broken.LosesAssignments), "assign(f32[7, 33] variable, f32[7, 33])", "variable0: 229 of 231 elements"),
    (P(broken.TakesAnyIndex), "get_rows(f32[9, 5], i32[4] outside 9)", "OutOfRangeError is due"),
    (P(broken.HidesTheOrigin), "get_rows(f32[9, 5], i32[4] outside -1)", "origin is missing; node 0"),
    (P(broken.FailsInCompute), "neg(f32[7, 33])", "ZeroDivisionError: a defect of the kernel"),
    (P(broken.NeverAborts), "plan(An abort ends a run", "raised nothing; CancelledError is due"),
    (P(broken.RunsAfterFree), "plan(It can be freed twice", "raised nothing; UnknownHandleError is due"),
    (P(broken.RunsAfterFree), "memory(A plan, its runs", "bytes more are taken than before"),
    (P(broken.TakesAnyType), "plan(Tensors of other types", "raised nothing; InvalidInputError is due"),
    (P(broken.BendsAtAHalf), "exp(f32[9000] edges 4)", "largest error 1.6"),
    (P(broken.KeepsAborts), "run(An abort at any time", "CancelledError: the run was cancelled"),
    (P(broken.RunsAtOnce), "run(One plan on two streams", "of one plan on two streams: the outputs have"),
    (P(broken.KeepsTensors), "run(Each run may use other tensors", "other bits"),
    (P(broken.FreesBeforeItUpdates), "run(An update that fails", "UnknownHandleError: the plan was freed"),
    (P(broken.WipesWeights), "run(A plan keeps working when another", "the run changed weight1"),
    (P(broken.SpoilsWhatLiesInArenas), "plan(Plans that lie in one arena", "in the arena: the outputs"),
    (P(broken.TakesMemoryBesideArenas), "memory(A plan that fits into", "were taken beside the arena"),
    (broken.KeepsPackedWeights, "run(A plan that is compiled after", "with the new weights: the outputs"),
    (broken.RefusesToCompile, "neg(f32[7, 33])", "UnsupportedError: this op comes with the next release"),
    (broken.HangsInCompile, "neg(f32[7, 33])", "the case did not end within"),
    (S(parts.LosesDone), "neg(f32[7, 33])", "`done` was not called within"),
    (S(parts.SaysDoneTwice), "stream(Work is done in the order", "400 of 200 ends were reported"),
    (S(parts.SaysDoneTooEarly), "stream(submit returns before", "submit waited until the work was done"),
    (S(parts.SwallowsErrors), "stream(Work that raises is done", "raised nothing; ComputeFailedError is due"),
    (S(parts.RunsAtOnce), "stream(submit returns before", "submit waited until the work was done"),
    (S(parts.DropsTheQueue), "stream(Closing waits", "`done` was not called within"),
    (S(parts.OvertakesSubmitters), "stream(A submitter's own work", "later work did not wait for that of"),
    (S(parts.Swaps), "stream(Work is done in the order", "the order was"),
    (parts.HasEventsAlwaysReached, "event(The host waits", "the event was reached before the work"),
    (parts.HasEventsAlwaysReached, "event(A stream's later work", "was done before the event was reached"),
    (M(parts.Unaligned), "buffer type(Every buffer begins", "16 behind an aligned place"),
    (M(parts.TooSmall), "buffer type(No tensor takes less", "it has"),
    (M(parts.NeverFull), "buffer type(Allocating more memory", "OutOfMemoryError is due"),
    (M(parts.Leaks), "memory(A buffer takes", "bytes more are taken than before"),
    (M(parts.GivesBackTwice), "memory(A buffer takes", "bytes are left after free, which was called twice"),
    (M(parts.WritesWholeWords), "buffer(Bytes written at an offset", "bytes differ, first byte"),
    (M(parts.WritesWholeWords), "buffer(memset fills only its range", "bytes differ, first byte"),
]  # fmt: skip


def report_of(kind: type[Intact], match: str, seconds: float = SECONDS) -> Report:
    """The first case whose id begins so, on such a device."""
    cases = [case for case in select(match=match) if case.id.startswith(match)][:1]
    device = kind()
    try:
        return run_cases(device, cases, seconds=seconds)
    finally:
        device.close()


@pytest.mark.parametrize(
    ("kind", "match", "words"), DEFECTS, ids=[f"{d[0].__name__} {d[1]}" for d in DEFECTS]
)
def test_a_defect_is_found_by_the_case_that_is_there_for_it(
    kind: type[Intact], match: str, words: str
) -> None:
    (result,) = report_of(kind, match).results
    assert result.outcome is CaseOutcome.FAILED, str(result)
    assert words in result.detail


@pytest.mark.parametrize("match", sorted({defect[1] for defect in DEFECTS}))
def test_the_same_device_without_the_defect_passes(match: str) -> None:
    report = report_of(Intact, match, seconds=20.0)
    assert report.counts[CaseOutcome.PASSED] == 1, report.results


def test_a_kernel_that_ignores_strides_passes_where_there_are_none() -> None:
    assert report_of(with_plan(broken.IgnoresStrides), "exp(f32[7, 33])").ok


def test_what_is_not_supported_has_the_device_s_reason_and_does_not_fail() -> None:
    report = report_of(broken.SupportsNothing, "exp(f32[7, 33])")
    assert report.ok and report.counts[CaseOutcome.NOT_SUPPORTED] == 1
    assert report.results[0].detail == "there is no kernel of exp"


def test_parts_of_the_contract_that_were_not_run_are_named_with_the_ops_that_they_need() -> None:
    device = broken.LacksTwoOps()
    try:
        report = run(device, op="plan")
        own = run(device, op="scale", quick=True)
        free = run(device, op="event")
    finally:
        device.close()
    lacking = [one for one in report.unsupported if one.missing_ops]
    (gap,) = report.gaps
    expected = f"{len(lacking)} of {len(report.results)} plan cases were not run: they need scale, get_rows"
    assert gap == expected and len(lacking) > 5
    assert own.unsupported and not own.gaps and not free.gaps
    assert report.as_json()["results"][0]["missing_ops"] == ["scale"]


def test_a_device_that_never_ends_anything_is_given_up_after_some_cases() -> None:
    device = with_stream(parts.LosesDone)()
    try:
        report = run(device, op="exp", seconds=0.01)
    finally:
        device.close()
    assert len(report.failures) == len(report.results) > 10
    assert "not run: 3 cases before it never ended" in report.results[-1].detail


def test_the_last_defect_of_a_kernel_is_found_in_every_op_that_computes() -> None:
    device = with_plan(broken.OneWrongElement)()
    try:
        report = run(device, quick=True)
    finally:
        device.close()
    passed = {group for group, counts in report.by_group.items() if not counts[CaseOutcome.FAILED]}
    # The parts of the contract that run no graph.
    assert passed <= {"device", "buffer type", "buffer", "stream", "event", "memory", "plan"}


def test_native_kernels_are_there_to_be_tested() -> None:
    assert kernels.available(), "numba is missing: the suite would test the definition alone"

"""The conformance suite: whether a backend does what the contract and the op table say.

    from heliograph_backends.conformance import run
    report = run(device)                     # or op="mul_mat", match="q4_0", quick=True
    print(report, *report.failures, sep="\\n")

As pytest cases see `heliograph_backends.conformance.pytest`, on the command line `heliograph conformance`.

    cases ──▸ Case.run ──▸ recipe (a graph and its data) ──▸ guarded memory, plan, run ──▸ reference
      └─ ops, graphs, parts of the contract                                                   └─▸ Result

Each case of an op has seeded operands, all in one buffer with guard bytes around them, contiguous or with
strides; its result is compared with the op's definition in float64 by the normalised mean squared error
that the op table allows, moves and integers exactly. "Not supported", with the device's reason, is an
answer; an error, a changed input, a changed guard byte, or work that does not end is a failure.
"""

from heliograph_backends.conformance.cases import all_cases
from heliograph_backends.conformance.harness.case import Case
from heliograph_backends.conformance.harness.outcome import CaseOutcome, Result
from heliograph_backends.conformance.report import Report
from heliograph_backends.conformance.runner import SEED, run, run_cases, select

__all__ = ["SEED", "Case", "CaseOutcome", "Report", "Result", "all_cases", "run", "run_cases", "select"]

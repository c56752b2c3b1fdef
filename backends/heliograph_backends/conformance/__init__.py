"""The conformance suite, which tests a backend against the contract and the op table.

    from heliograph_backends.conformance import run
    report = run(device)                     # or op="mul_mat", match="q4_0", quick=True
    print(report, *report.failures, sep="\\n")

For pytest, see `heliograph_backends.conformance.pytest`. The command is `heliograph conformance`.

    cases ──▸ Case.run ──▸ recipe (graph and data) ──▸ guarded memory, plan, run ──▸ reference
      └─ ops, graphs, parts of the contract                                             └─▸ Result

Each case of an op has seeded operands, contiguous or with strides, all in one buffer with guard
bytes around them. Its result is compared with the op's definition in float64: moves and integers
exactly, others by the normalised mean squared error that the op table allows. "Not supported",
with the device's reason, is a valid outcome. An error, a changed input, a changed guard byte, and
work that does not end are failures.
"""

from heliograph_backends.conformance.cases import all_cases
from heliograph_backends.conformance.harness.case import Case
from heliograph_backends.conformance.harness.outcome import CaseOutcome, Result
from heliograph_backends.conformance.report import Report
from heliograph_backends.conformance.runner import SEED, run, run_cases, select

__all__ = ["SEED", "Case", "CaseOutcome", "Report", "Result", "all_cases", "run", "run_cases", "select"]

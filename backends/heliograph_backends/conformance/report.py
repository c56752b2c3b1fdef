"""The report of a run of the suite."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from heliograph_backends.conformance.harness.outcome import CaseOutcome, Result
from heliograph_proto.ops.table import OPS


@dataclass(frozen=True, slots=True)
class Report:
    """The results, in the order of the cases."""

    device: str
    seed: int
    results: tuple[Result, ...]
    seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {outcome.value}" for outcome, count in self.counts.items())
        return f"{self.device}: {counts} in {self.seconds:.1f} s"

    @property
    def counts(self) -> Mapping[CaseOutcome, int]:
        """The number of cases with each outcome."""
        found = Counter(one.outcome for one in self.results)
        return {outcome: found[outcome] for outcome in CaseOutcome}

    @property
    def by_group(self) -> Mapping[str, Mapping[CaseOutcome, int]]:
        """The counts of each op and each part of the contract, in order."""
        groups: dict[str, dict[CaseOutcome, int]] = {}
        for one in self.results:
            counts = groups.setdefault(one.group, dict.fromkeys(CaseOutcome, 0))
            counts[one.outcome] += 1
        return groups

    @property
    def failures(self) -> tuple[Result, ...]:
        """The cases that failed."""
        return tuple(one for one in self.results if one.outcome is CaseOutcome.FAILED)

    @property
    def unsupported(self) -> tuple[Result, ...]:
        """The cases that the device cannot run."""
        return tuple(one for one in self.results if one.outcome is CaseOutcome.NOT_SUPPORTED)

    @property
    def gaps(self) -> tuple[str, ...]:
        """A sentence for each part of the contract with cases that need ops which the device lacks.

        They do not concern an op's own cases, but leave promises about plans and runs unchecked.
        """
        sentences = []
        for group, counts in self.by_group.items():
            lacking = [one for one in self.unsupported if one.group == group and one.missing_ops]
            if group in OPS or not lacking:
                continue
            # The op that most cases need comes first.
            ops = Counter(op for one in lacking for op in one.missing_ops)
            needs = ", ".join(op for op, _ in ops.most_common())
            total = sum(counts.values())
            sentences.append(f"{len(lacking)} of {total} {group} cases were not run: they need {needs}")
        return tuple(sentences)

    @property
    def ok(self) -> bool:
        """True if no case failed."""
        return not self.failures

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-compatible values."""
        return {
            "device": self.device,
            "seed": self.seed,
            "seconds": self.seconds,
            "counts": _named(self.counts),
            "groups": {group: _named(counts) for group, counts in self.by_group.items()},
            "results": [
                asdict(one) | {"outcome": one.outcome.value, "missing_ops": list(one.missing_ops)}
                for one in self.results
            ],
        }


def _named(counts: Mapping[CaseOutcome, int]) -> dict[str, int]:
    return {outcome.value: count for outcome, count in counts.items()}

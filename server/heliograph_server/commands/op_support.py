"""`heliograph ops --device`: the support of each op and its data types by a device, and the check
of its results.

The nodes are those of the conformance suite. The device reports its support of each through its own
contract, and then computes them.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from heliograph.cli.common.style import say
from heliograph.cli.common.tables import print_table
from heliograph_proto.devices import OpPath
from heliograph_proto.ops.table import infer
from heliograph_proto.types import DType
from heliograph_server.commands.conformance import case_progress, opened

if TYPE_CHECKING:
    from heliograph_backends.conformance import Result
    from heliograph_backends.conformance.harness.case import OpCase
    from heliograph_backends.contract import Device

#: An op, the data types of its operands, and the data type of an attribute.
_Key: TypeAlias = tuple[str, tuple[str, ...], str]

#: The most names in a line of the summary.
MOST_NAMES = 8
#: The op paths by their names for people.
PATHS = {op_path: "BLAS" if op_path is OpPath.BLAS else op_path.name.lower() for op_path in OpPath}


@dataclass
class Found:
    """An op with certain data types, over all its cases."""

    op: str
    #: The types of the operands in order, each once; without operands, the type of the result.
    dtypes: tuple[str, ...]
    #: The data type of an attribute; empty without one.
    to: str = ""
    #: The numbers of supported and unsupported cases, and the reason.
    supported: Counter[bool] = field(default_factory=Counter)
    why_not: str = ""
    op_paths: Counter[OpPath] = field(default_factory=Counter)
    #: The number of cases by outcome.
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def ask(self, device: Device, case: OpCase) -> None:
        """Record the device's support of a case's node."""
        types = [one.type for one in case.operands]
        result, attributes = infer(case.op, types, dict(case.attributes))
        why_not = device.supports_op(case.op, attributes, types, result)
        self.supported[not why_not] += 1
        self.why_not = self.why_not or why_not
        if not why_not:
            self.op_paths[device.op_path(case.op, attributes, types, result)] += 1

    def note(self, result: Result) -> None:
        """Record the outcome of a case."""
        from heliograph_backends.conformance import CaseOutcome

        self.outcomes[result.outcome.value] += 1
        if result.outcome is CaseOutcome.FAILED:
            self.failures.append(str(result))

    def as_row(self) -> list[str]:
        """The row for people. An unsupported case has no other outcome, so it is counted once."""
        ended = ((word, self.outcomes[word]) for word in ("passed", "failed"))
        words = ", ".join(f"{count} {word}" for word, count in ended if count)
        types = ", ".join(self.dtypes) + (f" to {self.to}" if self.to else "")
        return [self.op, types, self._answer(), words, _counted(self._named())]

    def as_json(self) -> dict[str, Any]:
        """The row for programs."""
        return {
            "op": self.op,
            "dtypes": self.dtypes,
            "to": self.to,
            "supported": self.supported[True],
            "not_supported": self.supported[False],
            "why_not": self.why_not,
            "conformance": dict(self.outcomes),
            "failures": self.failures,
            "paths": dict(self._named()),
        }

    def _answer(self) -> str:
        if not self.supported[False]:
            return "yes"
        return f"{self.supported[True]} of {self.supported.total()}" if self.supported[True] else "no"

    def _named(self) -> Counter[str]:
        return Counter({PATHS[op_path]: count for op_path, count in self.op_paths.items()})


def run(arguments: argparse.Namespace, ops: Sequence[str]) -> int:
    """Query, compute and print. Returns 1 if a case fails.

    Raises ConfigurationError, ConnectionError, HandleError.
    """
    from heliograph_backends.conformance import run_cases

    cases = cases_of(ops, quick=arguments.quick)
    found: dict[_Key, Found] = {}
    report = None
    with opened(arguments.device, arguments.backends) as device:
        for case in cases:
            found_by(found, case).ask(device, case)
        if not arguments.ask:
            with case_progress(len(cases)) as progress:
                report = run_cases(device, cases, on_result=progress)
            for case, result in zip(cases, report.results, strict=True):
                found_by(found, case).note(result)
    if arguments.json:
        print(json.dumps([one.as_json() for one in found.values()], indent=2))
    else:
        _print(list(found.values()))
        print(f"{report} (seed {report.seed})" if report else f"{len(cases)} cases, none was run")
    return 1 if any(one.failures for one in found.values()) else 0


def cases_of(ops: Sequence[str], *, quick: bool) -> list[OpCase]:
    """The cases of the suite for these ops."""
    from heliograph_backends.conformance import all_cases
    from heliograph_backends.conformance.harness.case import OpCase

    chosen = frozenset(ops)
    cases = (case for case in all_cases() if isinstance(case, OpCase) and case.op in chosen)
    return [case for case in cases if case.quick or not quick]


def found_by(found: dict[_Key, Found], case: OpCase) -> Found:
    """The entry of a case's op and data types."""
    to = "".join(value.name for _, value in case.attributes if isinstance(value, DType))
    dtypes = tuple(dict.fromkeys(one.type.dtype.name for one in case.operands))
    if not case.operands:
        dtypes, to = (infer(case.op, [], dict(case.attributes))[0].dtype.name,), ""
    return found.setdefault((case.op, dtypes, to), Found(case.op, dtypes, to))


def _counted(words: Counter[str]) -> str:
    """A single word, or several with their counts."""
    if len(words) < 2:
        return "".join(words)
    return ", ".join(f"{word} {count}" for word, count in words.most_common())


def summary(found: Sequence[Found]) -> str:
    """The part of the op table the device runs, in a few lines: ops, data types, cases and op
    paths."""
    by_op: dict[str, list[Found]] = {}
    for one in found:
        by_op.setdefault(one.op, []).append(one)
    whole = [op for op, ones in by_op.items() if not any(one.why_not for one in ones)]
    none = [op for op, ones in by_op.items() if not any(one.supported[True] for one in ones)]
    failed = [op for op, ones in by_op.items() if any(one.failures for one in ones)]
    lines = [f"{len(by_op) - len(none)} of {len(by_op)} ops are supported, {len(whole)} with every data type"]
    for what, ops in (("not at all", none), ("wrong results", failed)):
        if ops:
            more = f" and {len(ops) - MOST_NAMES} more" if len(ops) > MOST_NAMES else ""
            lines.append(f"{what}: {', '.join(ops[:MOST_NAMES])}{more}")
    return "\n".join(lines)


def _print(found: Sequence[Found]) -> None:
    """Print a summary, a table, the reasons of unsupported ops, the failures, and the number of
    cases by op
    path."""
    say(summary(found), "title")
    print()
    print_table(["op", "dtypes", "supported", "conformance", "path"], [one.as_row() for one in found])
    for why, count in Counter(one.why_not for one in found if one.why_not).most_common():
        print(f"not supported ({count}): {why}")
    for failure in (failure for one in found for failure in one.failures):
        print(failure)
    op_paths = sum((one.op_paths for one in found), Counter[OpPath]())
    named = ", ".join(f"{PATHS[op_path]} {count}" for op_path, count in op_paths.most_common())
    print(f"{len(found)} ops with data types; cases by path: {named or 'none'}")

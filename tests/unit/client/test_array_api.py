"""The array API under `hg.`: the table says what there is, and signatures are the standard's."""

from __future__ import annotations

from inspect import Parameter, signature

import pytest
from array_api import FUNCTIONS, LEFT_OUT, SIGNATURES
from paths import ROOT

import heliograph as hg
from heliograph.graph.names import ABSENT

TABLE = ROOT / "docs/guide/graphs.md"
THERE = [name for names in FUNCTIONS.values() for name in names.split() if hasattr(hg, name)]


def row(heading: str) -> str:
    names = FUNCTIONS[heading].split()
    there = [f"`{name}`" for name in names if hasattr(hg, name)]
    missing: dict[str, list[str]] = {}
    for name in names:
        if not hasattr(hg, name):
            missing.setdefault(ABSENT[name], []).append(f"`{name}`")
    reasons = "; ".join(f"{' '.join(listed)}: {reason}" for reason, listed in missing.items())
    return f"| {heading} | {' '.join(there) or '-'} | {reasons or '-'} |"


@pytest.mark.parametrize("heading", FUNCTIONS)
def test_the_table_says_which_functions_there_are_and_why_others_are_not(heading: str) -> None:
    assert row(heading) in TABLE.read_text().splitlines(), f"the row should be\n{row(heading)}"


@pytest.mark.parametrize("name", ABSENT)
def test_a_function_that_is_not_there_says_why(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(hg, name)
    assert ABSENT[name] in str(caught.value)


def standard(name: str) -> list[Parameter]:
    """The parameters of a function of the standard, but for those that no function here has."""
    found = signature(eval(f"lambda {SIGNATURES[name]}: None")).parameters.values()
    return [parameter for parameter in found if parameter.name not in LEFT_OUT]


@pytest.mark.parametrize("name", THERE)
def test_a_function_takes_what_the_standard_says(name: str) -> None:
    """It may take more: keywords by place, a default, and `graph`."""
    ours = dict(signature(getattr(hg, name)).parameters)
    for place, parameter in enumerate(standard(name)):
        if parameter.kind in (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL):
            assert list(ours.values())[place].kind is parameter.kind
            found = ours[list(ours)[place]]
        else:
            found = ours[parameter.name]
            by_name_alone = parameter.kind is Parameter.KEYWORD_ONLY
            assert found.kind is parameter.kind or (
                by_name_alone and found.kind is Parameter.POSITIONAL_OR_KEYWORD
            )
            assert by_name_alone or list(ours)[place] == parameter.name
        assert found.default == parameter.default or parameter.default is Parameter.empty
    further = set(list(ours)[len(standard(name)) :])
    assert further <= {"graph"} and all(ours[one].kind is Parameter.KEYWORD_ONLY for one in further)


@pytest.mark.parametrize("dtype", ["f32", "i32", "bool"])
def test_beside_the_standard_one_thing_has_one_name(dtype: str) -> None:
    """No two functions build the same nodes, unless the standard names both."""
    standard = {name for names in FUNCTIONS.values() for name in names.split()}
    functions = {name: getattr(hg, name) for name in hg.__all__ if not isinstance(getattr(hg, name), type)}
    functions = {name: one for name, one in functions.items() if callable(one)}
    assert len({id(one) for one in functions.values()}) == len(functions)
    for count in (1, 2):
        known: dict[str, str] = {}
        for name, function in sorted(functions.items(), key=lambda pair: pair[0] not in standard):
            g = hg.Graph()
            values = [g.input(f"x{place}", (4, 4), dtype) for place in range(count)]
            try:
                made = function(*values)
            except (hg.HeliographError, TypeError, ValueError):
                continue
            if isinstance(made, hg.Value):
                nodes = [(one.op, one.operands, str(one.attributes)) for one in g._nodes]
                other = known.setdefault(f"{nodes} {made.reference}", name)
                assert name == other or {name, other} <= standard, f"hg.{name} is hg.{other}"

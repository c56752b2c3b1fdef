"""Which formulas multiply matrices, read off their code: for floats that is BLAS's part of the definition."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType
from typing import Any

#: What the array library calls the product of matrices.
PRODUCT = "matmul"


@cache
def multiplies(formula: Callable[..., Any]) -> bool:
    """Whether a function, or one of ours that it calls, takes the array library's product of matrices."""
    return any(PRODUCT in names_of(each.__code__) for each in functions_of(formula))


def functions_of(formula: Callable[..., Any]) -> list[Callable[..., Any]]:
    """A function, and those that it names or encloses, and theirs."""
    found: list[Callable[..., Any]] = []
    waiting = [formula]
    while waiting:
        each = waiting.pop()
        if hasattr(each, "__code__") and each not in found:
            found.append(each)
            waiting += named_by(each)
    return found


def named_by(function: Any) -> Iterator[Callable[..., Any]]:
    """The functions among a function's globals, as far as it names them, and its enclosed values."""
    named = (function.__globals__.get(name) for name in names_of(function.__code__))
    enclosed = (cell.cell_contents for cell in function.__closure__ or ())
    return (each for each in (*named, *enclosed) if callable(each))


def names_of(code: CodeType) -> set[str]:
    """The names of globals and attributes in a function's code and in that of functions inside it."""
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(names_of, inner))

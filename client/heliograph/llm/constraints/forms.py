"""Constraints of answers, checked for their form. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from heliograph.errors import InvalidArgumentError, LimitExceededError

#: The longest schema, regular expression or grammar, in characters.
MAX_CHARACTERS = 256 * 1024
#: The way to write JSON, as Python's json does: fixed spaces leave no choice, and need no step.
JSON_FORM = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Constraint:
    """A grammar that an answer follows."""

    #: The caller's name for it: "schema", "regex", "grammar".
    name: str
    #: The text in one of the library's notations: "json", "lark", "gbnf".
    notation: str
    text: str
    #: Rules of Lark's notation around the answer; "@answer" is the answer in them.
    around: str = ""


def constraint_of(
    schema: Mapping[str, Any] | bool | None = None, regex: str | None = None, grammar: str | None = None
) -> Constraint | None:
    """Return the constraint of an answer, None without one.

    Raises InvalidArgumentError for more than one or one of another type, and LimitExceededError for
    a text that is too long.
    """
    given = {"schema": schema, "regex": regex, "grammar": grammar}
    names = [name for name, value in given.items() if value is not None]
    if not names:
        return None
    if len(names) > 1:
        raise InvalidArgumentError(f"{names[0]} and {names[1]} are given", advice="an answer follows one")
    [name] = names
    value = given[name]
    if name == "schema":
        return checked(Constraint(name, "json", schema_text(value)))
    if not isinstance(value, str) or not value:
        raise InvalidArgumentError(f"{name} is {value!r:.60}", advice="it is a text that is not empty")
    if name == "regex":
        return checked(Constraint(name, "regex", value))
    return checked(Constraint(name, "gbnf" if "::=" in value else "lark", value))


def schema_text(schema: Any) -> str:
    """Return a schema as JSON that says how answers are written. Raises InvalidArgumentError."""
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidArgumentError(f"schema is {schema!r:.60}", advice="it is a JSON schema, as a mapping")
    try:
        return json.dumps({"x-guidance": JSON_FORM, **schema}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"schema cannot be written as JSON: {error}"[:300]) from None


def checked(constraint: Constraint) -> Constraint:
    """Raises LimitExceededError for a text that is too long."""
    if len(constraint.text) > MAX_CHARACTERS:
        raise LimitExceededError(
            f"{constraint.name} has {len(constraint.text):,} characters", advice=f"at most {MAX_CHARACTERS:,}"
        )
    return constraint

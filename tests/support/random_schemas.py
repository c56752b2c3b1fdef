"""Random JSON schemas, all of whose values are short."""

from __future__ import annotations

import random
from typing import Any


def random_schema(rng: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of nested objects, arrays, texts, numbers and alternatives."""
    kinds = ["text", "enum", "integer", "number", "boolean", "null", "const", "pattern"]
    if depth:
        kinds += ["object", "array", "tuple", "any"] * 2
    kind = rng.choice(kinds)
    low = rng.randrange(-50, 50)
    simple: dict[str, dict[str, Any]] = {
        "text": {"type": "string", "maxLength": rng.randrange(6), "minLength": 0},
        "enum": {"enum": rng.sample(["serves", 'a "b"', 5, None, True, [1, "x"], {"k": 2}, "über"], 3)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)},
        "number": {"type": "number", "minimum": 0, "exclusiveMaximum": 10, "multipleOf": 0.25},
        "boolean": {"type": "boolean"},
        "null": {"type": "null"},
        "const": {"const": rng.choice(["the daemon", 12, {"a": [1]}])},
        "pattern": {"type": "string", "pattern": rng.choice(["^[a-c]{1,3}-[0-9]{2}$", "^(yes|no)$"])},
    }
    if kind in simple:
        return simple[kind]
    inner = [random_schema(rng, depth - 1) for _ in range(rng.randrange(1, 4))]
    if kind == "any":
        return {"anyOf": inner}
    if kind == "array":
        return {"type": "array", "items": inner[0], "minItems": rng.randrange(2), "maxItems": 3}
    if kind == "tuple":
        return {"type": "array", "prefixItems": inner, "items": False, "minItems": len(inner)}
    names = rng.sample(["name", "the daemon", "n", "ключ", "a.b", 'quo"te'], len(inner))
    return {
        "type": "object",
        "properties": dict(zip(names, inner, strict=True)),
        "required": rng.sample(names, rng.randrange(len(names) + 1)),
        "additionalProperties": False,
    }

"""What every CuPy has of what NumPy has: its names, and what arguments they take.

    python tests/support/cuda_emulation/record.py [--anew]

writes `cupy_names.json` with the CuPy that is installed, for which it needs no GPU: with `--anew` what that
one has, else what it and those before have in common. So it is run with each version, with the first anew.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import warnings
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

PATH = Path(__file__).parent / "cupy_names.json"
#: Names in order, with spaces between them: "name=" may be left out, behind "*" they are given by name,
#: "*args" and "**" take any.
Parameters: TypeAlias = str
Record: TypeAlias = dict[str, Any]


def found() -> Record:
    """What the CuPy has that is installed. Raises ImportError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no CUDA, for instance
        import cupy

        names = sorted(name for name in dir(np) if not name.startswith("_") and hasattr(cupy, name))
        methods = sorted(name for name in dir(np.ndarray) if not name.startswith("_"))
        record: Record = {"versions": [cupy.__version__], "functions": {}, "ufuncs": [], "others": []}
        for name in names:
            thing = getattr(cupy, name)
            if isinstance(thing, cupy.ufunc) or name == "matmul":
                record["ufuncs"].append(name)
            elif inspect.isfunction(thing) or inspect.isbuiltin(thing):
                record["functions"][name] = parameters_of(thing)
            elif thing is getattr(np, name):
                record["others"].append(name)
        there = [name for name in (*methods, "get") if hasattr(cupy.ndarray, name)]
        record["methods"] = {
            name: parameters_of(getattr(cupy.ndarray, name))
            for name in there
            if callable(getattr(cupy.ndarray, name))
        }
        record["attributes"] = [name for name in there if name not in record["methods"]]
        record["cuda"] = _of_cuda(cupy)
    return record


def _of_cuda(cupy: Any) -> dict[str, Parameters]:
    """What the driver may call, by its whole name."""
    places = {"cuda": cupy.cuda, "cuda.runtime": cupy.cuda.runtime}
    names = [(place, name) for place, module in places.items() for name in dir(module)]
    found = {
        f"{place}.{name}": getattr(places[place], name)
        for place, name in names
        if not name.startswith(("_", "cuda", "CUDA")) and callable(getattr(places[place], name))
    }
    found |= {"RawModule": cupy.RawModule, "ndarray": cupy.ndarray}
    return {name: parameters_of(thing) for name, thing in found.items()}


def parameters_of(function: Any) -> Parameters:
    """Of a function of Python's, or of Cython's, whose documentation begins with them."""
    try:
        text = str(inspect.signature(function))
    except (TypeError, ValueError):
        text = (function.__doc__ or "").strip().split("\n")[0]
    inner = re.search(r"\((.*)\)", text)
    given = _split(inner[1]) if inner else ["*args", "**kwargs"]
    return " ".join(_parameter(one) for one in given if one.strip() not in ("self", "/"))


def _split(text: str) -> list[str]:
    """At commas that are in no bracket or string."""
    parts, depth, quoted = [""], 0, False
    for letter in text:
        quoted ^= letter == "'"
        depth += 0 if quoted else (letter in "([{<") - (letter in ")]}>")
        if letter == "," and not depth and not quoted:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _parameter(text: str) -> str:
    """A parameter without its type and default."""
    text = text.strip().replace("\\", "")
    if text.startswith("**"):
        return "**"
    if text.startswith("*"):
        return "*" if text == "*" else "*args"
    name, given, _ = text.partition("=")
    name = name.split(":")[0].split()[-1]
    return name + ("=" if given else "")


def common(a: Record, b: Record) -> Record:
    """What two records share."""
    both: Record = {"versions": sorted({*a["versions"], *b["versions"]})}
    for kind in ("functions", "methods", "cuda"):
        shared = (name for name in a[kind] if name in b[kind])
        both[kind] = {name: _common(a[kind][name], b[kind][name]) for name in shared}
    for kind in ("ufuncs", "others", "attributes"):
        both[kind] = [name for name in a[kind] if name in b[kind]]
    return both


def _common(a: Parameters, b: Parameters) -> Parameters:
    """Parameters in the same places as far as they agree; behind that those that both take by name."""
    first, second = a.split(), b.split()
    pairs = enumerate(zip(first, second, strict=False))
    agreed = next((n for n, (one, other) in pairs if one != other), min(len(first), len(second)))
    rest = [one for one in first[agreed:] if one in second[agreed:] and not one.startswith("*")]
    named = ["*"] if rest and "*" not in first[:agreed] else []
    return " ".join([*first[:agreed], *named, *rest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anew", action="store_true", help="only what this CuPy has")
    record = found()
    if not parser.parse_args().anew:
        record = common(json.loads(PATH.read_text()), record)
    lines = [f"{json.dumps(kind)}: {_lines(things)}" for kind, things in record.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _lines(things: Any) -> str:
    """A line for each function, several names to a line otherwise."""
    if isinstance(things, dict):
        inner = ",\n".join(f" {json.dumps(name)}: {json.dumps(things[name])}" for name in things)
        return "{\n" + inner + "\n}"
    return json.dumps(things)


if __name__ == "__main__":
    main()

"""Write the pages of the ops, docs/api/ops/GROUP.md, from the op table: `make op-pages`.

Each op has its formula, its shapes, its attributes, and an example with the result that the CPU
computes. `test_op_pages.py` compares.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from op_examples import EXAMPLES, SHAPES

import heliograph as hg
from heliograph.autodiff.table import FLAT, REFUSED, RULES
from heliograph.op_functions import describe_attribute
from heliograph_proto.ops.row import Op
from heliograph_proto.ops.table import OPS

FOLDER = Path(__file__).parent / "api" / "ops"
WIDTH = 100
#: The most elements of a result that a page shows.
_MOST = 12
_TITLES = {
    "elementwise": "Elementwise ops",
    "reduction": "Reductions",
    "matmul": "Products",
    "rows": "Ops of rows",
    "attention": "Attention and recurrences",
    "window": "Windows",
    "gather": "Gathers and scatters",
    "move": "Moves",
    "view": "Views",
    "source": "Sources",
    "variable": "Variables",
}


def pages(session: hg.Session) -> dict[str, str]:
    """Return the text of each page by its name."""
    found = {
        f"{group}.md": _page(session, title, [row for row in OPS.values() if row.group == group])
        for group, title in _TITLES.items()
    }
    return {"index.md": _index(), **found}


def _index() -> str:
    lines = ["# Ops", ""]
    lines += _wrapped(
        "Each row of the op table is a function of `hg.ops`, with ggml's name. Dimensions are in NumPy's "
        "order, which is the reverse of ggml's. In the examples `f32`, `i32` and so on are constants of a "
        "graph `g`, `true` is one of bools, `count(2, 3)` has the elements 0, 1, 2 and so on in that shape, "
        "and `ramp(2, 3)` the same divided by their number."
    )
    for group, title in _TITLES.items():
        ops = [row.name for row in OPS.values() if row.group == group]
        names = [f"[{op}]({group}.md#{op})" for op in ops]
        lines += ["", f"## {title}", "", *_wrapped(f"[{title}]({group}.md): {', '.join(names)}")]
    return "\n".join(lines) + "\n"


def _page(session: hg.Session, title: str, rows: list[Op]) -> str:
    lines = [f"# {title}"]
    for row in rows:
        lines += ["", *_section(session, row)]
    return "\n".join(lines) + "\n"


def _section(session: hg.Session, row: Op) -> list[str]:
    operands = ", ".join(row.operands) or "no operands"
    lines = [f"## {row.name}", "", *_wrapped(_markdown(row.doc)), ""]
    lines += _wrapped(f"- Operands: {_markdown(operands)}", "  ")
    lines += _wrapped(f"- Shapes: {_markdown(shapes(row))}", "  ")
    if row.attributes:
        listed = ", ".join(f"`{describe_attribute(one)}`" for one in row.attributes)
        lines += _wrapped(f"- Attributes: {listed}", "  ")
    lines += _wrapped(f"- Gradient: {_gradient(row)}", "  ")
    return [*lines, "", "```text", *_call(EXAMPLES[row.name]), result(session, row.name), "```"]


def _gradient(row: Op) -> str:
    if row.name in RULES:
        return "yes"
    if row.name in REFUSED:
        return f"none; {REFUSED[row.name]}"
    return "none; the result is constant between jumps" if row.name in FLAT else "none"


def shapes(row: Op) -> str:
    """Return the words for the shapes that a row takes and gives."""
    name = row.rule.__qualname__.partition(".")[0]
    given = SHAPES.get(name) or inspect.getdoc(row.rule) or ""
    first = " ".join(given.split())
    return first.partition(". ")[0].rstrip(".")


def _call(expression: str) -> list[str]:
    """The expression, in lines that fit."""
    return textwrap.wrap(expression, WIDTH, subsequent_indent="    ", break_long_words=False)


def result(session: hg.Session, op: str) -> str:
    """Return the type and the elements of an op's example."""
    g = hg.Graph()
    value = eval(EXAMPLES[op], names(g))
    if value.op != op:
        raise ValueError(f"the example of {op} ends with {value.op}")
    g.output("y", value)
    plan = session.compile(g)
    elements = np.asarray(plan.run()["y"]).reshape(-1)
    plan.free()
    if "v" in g.variables:
        session.free_variable("v")
    shown = " ".join(f"{float(one):.4g}" if value.dtype.is_float else str(one) for one in elements[:_MOST])
    return f"{value.type}: {shown}{' ...' if elements.size > _MOST else ''}"


def names(g: hg.Graph) -> dict[str, Any]:
    """Return the names that examples use."""

    def typed(dtype: str) -> Any:
        return lambda elements: g.constant(np.asarray(elements), dtype)

    def count(*shape: int) -> hg.Value:
        return g.constant(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))

    def ramp(*shape: int) -> hg.Value:
        return count(*shape) / float(np.prod(shape))

    constants = {dtype: typed(dtype) for dtype in ("f32", "f64", "i32", "i64")}
    return {"hg": hg, "np": np, "g": g, "true": typed("bool"), "count": count, "ramp": ramp, **constants}


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def _markdown(text: str) -> str:
    """Escape what Markdown would read as emphasis or HTML, outside of code."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(one if one.startswith("`") else re.sub(r"([*<_\[])", r"\\\1", one) for one in parts)


def main() -> None:
    """Write the pages."""
    FOLDER.mkdir(exist_ok=True)
    with hg.connect("local:") as session:
        for name, text in pages(session).items():
            (FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()

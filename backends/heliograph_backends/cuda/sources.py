"""The text of the kernels, in modules that are compiled by themselves.

The set is fixed, but for chains of many elements: those have modules of their own, made of our text and of
what `generating` writes.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from heliograph_backends.cuda.operations import Operation

_FOLDER = Path(__file__).parent / "kernels"

#: The files of each module, in order.
MODULES = {
    "elementwise": ("common.cuh", "operations.cuh", "elementwise.cu"),
    "rows": ("common.cuh", "rows.cu"),
    "gather": ("common.cuh", "blocks.cuh", "gather.cu"),
    "rope": ("common.cuh", "rope.cu"),
    "products": ("common.cuh", "blocks.cuh", "products.cu"),
    "attention": ("common.cuh", "attention.cu"),
}

#: Of the compiler, beside the processor to compile for.
OPTIONS = ("-std=c++17", "--diag-suppress=177")
#: Of chains, beside those: each operation is rounded by itself, whatever stands next to it.
CHAIN_OPTIONS = ("--fmad=false",)


#: The kernel of a chain's own module, and what stands for such modules in `options_of`.
CHAIN = "chain"


def options_of(module: str) -> tuple[str, ...]:
    """What a module is compiled with."""
    return OPTIONS + CHAIN_OPTIONS if module in ("elementwise", CHAIN) else OPTIONS


@cache
def text_of(module: str) -> str:
    """The whole source of a module."""
    operations = "".join(f"#define OP_{one.name} {one.value}\n" for one in Operation)
    return operations + _joined(*MODULES[module])


def text_of_chain(source: str) -> str:
    """The whole source of a module whose kernel is a chain's own."""
    return "\n".join((_chains(), source, _joined("chain.cu")))


@cache
def _chains() -> str:
    return _joined("common.cuh", "operations.cuh", "chain.cuh")


def _joined(*names: str) -> str:
    return "\n".join((_FOLDER / name).read_text() for name in names)


@cache
def module_of() -> dict[str, str]:
    """The module of each kernel, by name."""
    return {kernel: module for module in MODULES for kernel in kernels_of(module)}


def kernels_of(module: str) -> tuple[str, ...]:
    """The names of a module's kernels, those that macros make included."""
    text = re.sub(r"#define.*(?:\\\n.*)*", "", text_of(module))
    names = re.findall(r"^KERNEL\((\w+),", text, re.M)
    names += [f"get_rows_{one}" for one in re.findall(r"^GET_ROWS\(\w+, (\w+)\)", text, re.M)]
    names += [f"attention_{one}" for one in re.findall(r"^ATTENTION\((\d+)\)", text, re.M)]
    return tuple(names)

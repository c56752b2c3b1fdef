"""The source of the kernels, in modules that are compiled separately.

The set is fixed, except for chains of many elements: each has its own module, made of fixed text
and of the text that `code_generation` writes.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import numpy

from heliograph_backends.cuda.driver.operations import CudaOperation
from heliograph_proto.quantization import grids

#: The numbers of groups of four elements of a row that a thread may hold; there is a kernel for
#: each.
HELD = (1, 2, 3, 4, 6, 8)

_FOLDER = Path(__file__).parents[1] / "kernels"

_BLOCKS = ("common.cuh", "instructions.cuh", "grids.cuh", "blocks.cuh")
_STORED = (*_BLOCKS, "units.cuh", "stored.cuh")
_ATTENTION = (
    "common.cuh", "instructions.cuh", "tiles.cuh", "attending.cuh", "attention_staging.cuh",
    "attention_part.cuh", "attention_lines.cuh", "attention.cuh",
)  # fmt: skip

#: The files of each module, in order.
MODULES = {
    "elementwise": ("common.cuh", "operations.cuh", "elementwise.cu"),
    "rows": ("common.cuh", "instructions.cuh", "tiles.cuh", "rows.cuh", "rows.cu", "reduce.cu"),
    "gather": (*_BLOCKS, "gather.cu", "gather_back.cu", "random.cu"),
    "rope": ("common.cuh", "instructions.cuh", "tiles.cuh", "rope.cu"),
    "products": (*_STORED, "fixed_point.cuh", "products.cu"),
    "products_many": (*_STORED, "stored_tiles.cuh", "products_many.cu"),
    "attention": ("common.cuh", "instructions.cuh", "tiles.cuh", "attending.cuh", "attention_few.cu"),
    "attention_f16": (*_ATTENTION, "attention_f16.cu"),
    "attention_bf16": (*_ATTENTION, "attention_bf16.cu"),
    "attention_f32": (*_ATTENTION, "attention_f32.cu"),
    "windows": ("common.cuh", "windows.cu", "places.cu"),
    "typed": ("common.cuh", "typed.cu"),
    "ordering": ("common.cuh", "ordering.cu"),
    "convolution": (
        "common.cuh",
        "instructions.cuh",
        "tiles.cuh",
        "convolution.cuh",
        "convolution.cu",
        "convolution_direct.cu",
    ),
}

#: Compiler options, beside the target processor. With the second one, functions without a
#: qualifier, such as generic lambdas, are device functions.
OPTIONS = ("-std=c++17", "--device-as-default-execution-space", "--diag-suppress=177")
#: Further options for chains: each operation is rounded by itself, regardless of its neighbours.
CHAIN_OPTIONS = ("--fmad=false",)


#: The name of a chain's own kernel, and of such modules in `options_of`.
CHAIN = "chain"


def options_of(module: str) -> tuple[str, ...]:
    """Return the compiler options of a module."""
    return OPTIONS + CHAIN_OPTIONS if module in ("elementwise", CHAIN) else OPTIONS


@cache
def text_of(module: str) -> str:
    """Return the whole source of a module."""
    operations = "".join(f"#define OP_{one.name} {one.value}\n" for one in CudaOperation)
    tables = _grids() if "grids.cuh" in MODULES[module] else ""
    return operations + tables + _joined(*MODULES[module])


@cache
def _grids() -> str:
    """Return tables of the points of grids, coordinate k as a place in four bits from bit 4 k
    on."""
    found = ""
    for name in ("IQ1", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"):
        places = getattr(grids, name).places.astype("int64")
        points = (places << 4 * numpy.arange(places.shape[1])).sum(1).tolist()
        kind = "unsigned" if places.shape[1] == 8 else "unsigned short"
        numbers = ",".join(map(str, points))
        found += f"static __device__ const {kind} GRID_{name}[{len(points)}] = {{{numbers}}};\n"
    return found


def text_of_chain(source: str) -> str:
    """Return the whole source of a module with a chain's own kernel."""
    return "\n".join((_chains(), source, _joined("chain.cu")))


@cache
def _chains() -> str:
    return _joined("common.cuh", "operations.cuh", "chain.cuh")


def _joined(*names: str) -> str:
    return "\n".join((_FOLDER / name).read_text() for name in names)


@cache
def module_of() -> dict[str, str]:
    """Return the module of each kernel, by name."""
    return {kernel: module for module in MODULES for kernel in kernels_of(module)}


def kernels_of(module: str) -> tuple[str, ...]:
    """Return the names of a module's kernels, including those that macros make."""
    text = re.sub(r"#define.*(?:\\\n.*)*", "", text_of(module))
    names = re.findall(r"^KERNEL\((\w+),", text, re.M)
    names += [f"get_rows_{one}" for one in re.findall(r"^GET_ROWS\(\w+, (\w+)\)", text, re.M)]
    for macro, rows in (("PRODUCTS", ("one", "four", "eight")), ("MANY_PRODUCTS", ("tiles", "large"))):
        types = re.findall(rf"^{macro}\(\w+, (\w+)\)", text, re.M)
        names += [f"product_{one}_{type}" for type in types for one in rows]
    names += [f"{op}_{n}" for op in re.findall(r"^ROWS\((\w+), \w+\)", text, re.M) for n in (*HELD, "long")]
    for form, width in re.findall(r"^ATTENTION\(\w+, (\w+), (\d+)\)", text, re.M):
        names += [f"attention_{form}_{width}", f"attention_{form}_{width}_split"]
    for type in re.findall(r"^CONVOLUTION\(\w+, (\w+)\)", text, re.M):
        names += [f"convolution_{type}_{tile}" for tile in ("tiles", "large")]
    names += [
        f"convolution_below_{t}_{s}" for t, s in re.findall(r"^CONVOLUTION_BELOW\((\d), (\d)\)", text, re.M)
    ]
    return tuple(names)

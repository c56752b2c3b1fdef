"""Sixteen float32 lanes: a small language in which the kernels' vector code is written.

Theory of operation. numba has no vector type and leaves the vectorization of scalar loops to LLVM,
which refuses it unless it can prove that output and input do not overlap; in-place nodes are common
here. So the inner loops are emitted as LLVM vector IR: a Python function runs once, at compile
time, over `Lanes` objects whose operators append instructions to the function being built. The IR
is portable: `<16 x float>` is one register on AVX-512, two on AVX2, four on NEON, with the same
bits, because every operator is an IEEE operation on each lane and no fast-math flag is set. Only
`fma` fuses; a multiplication followed by an addition is never contracted.

`emitted` turns such a Python function into a numba intrinsic with a fixed signature, `subroutine`
into a function of the module that is not inlined and so is optimised once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

LANES = 16
F32, F64 = ir.FloatType(), ir.DoubleType()
I32, I64 = ir.IntType(32), ir.IntType(64)
F32_VECTOR = ir.VectorType(F32, LANES)
F64_VECTOR = ir.VectorType(F64, LANES)
I32_VECTOR = ir.VectorType(I32, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)

Function = TypeVar("Function", bound=Callable[..., Any])
# Untyped on purpose: the typed parts of numba differ between its versions.
_njit: Any = njit
_get_or_insert: Any = cgutils.get_or_insert_function
_alloca_once: Any = cgutils.alloca_once


def jit(function: Function) -> Function:
    """Compile with numba: no GIL, no contraction, no bounds checks; part of its caller's object."""
    compiled: Function = _njit(nogil=True, error_model="numpy")(function)
    return compiled


def jit_inline(function: Function) -> Function:
    """Like `jit`, but inlined into its callers. For functions that mostly call others: numba
    optimises all called code again for each function around it.
    """
    compiled: Function = _njit(nogil=True, error_model="numpy", inline="always")(function)
    return compiled


class Entry:
    """A function of int64 that is compiled once and by itself, into an object of its own. Python
    and the other entries call it by its address.

    A `jit` function, in contrast, is optimised again with each function around it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = function.__name__
        self.arguments = len(inspect.signature(function).parameters)
        # Annotations are texts in these modules.
        self.returns = function.__annotations__["return"] == "int"


def call_address(builder: ir.IRBuilder, address: ir.Value, *arguments: ir.Value) -> None:
    """Call an entry by its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    builder.call(builder.inttoptr(address, kind.as_pointer()), arguments)


def emitted(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make an intrinsic of numba type `result(*arguments)` from `emit(builder, *values)`."""
    signature = result(*arguments)

    def decorate(emit: Callable[..., Any]) -> Callable[..., Any]:
        def code(context: Any, builder: ir.IRBuilder, _: Any, values: Sequence[ir.Value]) -> Any:
            value = emit(builder, *values)
            return context.get_dummy_value() if result == types.void else value

        def definition(_typing_context: Any, *_arguments: Any) -> Any:
            return signature, code

        # numba looks up the parameters by name; the builder takes the place of its typing context.
        definition.__dict__["__signature__"] = inspect.signature(emit)
        definition.__name__, definition.__doc__ = emit.__name__, emit.__doc__
        made: Callable[..., Any] = intrinsic(definition)
        return made

    return decorate


def subroutine(
    caller: ir.IRBuilder,
    name: str,
    arguments: Sequence[ir.Type],
    body: Callable[..., ir.Value | None],
    result: ir.Type | None = None,
) -> ir.Function:
    """Return the module's function `name`, built with `body(builder, *values)` at first use."""
    module = caller.module
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(result or ir.VoidType(), arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    function.attributes.add("nounwind")
    # LLVM finds out too late that it stores registers on the stack, and would store them unaligned.
    function.attributes.alignstack = 4 * LANES
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    value = body(builder, *function.args)
    if result is None:
        builder.ret_void()
    else:
        builder.ret(value)
    return function


def intrinsic_function(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Type) -> ir.Function:
    """Declare an LLVM intrinsic or an external symbol."""
    return _get_or_insert(builder.module, ir.FunctionType(result, arguments), name)


@cache
def cpu_features() -> frozenset[str]:
    """Return the CPU features that numba compiles for, by their names in LLVM."""
    features = getattr(config, "CPU_FEATURES", None)
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    return frozenset(name[1:] for name in features.split(",") if name.startswith("+"))


def has_feature(name: str) -> bool:
    """True if numba compiles for a machine with this instruction set."""
    return name in cpu_features()


def local(builder: ir.IRBuilder, kind: ir.Type) -> ir.Value:
    """Return a new variable of the function being built."""
    return _alloca_once(builder, kind)


def workspace(builder: ir.IRBuilder, size: int) -> ir.Value:
    """Return the address of `size` uninitialised bytes on the stack, a multiple of 64."""
    with builder.goto_entry_block():
        area = builder.alloca(ir.ArrayType(ir.IntType(8), size))
        area.align = 64
        return builder.ptrtoint(area, I64)


def integer(value: int) -> ir.Constant:
    """Return an int64 constant."""
    return ir.Constant(I64, value)


@contextmanager
def loop(builder: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int) -> Iterator[ir.Value]:
    """Emit `for index in range(start, stop, step)` over int64 values."""
    with cgutils.for_range_slice(builder, start, stop, integer(step), I64) as (index, _):
        yield index


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """Turn an address in bytes into a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def element(builder: ir.IRBuilder, base: ir.Value, index: ir.Value, kind: ir.Type = F32) -> ir.Value:
    """Return the address of element `index` of the array of `kind` at address `base`."""
    size = {F32: 4, F64: 8, I64: 8}[kind]
    return builder.add(base, builder.mul(index, integer(size)))


def prefetch(builder: ir.IRBuilder, address: ir.Value, locality: int = 3) -> None:
    """Prefetch the cache line at `address`: locality 3 into all caches, 2 into the second level.
    Harmless for invalid addresses.
    """
    byte = ir.IntType(8).as_pointer()
    function = intrinsic_function(builder, "llvm.prefetch.p0", ir.VoidType(), byte, I32, I32, I32)
    hints = [ir.Constant(I32, hint) for hint in (0, locality, 1)]
    builder.call(function, [builder.inttoptr(address, byte), *hints])


def tail_mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Return the mask of the lanes below `count` (int64, at most 16 counts)."""
    wide = builder.select(builder.icmp_signed("<", count, integer(LANES)), count, integer(LANES))
    limit = splat(builder, builder.trunc(wide, I32), I32_VECTOR)
    return builder.icmp_signed("<", ir.Constant(I32_VECTOR, list(range(LANES))), limit)


def splat(builder: ir.IRBuilder, scalar: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Return a vector of `kind` with `scalar` in each lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, undefined, zeros)


class Lanes:
    """Sixteen float32 values of the code being emitted; operators append IEEE instructions."""

    __slots__ = ("builder", "value")

    def __init__(self, builder: ir.IRBuilder, value: ir.Value) -> None:
        self.builder = builder
        self.value = value

    @staticmethod
    def constant(builder: ir.IRBuilder, number: float) -> Lanes:
        return Lanes(builder, ir.Constant(F32_VECTOR, [number] * LANES))

    @staticmethod
    def broadcast(builder: ir.IRBuilder, scalar: ir.Value) -> Lanes:
        return Lanes(builder, splat(builder, scalar, F32_VECTOR))

    @staticmethod
    def load(builder: ir.IRBuilder, address: ir.Value) -> Lanes:
        return Lanes(builder, builder.load(pointer(builder, address, F32_VECTOR), align=4))

    @staticmethod
    def load_masked(builder: ir.IRBuilder, address: ir.Value, mask: ir.Value, other: float = 0.0) -> Lanes:
        """Load the lanes of `mask`; the rest are `other`, and their memory is not accessed."""
        kind = F32_VECTOR.as_pointer()
        load = intrinsic_function(
            builder, "llvm.masked.load.v16f32.p0", F32_VECTOR, kind, I32, MASK, F32_VECTOR
        )
        fill = ir.Constant(F32_VECTOR, [other] * LANES)
        arguments = [builder.inttoptr(address, kind), ir.Constant(I32, 4), mask, fill]
        return Lanes(builder, builder.call(load, arguments))

    def store(self, address: ir.Value) -> None:
        self.builder.store(self.value, pointer(self.builder, address, F32_VECTOR), align=4)

    def store_streamed(self, address: ir.Value) -> None:
        """Store past the caches; `address` is a multiple of 64."""
        store = self.builder.store(self.value, pointer(self.builder, address, F32_VECTOR), align=64)
        store.set_metadata("nontemporal", self.builder.module.add_metadata([ir.Constant(I32, 1)]))

    def store_masked(self, address: ir.Value, mask: ir.Value) -> None:
        kind = F32_VECTOR.as_pointer()
        void = ir.VoidType()
        store = intrinsic_function(
            self.builder, "llvm.masked.store.v16f32.p0", void, F32_VECTOR, kind, I32, MASK
        )
        place = self.builder.inttoptr(address, kind)
        self.builder.call(store, [self.value, place, ir.Constant(I32, 4), mask])

    def lift(self, other: Lanes | float) -> Lanes:
        """Return `other`, a number or lanes, as lanes."""
        return other if isinstance(other, Lanes) else Lanes.constant(self.builder, other)

    def __add__(self, other: Lanes | float) -> Lanes:
        return Lanes(self.builder, self.builder.fadd(self.value, self.lift(other).value))

    def __sub__(self, other: Lanes | float) -> Lanes:
        return Lanes(self.builder, self.builder.fsub(self.value, self.lift(other).value))

    def __rsub__(self, other: float) -> Lanes:
        return self.lift(other) - self

    def __mul__(self, other: Lanes | float) -> Lanes:
        return Lanes(self.builder, self.builder.fmul(self.value, self.lift(other).value))

    def __truediv__(self, other: Lanes | float) -> Lanes:
        return Lanes(self.builder, self.builder.fdiv(self.value, self.lift(other).value))

    def __rtruediv__(self, other: float) -> Lanes:
        return self.lift(other) / self

    def __neg__(self) -> Lanes:
        return Lanes(self.builder, self.builder.fneg(self.value))

    __radd__, __rmul__ = __add__, __mul__

    def call(self, name: str, *others: Lanes | float) -> Lanes:
        """Call the LLVM intrinsic `name` lane by lane."""
        values = [self.value, *(self.lift(other).value for other in others)]
        function = intrinsic_function(self.builder, f"{name}.v16f32", F32_VECTOR, *[F32_VECTOR] * len(values))
        return Lanes(self.builder, self.builder.call(function, values))

    def fma(self, factor: Lanes | float, addend: Lanes | float) -> Lanes:
        """Return self * factor + addend, rounded once."""
        return self.call("llvm.fma", factor, addend)

    def scaled(self, exponent: Lanes) -> Lanes:
        """Return self * 2**floor(exponent), rounded once; AVX-512 only."""
        masked = ir.IntType(16)
        name = "llvm.x86.avx512.mask.scalef.ps.512"
        kinds = (F32_VECTOR, F32_VECTOR, F32_VECTOR, masked, I32)
        function = intrinsic_function(self.builder, name, F32_VECTOR, *kinds)
        rounding = ir.Constant(I32, 4)  # as the control register says
        arguments = [self.value, exponent.value, self.value, ir.Constant(masked, -1), rounding]
        return Lanes(self.builder, self.builder.call(function, arguments))

    def sqrt(self) -> Lanes:
        return self.call("llvm.sqrt")

    def abs(self) -> Lanes:
        return self.call("llvm.fabs")

    def maximum(self, other: Lanes | float) -> Lanes:
        """Return the larger; NaN where either is NaN, as in numpy.maximum."""
        return self.call("llvm.maximum", other)

    def minimum(self, other: Lanes | float) -> Lanes:
        """Return the smaller; NaN where either is NaN, as in numpy.minimum."""
        return self.call("llvm.minimum", other)

    def copysign(self, sign: Lanes) -> Lanes:
        return self.call("llvm.copysign", sign)

    def where(self, condition: str, than: Lanes | float, yes: Lanes | float, no: Lanes | float) -> Lanes:
        """Return `yes` in the lanes where `self condition than` holds (ordered), else `no`."""
        mask = self.builder.fcmp_ordered(condition, self.value, self.lift(than).value)
        return Lanes(self.builder, self.builder.select(mask, self.lift(yes).value, self.lift(no).value))

    def bits(self) -> ir.Value:
        """Return the lanes' bit patterns as sixteen int32."""
        return self.builder.bitcast(self.value, I32_VECTOR)

    @staticmethod
    def from_bits(builder: ir.IRBuilder, bits: ir.Value) -> Lanes:
        return Lanes(builder, builder.bitcast(bits, F32_VECTOR))

    def widen(self) -> ir.Value:
        """Return the lanes as sixteen float64."""
        return self.builder.fpext(self.value, F64_VECTOR)

    @staticmethod
    def narrow(builder: ir.IRBuilder, wide: ir.Value) -> Lanes:
        """Round sixteen float64 to float32."""
        return Lanes(builder, builder.fptrunc(wide, F32_VECTOR))


def woven(builder: ir.IRBuilder, formulas: Sequence[Callable[[], Lanes]]) -> list[Lanes]:
    """Return the results of formulas with the same instructions, which alternate in the code.

    Nearly all instructions of a long formula wait for the one before. One after the other, a few
    formulas fill the queue of the processor, which then sees no instruction that could begin.
    """
    instructions = builder.block.instructions
    first, results, parts = len(instructions), [], []
    for formula in formulas:
        begin = len(instructions)
        results.append(formula())
        parts.append(instructions[begin:])
    instructions[first:] = [each for together in zip(*parts, strict=True) for each in together]
    return results


def lookup(builder: ir.IRBuilder, index: ir.Value, table: Sequence[float]) -> Lanes:
    """Return table[index mod 8] of sixteen int32 and a table of eight."""
    if has_feature("avx512f"):
        function = intrinsic_function(
            builder, "llvm.x86.avx512.permvar.sf.512", F32_VECTOR, F32_VECTOR, I32_VECTOR
        )
        twice = ir.Constant(F32_VECTOR, [*table, *table])
        return Lanes(builder, builder.call(function, [twice, index]))
    if has_feature("avx2"):
        return _lookup_in_halves(builder, index, table)
    places = builder.and_(index, ir.Constant(I32_VECTOR, [len(table) - 1] * LANES))
    values = ir.Constant(F32_VECTOR, [*table, *table])
    result: ir.Value = ir.Constant(F32_VECTOR, ir.Undefined)
    for lane in range(LANES):
        place = builder.extract_element(places, ir.Constant(I32, lane))
        found = builder.extract_element(values, place)
        result = builder.insert_element(result, found, ir.Constant(I32, lane))
    return Lanes(builder, result)


def _lookup_in_halves(builder: ir.IRBuilder, index: ir.Value, table: Sequence[float]) -> Lanes:
    """Look up by AVX2's permutation of eight lanes, twice."""
    half, places = ir.VectorType(F32, 8), ir.VectorType(I32, 8)
    function = intrinsic_function(builder, "llvm.x86.avx2.permps", half, half, places)
    found = []
    for first in (0, 8):
        order = ir.Constant(places, list(range(first, first + 8)))
        part = builder.shuffle_vector(index, index, order)
        found.append(builder.call(function, [ir.Constant(half, list(table)), part]))
    return Lanes(builder, builder.shuffle_vector(*found, ir.Constant(I32_VECTOR, list(range(LANES)))))

"""Rows: elementwise ops, reductions, norms, moves, views, sources and variables."""

from __future__ import annotations

from collections.abc import Sequence

from heliograph_proto import rules
from heliograph_proto.rules import ANY, FLOATS, NUMBERS, PLAIN
from heliograph_proto.table.row import EXACT, Attribute, Op


def _unary(name: str, doc: str, kinds: Sequence[str] = FLOATS, tolerance: float = 1e-7) -> Op:
    return Op(name, ("x",), "elementwise", rules.same(kinds), doc, (), (0,), tolerance)


def _binary(name: str, doc: str, kinds: Sequence[str] = NUMBERS, tolerance: float = 1e-7) -> Op:
    return Op(name, ("a", "b"), "elementwise", rules.binary(kinds), doc, (), (0, 1), tolerance)


def _arithmetic(name: str, doc: str, kinds: Sequence[str] = NUMBERS, *, blocks: bool = False) -> Op:
    rule = rules.mixed(kinds, blocks=blocks)
    narrow = "f16, bf16 or blocks" if blocks else "f16 or bf16"
    return Op(name, ("a", "b"), "elementwise", rule, f"{doc} b may be f32 where a is {narrow}.", (), (0, 1))


def _test(name: str, doc: str) -> Op:
    return Op(name, ("x",), "elementwise", rules.to_bool(FLOATS), doc, tolerance=EXACT)


def _comparison(name: str, doc: str, kinds: Sequence[str] = PLAIN) -> Op:
    return Op(name, ("a", "b"), "elementwise", rules.comparison(kinds), doc, tolerance=EXACT)


_AXES = (Attribute("axes", "integers", ()), Attribute("keepdims", "boolean", False))


def _reduction(name: str, doc: str, *, empty: bool, tolerance: float = 1e-7) -> Op:
    rule = rules.reduction(NUMBERS, empty=empty)
    return Op(name, ("x",), "reduction", rule, doc + " over `axes` (default: all).", _AXES, (), tolerance)


_EPS = Attribute("eps", "real", 1e-5)
_SHAPE = Attribute("shape", "integers")

ROWS: tuple[Op, ...] = (
    # elementwise, one operand
    _unary("neg", "-x.", NUMBERS, EXACT),
    _unary("abs", "The absolute value.", NUMBERS, EXACT),
    _unary("sgn", "-1, 0 or 1 by the sign of x; NaN stays.", NUMBERS, EXACT),
    _unary("sqr", "x * x.", NUMBERS),
    _unary("sqrt", "The square root; NaN below 0."),
    _unary("rsqrt", "1 / sqrt(x)."),
    _unary("exp", "e to the x."),
    _unary("expm1", "exp(x) - 1, accurate near 0."),
    _unary("log", "The natural logarithm; -inf at 0, NaN below."),
    _unary("log1p", "log(1 + x), accurate near 0."),
    _unary("sin", "The sine of x in radians."),
    _unary("cos", "The cosine of x in radians."),
    _unary("tanh", "The hyperbolic tangent."),
    _unary("erf", "The error function."),
    _unary("sigmoid", "1 / (1 + exp(-x))."),
    _unary("relu", "max(x, 0); NaN stays.", FLOATS, EXACT),
    _unary("elu", "x above 0, else exp(x) - 1."),
    _unary("silu", "x * sigmoid(x)."),
    _unary("gelu", "0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."),
    _unary("gelu_erf", "0.5 x (1 + erf(x / sqrt(2)))."),
    _unary("gelu_quick", "x * sigmoid(1.702 x)."),
    _unary("softplus", "log(1 + exp(x)) without overflow."),
    _unary("hardswish", "x * clamp(x + 3, 0, 6) / 6."),
    _unary("hardsigmoid", "clamp(x + 3, 0, 6) / 6."),
    _unary("step", "1 above 0, else 0; NaN gives 0.", FLOATS, EXACT),
    _unary("floor", "The largest whole number not above x.", FLOATS, EXACT),
    _unary("ceil", "The smallest whole number not below x.", FLOATS, EXACT),
    _unary("round", "The nearest whole number; halves to even.", FLOATS, EXACT),
    _unary("trunc", "The whole part of x.", FLOATS, EXACT),
    _unary("logical_not", "True where x is false.", ("bool",), EXACT),
    _test("isnan", "Whether x is NaN."),
    _test("isinf", "Whether x is infinite."),
    _test("isfinite", "Whether x is neither infinite nor NaN."),
    Op(
        "scale",
        ("x",),
        "elementwise",
        rules.scale,
        "scale * x + bias, rounded after each.",
        (Attribute("scale", "real"), Attribute("bias", "real", 0.0)),
        (0,),
    ),
    Op(
        "clamp",
        ("x",),
        "elementwise",
        rules.clamp,
        "x, but not below `min` nor above `max`.",
        (Attribute("min", "real"), Attribute("max", "real")),
        (0,),
        EXACT,
    ),
    Op(
        "leaky_relu",
        ("x",),
        "elementwise",
        rules.scale,
        "x above 0, else x * `slope`.",
        (Attribute("slope", "real", 0.01),),
        (0,),
    ),
    Op(
        "cast",
        ("x",),
        "elementwise",
        rules.cast,
        "x as another data type; to integers towards zero, to bool whether it is not 0. Blocks convert "
        "from and to floats.",
        (Attribute("dtype", "dtype"),),
        (),
        EXACT,
    ),
    Op(
        "cpy",
        ("x", "target"),
        "move",
        rules.cpy,
        "The elements of x, in row-major order, in the shape and the data type of the target, as by cast.",
        tolerance=EXACT,
    ),
    # elementwise, several operands; shapes broadcast as in NumPy
    _arithmetic("add", "a + b.", blocks=True),
    _arithmetic("sub", "a - b."),
    _arithmetic("mul", "a * b."),
    _arithmetic("div", "a / b.", FLOATS),
    _binary("pow", "a to the power of b.", FLOATS),
    _binary("floor_divide", "floor(a / b); by an integer 0: 0."),
    _binary("remainder", "a - floor(a / b) * b, the sign of b; by an integer 0: 0."),
    _binary("maximum", "The larger one; NaN if either is.", NUMBERS, EXACT),
    _binary("minimum", "The smaller one; NaN if either is.", NUMBERS, EXACT),
    _comparison("equal", "a == b."),
    _comparison("not_equal", "a != b."),
    _comparison("less", "a < b.", NUMBERS),
    _comparison("less_equal", "a <= b.", NUMBERS),
    _comparison("greater", "a > b.", NUMBERS),
    _comparison("greater_equal", "a >= b.", NUMBERS),
    _comparison("logical_and", "Whether both are true.", ("bool",)),
    _comparison("logical_or", "Whether one is true.", ("bool",)),
    _comparison("logical_xor", "Whether exactly one is true.", ("bool",)),
    Op(
        "where",
        ("condition", "a", "b"),
        "elementwise",
        rules.where,
        "a where true, else b.",
        tolerance=EXACT,
    ),
    # reductions
    _reduction("reduce_sum", "The sum", empty=True),
    _reduction("reduce_mean", "The mean", empty=False),
    _reduction("reduce_prod", "The product", empty=True, tolerance=1e-6),
    _reduction("reduce_max", "The largest element, NaN if there is one,", empty=False, tolerance=EXACT),
    _reduction("reduce_min", "The smallest element, NaN if there is one,", empty=False, tolerance=EXACT),
    Op(
        "argmax",
        ("x",),
        "reduction",
        rules.last_axis_index,
        "The place (i32) of each row's first largest element.",
        tolerance=EXACT,
    ),
    # products and rows
    Op(
        "matmul",
        ("a", "b"),
        "matmul",
        rules.matmul,
        "The matrix product of the last two dimensions; leading ones broadcast.",
        tolerance=5e-7,
    ),
    Op(
        "norm",
        ("x",),
        "rows",
        rules.rows_with_eps,
        "(x - mean) / sqrt(variance + eps) of each row.",
        (_EPS,),
        (0,),
        1e-6,
    ),
    Op(
        "rms_norm",
        ("x",),
        "rows",
        rules.rows_with_eps,
        "x / sqrt(mean(x * x) + eps) of each row.",
        (_EPS,),
        (0,),
        1e-6,
    ),
    Op(
        "l2_norm",
        ("x",),
        "rows",
        rules.rows_with_eps,
        "x / max(sqrt(sum(x * x)), eps) of each row.",
        (_EPS,),
        (0,),
        1e-6,
    ),
    Op(
        "get_rows",
        ("rows", "indices"),
        "gather",
        rules.get_rows,
        "The rows at the indices; narrow floats and blocks come out as f32. An index outside is an error of "
        "the run.",
        tolerance=EXACT,
    ),
    # moves and views
    Op("cont", ("x",), "move", rules.same(ANY), "A contiguous copy.", tolerance=EXACT),
    Op(
        "concat",
        ("x*",),
        "move",
        rules.concat,
        "The operands, joined along `axis`.",
        (Attribute("axis", "integer", 0),),
        (),
        EXACT,
    ),
    Op(
        "reshape",
        ("x",),
        "view",
        rules.reshape,
        "The same elements in another shape.",
        (_SHAPE,),
        (),
        EXACT,
    ),
    Op(
        "permute",
        ("x",),
        "view",
        rules.permute,
        "The dimensions in the order `axes`.",
        (Attribute("axes", "integers"),),
        (),
        EXACT,
    ),
    Op(
        "broadcast_to",
        ("x",),
        "view",
        rules.broadcast_to,
        "x repeated to `shape`.",
        (_SHAPE,),
        (),
        EXACT,
    ),
    Op(
        "slice",
        ("x",),
        "view",
        rules.slice_,
        "Every `step`-th element from `start` up to `stop`.",
        tuple(Attribute(name, "integers") for name in ("start", "stop", "step")),
        (),
        EXACT,
    ),
    # sources and variables
    Op(
        "fill",
        (),
        "source",
        rules.fill,
        "A tensor of one value.",
        (_SHAPE, Attribute("value", "real"), Attribute("dtype", "dtype")),
        (),
        EXACT,
    ),
    Op(
        "arange",
        (),
        "source",
        rules.arange,
        "start, start + step, ... below stop, in f32.",
        tuple(Attribute(name, "real") for name in ("start", "stop", "step")),
    ),
    Op(
        "assign",
        ("variable", "value"),
        "variable",
        rules.assign,
        "Writes the value into the variable; later reads of the variable see it.",
        tolerance=EXACT,
    ),
)

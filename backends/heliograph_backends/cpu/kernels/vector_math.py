"""exp, log, erf, tanh and what is made of them, on sixteen float32 lanes.

Polynomials after range reduction, without tables or branches: both sides of a choice are computed
and selected, as vector code must. Largest error measured against float64 over ten million float32
patterns of all magnitudes (erf: two million) and three million points where the function bends, in
units of the last place: exp 1.01, log 0.83, erf 0.99, tanh 1.29, sigmoid 2.3. NaN stays NaN;
infinities, zeros of either sign and denormals come out right.

exp and log follow Moshier's Cephes (expf, logf); erf follows N. Juffa, "faster erff"
(stackoverflow.com/q/35148198), a polynomial below 475/512 and 1 - exp(p(x)) above.
"""

from __future__ import annotations

from llvmlite import ir

from .lanes import I32_VECTOR, LANES, Lanes

LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440054690583e-4
# Adding and taking away 1.5 * 2**23 rounds to an integer, and leaves that integer in the low bits
# of the sum.
ROUND = 12582912.0


def _integers(value: int) -> ir.Constant:
    return ir.Constant(I32_VECTOR, [value] * LANES)


def _power_of_two(exponent: ir.Value, like: Lanes) -> Lanes:
    """Return 2.0**exponent of sixteen int32 in [-126, 127]."""
    biased = like.builder.add(exponent, _integers(127))
    return Lanes.from_bits(like.builder, like.builder.shl(biased, _integers(23)))


def polynomial(x: Lanes, *coefficients: float) -> Lanes:
    """Evaluate by Horner's rule, highest power first, one fma a step."""
    result = Lanes.constant(x.builder, coefficients[0])
    for coefficient in coefficients[1:]:
        result = result.fma(x, coefficient)
    return result


def _split(x: Lanes) -> tuple[Lanes, ir.Value]:
    """Return e**r and n with x = n * ln(2) + r, |r| <= ln(2) / 2, for |x| that leave n an int32."""
    shifted = x.fma(LOG2_E, ROUND)
    n = shifted - ROUND
    r = n.fma(-LN2_LOW, n.fma(-LN2_HIGH, x))
    p = polynomial(
        r,
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
    exponent = x.builder.sub(shifted.bits(), Lanes.constant(x.builder, ROUND).bits())
    return p.fma(r * r, r) + 1.0, exponent


def exp(x: Lanes) -> Lanes:
    """e**x; 2**n is applied as two factors, so that denormals and overflow come out right."""
    x = x.where("<", -104.0, -104.0, x)
    x = x.where(">", 89.0, 89.0, x)
    fraction, exponent = _split(x)
    half = x.builder.ashr(exponent, _integers(1))
    rest = x.builder.sub(exponent, half)
    return fraction * _power_of_two(half, x) * _power_of_two(rest, x)


def _exp_bounded(x: Lanes) -> Lanes:
    """e**x for -87 <= x <= 88, with the bits of `exp`."""
    fraction, exponent = _split(x)
    return fraction * _power_of_two(exponent, x)


def log(x: Lanes) -> Lanes:
    """ln x = e * ln 2 + ln m with m in [sqrt(1/2), sqrt(2)); denormals are scaled up first."""
    builder = x.builder
    smallest = 1.1754943508222875e-38
    normal = x.where("<", smallest, x * 8388608.0, x)
    correction = x.where("<", smallest, -23.0, 0.0)
    # Taking away the pattern of sqrt(1/2) before the shift puts the cut between two binades there.
    offset = builder.sub(normal.bits(), _integers(0x3F3504F3))
    exponent = builder.ashr(offset, _integers(23))
    m = Lanes.from_bits(builder, builder.sub(normal.bits(), builder.shl(exponent, _integers(23))))
    e = Lanes(builder, builder.sitofp(exponent, x.value.type)) + correction
    f = m - 1.0
    z = f * f
    p = polynomial(
        f,
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
    y = e.fma(LN2_LOW, p * f * z)
    y = z.fma(-0.5, y)
    result = e.fma(LN2_HIGH, f + y)
    infinity = float("inf")
    result = x.where("==", infinity, infinity, result)
    result = x.where("==", 0.0, -infinity, result)
    result = x.where("<", 0.0, float("nan"), result)
    return Lanes(
        builder,
        builder.select(builder.fcmp_unordered("uno", x.value, x.value), x.value, result.value),
    )


def erf(x: Lanes) -> Lanes:
    """The error function: 1 - exp(p(|x|)) far from 0, x + x q(x^2) near it; at most 1 ulp off."""
    t, s = x.abs(), x * x
    high = polynomial(t, -1.72853470e-5, 3.83197126e-4).fma(s, polynomial(t, -3.88396438e-3, 2.42546219e-2))
    high = high.fma(t, -1.06777877e-1).fma(t, -6.34846687e-1).fma(t, -1.28717512e-1).fma(t, -t)
    # Below -17.5, 1 - exp is 1; denormals would be slow.
    high = high.where("<", -17.5, -17.5, high)
    far = (1.0 - _exp_bounded(high)).copysign(x)
    low = polynomial(
        s,
        -5.96761703e-4,
        4.99119423e-3,
        -2.67681349e-2,
        1.12819925e-1,
        -3.76125336e-1,
        1.28379166e-1,
    )
    near = low.fma(x, x)
    return t.where(">", 0.927734375, far, near)


def tanh(x: Lanes) -> Lanes:
    """x + x**3 * p(x**2) below 0.625, and 1 - 2 / (exp(2 * |x|) + 1) above, as Cephes (tanhf)."""
    t, s = x.abs(), x * x
    # From 10 on, the quotient is too small to matter.
    double = t.where(">", 10.0, 20.0, t + t)
    far = (1.0 - 2.0 / (_exp_bounded(double) + 1.0)).copysign(x)
    low = polynomial(
        s,
        -5.70498872745e-3,
        2.06390887954e-2,
        -5.37397155531e-2,
        1.33314422036e-1,
        -3.33332819422e-1,
    )
    near = (low * s).fma(x, x)
    # A NaN takes the near side, where it stays one.
    return t.where(">", 0.625, far, near)


def sigmoid(x: Lanes) -> Lanes:
    return 1.0 / (exp(-x) + 1.0)


def silu(x: Lanes) -> Lanes:
    return x / (exp(-x) + 1.0)


def gelu_quick(x: Lanes) -> Lanes:
    return x / (exp(x * -1.702) + 1.0)


def gelu_erf(x: Lanes) -> Lanes:
    return x * 0.5 * (erf(x * 0.70710678118654752) + 1.0)


def gelu(x: Lanes) -> Lanes:
    cube = x * x * x
    return x * 0.5 * (tanh((x + cube * 0.044715) * 0.79788456080286536) + 1.0)

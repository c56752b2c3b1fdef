// The operations of elementwise chains. The interpreter and the generated kernels use the same
// functions, compiled without contraction, so their bits are the same.

// The correctly rounded square root, without a branch. sqrtf branches for 0 and tiny numbers, which
// may be half of a chain's elements, for example after a relu.
#ifdef HELIOGRAPH_EMULATED
static __device__ __forceinline__ float square_root(float x) { return sqrtf(x); }
#else
static __device__ __forceinline__ float square_root(float x) {
  // A Newton step from the approximate reciprocal root, with the remainder rounded once, as in
  // CUDA's own.
  bool tiny = x < 0x1p-100f;
  float y, wide = tiny ? x * 0x1p64f : x;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(wide));
  float root = wide * y;
  root = __fmaf_rn(__fmaf_rn(-root, root, wide), 0.5f * y, root);
  if (tiny) root *= 0x1p-32f;
  return x == 0.0f || x == INFINITE ? x : root;
}
#endif

static __device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

static __device__ __forceinline__ float gelu(float x) {
  float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return 0.5f * x * (1.0f + tanhf(inner));
}

static __device__ __forceinline__ float hardsigmoid(float x) {
  return smaller(larger(x + 3.0f, 0.0f), 6.0f) / 6.0f;
}

static __device__ __forceinline__ float softplus(float x) {
  return x != x ? x : fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
}

static __device__ __forceinline__ float sgn(float x) { return x != x ? x : (float)((x > 0.0f) - (x < 0.0f)); }

// Names and formulas. x and y are the operands, p and q the instruction's numbers.
#define EVERY_OPERATION(ROW)                                \
  ROW(COPY, x)                                              \
  ROW(ADD, x + y)                                           \
  ROW(SUB, x - y)                                           \
  ROW(MUL, x * y)                                           \
  ROW(DIV, x / y)                                           \
  ROW(MAXIMUM, larger(x, y))                                \
  ROW(MINIMUM, smaller(x, y))                               \
  ROW(NEG, -x)                                              \
  ROW(ABS, fabsf(x))                                        \
  ROW(SGN, sgn(x))                                          \
  ROW(SQR, x * x)                                           \
  ROW(SQRT, square_root(x))                                 \
  ROW(RSQRT, 1.0f / square_root(x))                         \
  ROW(EXP, expf(x))                                         \
  ROW(EXPM1, expm1f(x))                                     \
  ROW(LOG, logf(x))                                         \
  ROW(LOG1P, log1pf(x))                                     \
  ROW(LOG2, log2f(x))                                       \
  ROW(LOG10, log10f(x))                                     \
  ROW(SIN, sinf(x))                                         \
  ROW(COS, cosf(x))                                         \
  ROW(TANH, tanhf(x))                                       \
  ROW(ERF, erff(x))                                         \
  ROW(SIGMOID, sigmoid(x))                                  \
  ROW(RELU, larger(x, 0.0f))                                \
  ROW(ELU, x > 0.0f ? x : expm1f(x))                        \
  ROW(SILU, x / (1.0f + expf(-x)))                          \
  ROW(GELU, gelu(x))                                        \
  ROW(GELU_ERF, 0.5f * x * (1.0f + erff(x * 0.7071067811865476f))) \
  ROW(GELU_QUICK, x / (1.0f + expf(-1.702f * x)))           \
  ROW(SOFTPLUS, softplus(x))                                \
  ROW(HARDSWISH, x * hardsigmoid(x))                        \
  ROW(HARDSIGMOID, hardsigmoid(x))                          \
  ROW(STEP, x > 0.0f ? 1.0f : 0.0f)                         \
  ROW(FLOOR, floorf(x))                                     \
  ROW(CEIL, ceilf(x))                                       \
  ROW(ROUND, rintf(x))                                      \
  ROW(TRUNC, truncf(x))                                     \
  ROW(SCALE, x * p + q)                                     \
  ROW(CLAMP, smaller(larger(x, p), q))                      \
  ROW(LEAKY_RELU, x > 0.0f ? x : x * p)                     \
  ROW(RELU_BACK, y <= 0.0f ? 0.0f : x)

#define AS_FUNCTION(name, formula) \
  static __device__ __forceinline__ float op_##name(float x, float y, float p, float q) { return formula; }
EVERY_OPERATION(AS_FUNCTION)

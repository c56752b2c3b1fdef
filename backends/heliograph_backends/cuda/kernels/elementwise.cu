// Chains of elementwise ops: one kernel for all of them, which interprets a program.
//
// A thread carries eight elements. `last` is the result of the instruction before, in registers of the machine;
// what is read later lies in shared memory. Instructions come with the kernel's parameters, so all threads read
// the same word of constant memory. After the last instruction of a node its value is rounded to the node's type,
// as the node by itself would.

#define MOST_OPERANDS 16
#define MOST_INSTRUCTIONS 32
#define LANES 8
#define THREADS 256
#define TILE (THREADS * LANES)

// Where an instruction reads: operands from 0, registers from 16, the result before at 32.
#define FIRST_REGISTER 16
#define LAST_RESULT 32

struct Instruction {
  int operation;
  int first;
  int second;
  int target;  // a register, or -1 if only the next instruction reads it
  float p;
  float q;
  int rounds;
  int reserved;
};

struct ElementwiseParameters {
  Walk walk;
  i64 count;
  int type;
  int instructions;
  Operand operands[MOST_OPERANDS];  // the first one is the result
  Instruction program[MOST_INSTRUCTIONS];
};

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

#define EACH(formula)                       \
  for (int i = 0; i < LANES; i++) {         \
    float x = a[i], y = b[i];               \
    last[i] = (formula);                    \
  }                                         \
  break

static __device__ __forceinline__ void apply(const Instruction& it, const float* a, const float* b, float* last) {
  float p = it.p, q = it.q;
  switch (it.operation) {
    case OP_COPY: EACH(x);
    case OP_ADD: EACH(x + y);
    case OP_SUB: EACH(x - y);
    case OP_MUL: EACH(x * y);
    case OP_DIV: EACH(x / y);
    case OP_MAXIMUM: EACH(larger(x, y));
    case OP_MINIMUM: EACH(smaller(x, y));
    case OP_NEG: EACH(-x);
    case OP_ABS: EACH(fabsf(x));
    case OP_SGN: EACH(sgn(x));
    case OP_SQR: EACH(x * x);
    case OP_SQRT: EACH(sqrtf(x));
    case OP_RSQRT: EACH(1.0f / sqrtf(x));
    case OP_EXP: EACH(expf(x));
    case OP_EXPM1: EACH(expm1f(x));
    case OP_LOG: EACH(logf(x));
    case OP_LOG1P: EACH(log1pf(x));
    case OP_SIN: EACH(sinf(x));
    case OP_COS: EACH(cosf(x));
    case OP_TANH: EACH(tanhf(x));
    case OP_ERF: EACH(erff(x));
    case OP_SIGMOID: EACH(sigmoid(x));
    case OP_RELU: EACH(larger(x, 0.0f));
    case OP_ELU: EACH(x > 0.0f ? x : expm1f(x));
    case OP_SILU: EACH(x / (1.0f + expf(-x)));
    case OP_GELU: EACH(gelu(x));
    case OP_GELU_ERF: EACH(0.5f * x * (1.0f + erff(x * 0.7071067811865476f)));
    case OP_GELU_QUICK: EACH(x / (1.0f + expf(-1.702f * x)));
    case OP_SOFTPLUS: EACH(softplus(x));
    case OP_HARDSWISH: EACH(x * hardsigmoid(x));
    case OP_HARDSIGMOID: EACH(hardsigmoid(x));
    case OP_STEP: EACH(x > 0.0f ? 1.0f : 0.0f);
    case OP_FLOOR: EACH(floorf(x));
    case OP_CEIL: EACH(ceilf(x));
    case OP_ROUND: EACH(rintf(x));
    case OP_TRUNC: EACH(truncf(x));
    case OP_SCALE: EACH(x * p + q);
    case OP_CLAMP: EACH(smaller(larger(x, p), q));
    case OP_LEAKY_RELU: EACH(x > 0.0f ? x : x * p);
  }
}

// A thread's elements are two runs of four, so that a warp's loads of either lie side by side.
static __device__ __forceinline__ i64 element_of(i64 tile, int lane) {
  return tile * TILE + (lane / 4) * (THREADS * 4) + threadIdx.x * 4 + lane % 4;
}

static __device__ __forceinline__ void load_in_order(const Operand& operand, i64 tile, i64 count, float* out) {
  const u8* base = reinterpret_cast<const u8*>(operand.address);
  int size = size_of(operand.type);
  for (int half = 0; half < LANES; half += 4) {
    i64 first = element_of(tile, half);
    const u8* place = base + first * size;
    if (first + 4 <= count && ((u64)place % (4 * size)) == 0) {
      if (operand.type == F32) {
        float4 found = *reinterpret_cast<const float4*>(place);
        out[half] = found.x, out[half + 1] = found.y, out[half + 2] = found.z, out[half + 3] = found.w;
      } else {
        ushort4 found = *reinterpret_cast<const ushort4*>(place);
        u16 bits[4] = {found.x, found.y, found.z, found.w};
        for (int i = 0; i < 4; i++)
          out[half + i] = operand.type == F16 ? f16_to_f32(bits[i]) : bf16_to_f32(bits[i]);
      }
    } else {
      for (int i = 0; i < 4; i++) out[half + i] = first + i < count ? load(place + i * size, operand.type) : 0.0f;
    }
  }
}

static __device__ __forceinline__ void load_operand(const ElementwiseParameters& p, int number, i64 tile, float* out) {
  const Operand& operand = p.operands[number];
  const u8* base = reinterpret_cast<const u8*>(operand.address);
  if (operand.kind == IN_ORDER) {
    load_in_order(operand, tile, p.count, out);
  } else if (operand.kind == ONE_ELEMENT) {
    float value = load(base, operand.type);
    for (int i = 0; i < LANES; i++) out[i] = value;
  } else {
    for (int i = 0; i < LANES; i++) {
      i64 index = element_of(tile, i);
      out[i] = index < p.count ? load(base + offset_at(p.walk, operand, index), operand.type) : 0.0f;
    }
  }
}

static __device__ __forceinline__ void store_result(const ElementwiseParameters& p, i64 tile, const float* values) {
  const Operand& result = p.operands[0];
  u8* base = reinterpret_cast<u8*>(result.address);
  int size = size_of(result.type);
  for (int half = 0; half < LANES; half += 4) {
    i64 first = element_of(tile, half);
    u8* place = base + first * size;
    if (result.kind == IN_ORDER && result.type == F32 && first + 4 <= p.count && ((u64)place % 16) == 0) {
      float4 out = {values[half], values[half + 1], values[half + 2], values[half + 3]};
      *reinterpret_cast<float4*>(place) = out;
      continue;
    }
    for (int i = 0; i < 4; i++) {
      if (first + i >= p.count) break;
      i64 offset = result.kind == STRIDED ? offset_at(p.walk, result, first + i) : (first + i) * size;
      store(base + offset, result.type, values[half + i]);
    }
  }
}

static __device__ __forceinline__ void fetch(
    const ElementwiseParameters& p, int source, i64 tile, const float* registers, const float* last, float* out) {
  if (source == LAST_RESULT) {
    for (int i = 0; i < LANES; i++) out[i] = last[i];
  } else if (source >= FIRST_REGISTER) {
    const float* found = registers + (source - FIRST_REGISTER) * TILE + threadIdx.x;
    for (int i = 0; i < LANES; i++) out[i] = found[i * THREADS];
  } else {
    load_operand(p, source, tile, out);
  }
}

KERNEL(elementwise, ElementwiseParameters, THREADS) {
  DYNAMIC_SHARED(float, registers);
  i64 tiles = (p.count + TILE - 1) / TILE;
  for (i64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    float last[LANES];
    for (int i = 0; i < LANES; i++) last[i] = 0.0f;
    for (int number = 0; number < p.instructions; number++) {
      const Instruction& it = p.program[number];
      float a[LANES], b[LANES];
      fetch(p, it.first, tile, registers, last, a);
      if (it.second >= 0) {
        fetch(p, it.second, tile, registers, last, b);
      } else {
        for (int i = 0; i < LANES; i++) b[i] = 0.0f;
      }
      apply(it, a, b, last);
      if (it.rounds && p.type != F32)
        for (int i = 0; i < LANES; i++) last[i] = rounded(last[i], p.type);
      if (it.target >= 0)
        for (int i = 0; i < LANES; i++) registers[it.target * TILE + i * THREADS + threadIdx.x] = last[i];
    }
    store_result(p, tile, last);
  }
}

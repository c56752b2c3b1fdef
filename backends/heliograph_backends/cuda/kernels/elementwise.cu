// Chains of elementwise ops: one kernel, which interprets a program.
//
// A thread processes eight elements. `last` is the result of the previous instruction, in
// registers; values that are read later lie in shared memory. Instructions are kernel parameters,
// so all threads read the same word of constant memory. After the last instruction of a node its
// value is rounded to the node's type, as the node by itself would. An instruction costs about
// seven machine instructions for each element beside its computation, so chains of many elements
// have their own kernels (`chain.cu`).

#define LANES 8
#define THREADS 256
#define TILE (THREADS * LANES)

// The sources of an instruction: operands from 0, registers from 16, then the previous result.
#define FIRST_REGISTER 16
#define LAST_RESULT 32

struct Instruction {
  u8 operation;
  i8 first;
  i8 second;
  i8 target;  // a register, or -1 if only the next instruction reads it
  int rounds;
  float p;
  float q;
};

template <int OPERANDS, int INSTRUCTIONS>
struct Interpreted {
  Divisor divisors[MOST_DIMENSIONS];
  u32 count;
  int dimensions;
  int type;
  int instructions;
  Operand operands[OPERANDS];  // the first one is the result
  Instruction program[INSTRUCTIONS];
};

#define CASE(name, formula)                                                      \
  case OP_##name:                                                                \
    for (int i = 0; i < LANES; i++) last[i] = op_##name(a[i], b[i], it.p, it.q); \
    break;

static __device__ __forceinline__ void apply(const Instruction& it, const float* a, const float* b, float* last) {
  switch (it.operation) { EVERY_OPERATION(CASE) }
}

// A thread's elements are two runs of four, so that a warp's loads of each are contiguous.
static __device__ __forceinline__ u32 element_of(u32 tile, int lane) {
  return tile * TILE + (lane / 4) * (THREADS * 4) + threadIdx.x * 4 + lane % 4;
}

template <typename Parameters>
static __device__ __forceinline__ void offsets_of(
    const Parameters& p, const Operand& operand, u32 tile, i64 (&offsets)[LANES]) {
  u32 rest[LANES];
  for (int i = 0; i < LANES; i++) rest[i] = element_of(tile, i), offsets[i] = 0;
#pragma unroll 1
  for (int axis = p.dimensions - 1; axis >= 0; axis--) {
    const Divisor& size = p.divisors[axis];
    i64 stride = operand.strides[axis];
    for (int i = 0; i < LANES; i++) {
      u32 above = divided(rest[i], size);
      offsets[i] += (i64)(rest[i] - above * size.size) * stride;
      rest[i] = above;
    }
  }
}

static __device__ __forceinline__ void load_in_order(const Operand& operand, u32 tile, u32 count, float* out) {
  const u8* base = reinterpret_cast<const u8*>(operand.address);
  int size = size_of(operand.type);
  for (int half = 0; half < LANES; half += 4) {
    u32 first = element_of(tile, half);
    const u8* place = base + (u64)first * size;
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

template <typename Parameters>
static __device__ __forceinline__ void load_operand(const Parameters& p, int number, u32 tile, float* out) {
  const Operand& operand = p.operands[number];
  const u8* base = reinterpret_cast<const u8*>(operand.address);
  if (operand.kind == IN_ORDER) {
    load_in_order(operand, tile, p.count, out);
  } else if (operand.kind == ONE_ELEMENT) {
    float value = load(base, operand.type);
    for (int i = 0; i < LANES; i++) out[i] = value;
  } else {
    i64 offsets[LANES];
    offsets_of(p, operand, tile, offsets);
    for (int i = 0; i < LANES; i++)
      out[i] = element_of(tile, i) < p.count ? load(base + offsets[i], operand.type) : 0.0f;
  }
}

template <typename Parameters>
static __device__ __forceinline__ void store_strided(const Parameters& p, u32 tile, const float* values) {
  const Operand& result = p.operands[0];
  i64 offsets[LANES];
  offsets_of(p, result, tile, offsets);
  for (int i = 0; i < LANES; i++)
    if (element_of(tile, i) < p.count)
      store(reinterpret_cast<u8*>(result.address) + offsets[i], result.type, values[i]);
}

template <typename Parameters>
static __device__ __forceinline__ void store_in_order(const Parameters& p, u32 tile, const float* values) {
  const Operand& result = p.operands[0];
  int size = size_of(result.type);
  for (int half = 0; half < LANES; half += 4) {
    u32 first = element_of(tile, half);
    u8* place = reinterpret_cast<u8*>(result.address) + (u64)first * size;
    if (result.type == F32 && first + 4 <= p.count && ((u64)place % 16) == 0) {
      float4 out = {values[half], values[half + 1], values[half + 2], values[half + 3]};
      *reinterpret_cast<float4*>(place) = out;
      continue;
    }
    for (int i = 0; i < 4; i++)
      if (first + i < p.count) store(place + i * size, result.type, values[half + i]);
  }
}

template <typename Parameters>
static __device__ __forceinline__ void fetch(
    const Parameters& p, int source, u32 tile, const float* registers, const float* last, float* out) {
  if (source == LAST_RESULT) {
    for (int i = 0; i < LANES; i++) out[i] = last[i];
  } else if (source >= FIRST_REGISTER) {
    const float* found = registers + (source - FIRST_REGISTER) * TILE + threadIdx.x;
    for (int i = 0; i < LANES; i++) out[i] = found[i * THREADS];
  } else {
    load_operand(p, source, tile, out);
  }
}

template <typename Parameters>
static __device__ __forceinline__ void interpret(const Parameters& p, float* registers) {
  u32 tiles = (p.count + TILE - 1) / TILE;
  for (u32 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
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
    if (p.operands[0].kind == STRIDED)
      store_strided(p, tile, last);
    else
      store_in_order(p, tile, last);
  }
}

typedef Interpreted<16, 32> ElementwiseParameters;
// Most chains fit into these. Parameters are copied with each launch, and into each recording.
typedef Interpreted<4, 8> ElementwiseFewParameters;

KERNEL(elementwise, ElementwiseParameters, THREADS) {
  DYNAMIC_SHARED(float, registers);
  interpret(p, registers);
}

KERNEL(elementwise_few, ElementwiseFewParameters, THREADS) {
  DYNAMIC_SHARED(float, registers);
  interpret(p, registers);
}

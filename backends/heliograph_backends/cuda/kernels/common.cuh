// Shared by the kernels: types, loads and stores, sums over a warp and a block, matrix
// instructions.
//
// A kernel takes one struct by value, which lies in constant memory; its fields are those of the
// NumPy type of the same name in `parameters.py`. CUDA's headers are not included, so NVRTC does
// not need them. With HELIOGRAPH_EMULATED, tests compile this with another compiler, which brings
// its own definitions of a device's functions.

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef long long i64;
typedef unsigned long long u64;

#define MOST_DIMENSIONS 6

// Numbers of data types, as in `parameters.py`.
enum Type {
  F32 = 0, F16 = 1, BF16 = 2, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS,
  MXFP4, TQ1_0, TQ2_0, IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, NVFP4
};

// The layouts of a chain's operand.
enum Kind { IN_ORDER = 0, ONE_ELEMENT = 1, STRIDED = 2 };

struct Operand {
  u64 address;
  i64 strides[MOST_DIMENSIONS];  // in bytes
  int type;
  int kind;
};

struct Walk {
  i64 sizes[MOST_DIMENSIONS];
  int dimensions;
  int reserved;
};

#ifndef HELIOGRAPH_EMULATED
#define KERNEL(name, Parameters, threads) \
  extern "C" __global__ void __launch_bounds__(threads) name(const __grid_constant__ Parameters p)
#define DYNAMIC_SHARED(T, name)                                     \
  extern __shared__ __align__(16) unsigned char dynamic_shared[]; \
  T* name = reinterpret_cast<T*>(dynamic_shared)
#define INFINITE __int_as_float(0x7f800000)

static __device__ __forceinline__ float f16_to_f32(u16 bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

static __device__ __forceinline__ u16 f32_to_f16(float value) {
  u16 bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Two at once: the first is the lower half of the word.
static __device__ __forceinline__ u32 f32_pair_to_f16(float first, float second) {
  u32 bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// Rounds to the nearest, halves to even; NaN stays NaN.
static __device__ __forceinline__ u16 f32_to_bf16(float value) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

static __device__ __forceinline__ u32 f32_pair_to_bf16(float first, float second) {
  u32 bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// Rounded to the 10 bits of mantissa that matrix units read, with the range of f32.
static __device__ __forceinline__ u32 to_tf32(float value) {
  u32 bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(value));
  return bits;
}

// d += a b over a warp: a [16, 8] by rows, b [8, 8] by columns, d [16, 8]. With g = lane / 4, t =
// lane % 4 a lane has a(g, t), a(g + 8, t), a(g, t + 4), a(g + 8, t + 4); b(t, g), b(t + 4, g);
// d(g, 2 t), d(g, 2 t + 1), d(g + 8, 2 t), d(g + 8, 2 t + 1). See the PTX manual, mma.m16n8k8 with
// tf32.
static __device__ __forceinline__ void multiply_tiles(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

#define FULL_WARP 0xffffffffu

static __device__ __forceinline__ float bf16_to_f32(u16 bits) { return __int_as_float((int)((u32)bits << 16)); }

static __device__ __forceinline__ float load(const u8* place, int type) {
  if (type == F32) return *reinterpret_cast<const float*>(place);
  u16 bits = *reinterpret_cast<const u16*>(place);
  return type == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

static __device__ __forceinline__ void store(u8* place, int type, float value) {
  if (type == F32)
    *reinterpret_cast<float*>(place) = value;
  else
    *reinterpret_cast<u16*>(place) = type == F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

// The value after it is stored and loaded again.
static __device__ __forceinline__ float rounded(float value, int type) {
  if (type == F32) return value;
  return type == F16 ? f16_to_f32(f32_to_f16(value)) : bf16_to_f32(f32_to_bf16(value));
}

static __device__ __forceinline__ int size_of(int type) { return type == F32 ? 4 : 2; }

// The larger one, or NaN if one is.
static __device__ __forceinline__ float larger(float a, float b) { return a > b || a != a ? a : b; }
static __device__ __forceinline__ float smaller(float a, float b) { return a < b || a != a ? a : b; }

static __device__ __forceinline__ float warp_sum(float value) {
  for (int step = 16; step; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}

static __device__ __forceinline__ float warp_larger(float value) {
  for (int step = 16; step; step /= 2) value = larger(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
}

// Over all threads of a row: those of a warp or, if more than 32, those of the block, through 32
// words of `shared`.
static __device__ __forceinline__ float row_sum(float value, float* shared, int threads) {
  value = warp_sum(value);
  if (threads <= 32) return value;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  return warp_sum(lane < threads / 32 ? shared[lane] : 0.0f);
}

static __device__ __forceinline__ float row_larger(float value, float* shared, int threads) {
  value = warp_larger(value);
  if (threads <= 32) return value;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  if (lane == 0) shared[warp] = value;
  __syncthreads();
  return warp_larger(lane < threads / 32 ? shared[lane] : shared[0]);
}

// The offset in bytes of the element at `index`, in row-major order over the walk.
static __device__ __forceinline__ i64 offset_at(const Walk& walk, const Operand& operand, i64 index) {
  i64 offset = 0;
  for (int axis = walk.dimensions - 1; axis >= 0; axis--) {
    i64 rest = index / walk.sizes[axis];
    offset += (index - rest * walk.sizes[axis]) * operand.strides[axis];
    index = rest;
  }
  return offset;
}

static __device__ __forceinline__ u8* row_of(const Walk& walk, const Operand& operand, i64 row) {
  return reinterpret_cast<u8*>(operand.address) + offset_at(walk, operand, row);
}

// floor(n / size) for n < 2^31 is n * multiplier >> shift: Granlund and Montgomery, "Division by
// invariant integers using multiplication", 1994.
struct Divisor {
  u32 size, multiplier, shift, reserved;
};

static __device__ __forceinline__ u32 divided(u32 n, const Divisor& by) {
  return (u32)(((u64)n * by.multiplier) >> by.shift);
}

// Records the first failure of a run: the node's number and the bad index. Later ones are dropped.
static __device__ __forceinline__ void report(u64 failure, int node, i64 met) {
  u64* words = reinterpret_cast<u64*>(failure);
  if (atomicCAS(words, 0ull, (u64)node + 1) == 0ull) words[1] = (u64)met;
}

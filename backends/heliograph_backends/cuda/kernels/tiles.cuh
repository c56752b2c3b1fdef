// Shared by kernels on the matrix units and those of rows: powers of two, exact products of f32,
// and four contiguous elements.

struct alignas(16) Chunk { u32 words[4]; };
struct alignas(8) Pair { u32 words[2]; };

// `row_larger` over all threads of a row, but NaN is ignored.
static __device__ __forceinline__ float row_largest(float value, float* shared, int threads) {
#pragma unroll
  for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
  if (threads <= 32) return value;
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  value = shared[threadIdx.x % 32 < threads / 32 ? threadIdx.x % 32 : 0];
#pragma unroll
  for (int step = 16; step; step /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
}

#define LOG2_E 1.4426950408889634f

// tanh from a power of two: 1 - 2 / (e^2x + 1), exact at both infinities.
static __device__ __forceinline__ float fast_tanh(float x) {
  return 1.0f - 2.0f * fast_reciprocal(fast_exp2(x * (2.0f * LOG2_E)) + 1.0f);
}

// The rounding error of tf32; 0 for numbers that are not finite.
static __device__ __forceinline__ u32 tf32_rest(u32 bits, u32 rounded) {
  float rest = __int_as_float((int)bits) - __int_as_float((int)rounded);
  return to_tf32(rest == rest ? rest : 0.0f);
}

// As `multiply_tiles`, for f32 as three products of the tf32 parts and their rounding errors: (h +
// l)(h' + l') without l l', so that sums are as exact as those of f32 (Ootomo and Yokota,
// "Recovering single precision accuracy from Tensor Cores", 2022).
static __device__ __forceinline__ void multiply_wide(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  u32 high[4], high_b[2] = {to_tf32(__int_as_float((int)b0)), to_tf32(__int_as_float((int)b1))};
  u32 low[4], low_b[2] = {tf32_rest(b0, high_b[0]), tf32_rest(b1, high_b[1])};
#pragma unroll
  for (int i = 0; i < 4; i++) high[i] = to_tf32(__int_as_float((int)a[i])), low[i] = tf32_rest(a[i], high[i]);
  multiply_tiles(d, low, high_b);
  multiply_tiles(d, high, low_b);
  multiply_tiles(d, high, high_b);
}

// Four contiguous elements of 4 or 2 bytes.
template <bool NARROW> struct Four;
template <> struct Four<false> {
  typedef Chunk Words;
  enum { SIZE = 4 };
  __device__ __forceinline__ static void open(const Chunk& from, int, float (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) out[i] = __int_as_float((int)from.words[i]);
  }
  __device__ __forceinline__ static Chunk close(int, const float (&values)[4]) {
    Chunk made;
#pragma unroll
    for (int i = 0; i < 4; i++) made.words[i] = (u32)__float_as_int(values[i]);
    return made;
  }
};
template <> struct Four<true> {
  typedef Pair Words;
  enum { SIZE = 2 };
  __device__ __forceinline__ static void open(const Pair& from, int type, float (&out)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u16 bits = (u16)(from.words[i / 2] >> i % 2 * 16);
      out[i] = type == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }
  }
  __device__ __forceinline__ static Pair close(int type, const float (&values)[4]) {
    Pair made;
#pragma unroll
    for (int i = 0; i < 2; i++)
      made.words[i] = type == F16 ? narrow_pair<F16>(values[2 * i], values[2 * i + 1])
                                  : narrow_pair<BF16>(values[2 * i], values[2 * i + 1]);
    return made;
  }
};

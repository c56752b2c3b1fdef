// What kernels on the matrix units share: copies to shared memory beside computing, tiles from there to registers, and
// products of tiles.
//
// A tile is eight rows of 16 bytes. With g = lane / 4, t = lane % 4 a lane has word t of row g, which are two narrow
// floats or one of 4 bytes. See the PTX manual, cp.async, ldmatrix and mma.

struct alignas(16) Chunk { u32 words[4]; };
struct alignas(8) Pair { u32 words[2]; };

#ifndef HELIOGRAPH_EMULATED
// A kernel of which so many blocks are to fit on a multiprocessor.
#define KERNEL_OF_BLOCKS(name, Parameters, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Parameters p)

// An address in the device's memory; the compiler is told that it is no other.
static __device__ __forceinline__ u8* in_memory(u64 address) {
  u8* place = reinterpret_cast<u8*>(address);
  __builtin_assume(__isGlobal(place));
  return place;
}

static __device__ __forceinline__ u32 shared_address(const void* place) {
  u32 found;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(found) : "l"(place));
  return found;
}

// 16 bytes of shared memory, of which `bytes` come from memory and the rest are 0; past the first-level cache. Both
// places are multiples of 16. The thread sees them behind `await_copies`, others behind a barrier as well.
static __device__ __forceinline__ void copy_later(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}

// Ends a group of copies, which may be empty.
static __device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most so many of this thread's last groups are on their way.
template <int LEFT>
static __device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// Four tiles; lanes 8 i to 8 i + 7 say where the rows of tile i are.
static __device__ __forceinline__ void load_tiles(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row)));
}

// The same of narrow floats with rows and columns exchanged: a lane has rows 2 t and 2 t + 1 of column g.
static __device__ __forceinline__ void load_tiles_transposed(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row)));
}

// d += a b over a warp, of narrow floats: a [16, 16] by rows, b [16, 8] by columns, d [16, 8]. A lane has a(g, 2 t) and
// the next one, a(g + 8, 2 t), a(g, 2 t + 8), a(g + 8, 2 t + 8); b(2 t, g) and the next one, b(2 t + 8, g); d as in
// `multiply_tiles`.
template <int T>
static __device__ __forceinline__ void multiply_narrow(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if constexpr (T == F16)
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two narrow floats in a word, the first in its lower half.
template <int T>
static __device__ __forceinline__ u32 narrow_pair(float first, float second) {
  u32 word;
  if constexpr (T == F16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

// Sums of two pairs of narrow floats, rounded once; those of f32 that are rounded afterwards have the same bits.
template <int T>
static __device__ __forceinline__ u32 add_narrow(u32 a, u32 b) {
  u32 sum;
  if constexpr (T == F16)
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));  // 1 a + b
  return sum;
}

// Powers of two with an error of two units of the last place, and nothing below the smallest normal float.
static __device__ __forceinline__ float fast_exp2(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}

static __device__ __forceinline__ float fast_reciprocal(float x) {
  float found;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
#endif

// Of all threads of a row as `row_larger`, but a NaN is left out.
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

// What rounding to tf32 took off a number; nothing of one that is not finite.
static __device__ __forceinline__ u32 tf32_rest(u32 bits, u32 rounded) {
  float rest = __int_as_float((int)bits) - __int_as_float((int)rounded);
  return to_tf32(rest == rest ? rest : 0.0f);
}

// As `multiply_tiles`, of f32 in three products of what is rounded to tf32 and of what that took: (h + l)(h' + l')
// without l l', so that sums are as exact as those of f32 (Ootomo and Yokota, "Recovering single precision accuracy from
// Tensor Cores", 2022).
static __device__ __forceinline__ void multiply_wide(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  u32 high[4], high_b[2] = {to_tf32(__int_as_float((int)b0)), to_tf32(__int_as_float((int)b1))};
  u32 low[4], low_b[2] = {tf32_rest(b0, high_b[0]), tf32_rest(b1, high_b[1])};
#pragma unroll
  for (int i = 0; i < 4; i++) high[i] = to_tf32(__int_as_float((int)a[i])), low[i] = tf32_rest(a[i], high[i]);
  multiply_tiles(d, low, high_b);
  multiply_tiles(d, high, low_b);
  multiply_tiles(d, high, high_b);
}

// Four elements side by side, as they lie, of 4 or 2 bytes.
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

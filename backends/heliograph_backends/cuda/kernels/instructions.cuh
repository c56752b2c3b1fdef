// Instructions that products need and C++ has no operator for: fetches to shared memory that go on by
// themselves, wide loads, sums of products of bytes, and the matrix units on bf16. See the PTX manual under
// each name.

#ifndef HELIOGRAPH_EMULATED
// A kernel of which a multiprocessor has so many blocks, so that it has no more registers than that allows.
#define KERNEL_BESIDE(blocks, name, Parameters, threads) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Parameters p)

// Where something is in shared memory, as fetches are told it.
typedef u32 SharedPlace;
static __device__ __forceinline__ SharedPlace shared_place(const void* place) {
  u32 found;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(found) : "l"(place));
  return found;
}

// 16 bytes from memory, past the first-level cache, to shared memory. Both places are multiples of 16. The
// thread sees them behind `await_fetches`, others of its warp behind a barrier after that.
static __device__ __forceinline__ void fetch_later(SharedPlace to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, with 0 for all but the first `bytes`.
static __device__ __forceinline__ void fetch_later(SharedPlace to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Ends a group of fetches, which may be empty.
static __device__ __forceinline__ void end_fetches() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most so many of this thread's last groups are on their way.
template <int LEFT>
static __device__ __forceinline__ void await_fetches() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// N words, a power of two, from a multiple of their size.
template <int N>
static __device__ __forceinline__ void load_words(const void* place, u32* out) {
  if constexpr (N == 4) {
    uint4 found = *reinterpret_cast<const uint4*>(place);
    out[0] = found.x, out[1] = found.y, out[2] = found.z, out[3] = found.w;
  } else if constexpr (N == 2) {
    uint2 found = *reinterpret_cast<const uint2*>(place);
    out[0] = found.x, out[1] = found.y;
  } else {
    out[0] = *reinterpret_cast<const u32*>(place);
  }
}

static __device__ __forceinline__ void store_words(void* place, u32 a, u32 b, u32 c, u32 d) {
  uint4 four = {a, b, c, d};
  *reinterpret_cast<uint4*>(place) = four;
}

// Four of the eight bytes of `high` and `low`, by the nibbles of `which`, the lowest first.
static __device__ __forceinline__ u32 bytes_of(u32 low, u32 high, u32 which) {
  u32 found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(low), "r"(high), "r"(which));
  return found;
}

// sum + the products of four bytes of `a`, signed or not, with four signed bytes of `b`.
template <bool SIGNED>
static __device__ __forceinline__ int dot_bytes(u32 a, u32 b, int sum) {
  int found;
  if (SIGNED)
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(sum));
  else
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(sum));
  return found;
}

// Two numbers as bf16 in a word, the first in its lower half.
static __device__ __forceinline__ u32 bf16_pair(float first, float second) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
}

// Sums of two pairs of bf16.
static __device__ __forceinline__ u32 add_bf16_pairs(u32 a, u32 b) {
  u32 sum;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80), "r"(b));
  return sum;
}

// Four tiles of eight rows of 16 bytes; lanes 8 i to 8 i + 7 say where the rows of tile i are. With g = lane
// / 4 and t = lane % 4 a lane has word t of row g of each. See ldmatrix.
static __device__ __forceinline__ void load_matrices(SharedPlace row, u32 (&out)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}

// d += a b over a warp, of bf16: a [16, 16] by rows, b [16, 8] by columns, d [16, 8]. A lane has a(g, 2 t)
// and the next one, a(g + 8, 2 t), a(g, 2 t + 8), a(g + 8, 2 t + 8); b(2 t, g) and the next one, b(2 t + 8,
// g); d(g, 2 t) and the next one, d(g + 8, 2 t) and the next one. See mma.m16n8k16.
static __device__ __forceinline__ void multiply_bf16(float (&d)[4], const u32 (&a)[4], u32 b, u32 next_b) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(next_b));
}
#endif

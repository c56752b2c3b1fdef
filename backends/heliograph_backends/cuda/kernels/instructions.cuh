// Instructions without a C++ operator: asynchronous copies to shared memory, wide loads, sums of
// products of bytes, tiles from shared memory to registers, and products of tiles on the matrix
// units.
//
// A tile is eight rows of 16 bytes. With g = lane / 4, t = lane % 4 a lane has word t of row g: two
// narrow floats or one of 4 bytes. See the PTX manual, cp.async, prmt, dp4a, ldmatrix and mma.

#ifndef HELIOGRAPH_EMULATED
// A kernel of which this many blocks must fit on a multiprocessor, which limits its registers.
#define KERNEL_OF_BLOCKS(name, Parameters, threads, blocks) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Parameters p)

// A pointer to the device's memory, marked as unaliased.
static __device__ __forceinline__ u8* in_memory(u64 address) {
  u8* place = reinterpret_cast<u8*>(address);
  __builtin_assume(__isGlobal(place));
  return place;
}

// An address in shared memory, as copies and loads of tiles take it.
typedef u32 SharedPlace;
static __device__ __forceinline__ SharedPlace shared_place(const void* place) {
  u32 found;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(found) : "l"(place));
  return found;
}

// Copies 16 bytes from memory to shared memory, bypassing the first-level cache. Both addresses are
// multiples of 16. The thread sees them after `await_copies`, other threads after a barrier as
// well.
static __device__ __forceinline__ void copy_later(SharedPlace to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The same, with 0 for all but the first `bytes`.
static __device__ __forceinline__ void copy_later(SharedPlace to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void copy_later(void* to, const void* from, int bytes) {
  copy_later(shared_place(to), from, bytes);
}

// Ends a group of copies, which may be empty.
static __device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most this many of the thread's last groups are in flight.
template <int LEFT>
static __device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
}

// N words (a power of two) from an address that is a multiple of their size.
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

// Two narrow floats in a word, the first in its lower half.
template <int T>
static __device__ __forceinline__ u32 narrow_pair(float first, float second) {
  return T == F16 ? f32_pair_to_f16(first, second) : f32_pair_to_bf16(first, second);
}

// Sums of two pairs of narrow floats, rounded once; f32 sums that are rounded afterwards have the
// same bits.
template <int T>
static __device__ __forceinline__ u32 add_narrow(u32 a, u32 b) {
  u32 sum;
  if constexpr (T == F16)
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(sum) : "r"(a), "r"(b));
  else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(sum) : "r"(a), "r"(0x3f803f80u), "r"(b));  // 1 a + b
  return sum;
}

// Four tiles; lanes 8 i to 8 i + 7 have the addresses of the rows of tile i.
static __device__ __forceinline__ void load_tiles(u32 (&out)[4], SharedPlace row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(row)
               : "memory");
}
static __device__ __forceinline__ void load_tiles(u32 (&out)[4], const void* row) {
  load_tiles(out, shared_place(row));
}

// The same for narrow floats, transposed: a lane has rows 2 t and 2 t + 1 of column g.
static __device__ __forceinline__ void load_tiles_transposed(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_place(row))
               : "memory");
}

// d += a b over a warp, of narrow floats: a [16, 16] by rows, b [16, 8] by columns, d [16, 8]. A
// lane has a(g, 2 t) and the next one, a(g + 8, 2 t), a(g, 2 t + 8), a(g + 8, 2 t + 8); b(2 t, g)
// and the next one, b(2 t + 8, g); d as in `multiply_tiles`.
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

// Powers of two with an error of two units in the last place; results below the smallest normal
// float are 0.
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

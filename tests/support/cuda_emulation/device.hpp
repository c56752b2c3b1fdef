// A block of CUDA threads on one host thread, so that the kernels' own source runs where there is no GPU.
//
// Every thread of a block is a fibre. Barriers and exchanges between lanes give way to the others; where they
// can never all arrive, the launch fails with DEADLOCK instead of hanging. Shared memory is poisoned for each block.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define HELIOGRAPH_EMULATED
#define __device__
#define __forceinline__ inline
#define __shared__ static
#define INFINITE INFINITY

struct Index { unsigned x, y, z; };
struct float4 { float x, y, z, w; };
struct ushort4 { unsigned short x, y, z, w; };
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emulated {

enum State { READY, AT_BLOCK, AT_WARP, DONE };
enum Result { OK = 0, DEADLOCK = 1, MISALIGNED = 3, OUTSIDE_SHARED = 4 };

// A copy to shared memory beside computing.
struct Copy {
  void* to;
  const void* from;
  int bytes;
};

struct Fibre {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(65536);
  State state = READY;
  Index index{};
  std::vector<std::vector<Copy>> copies{1};  // in groups, the last one of which is not ended
};

// What the lanes of a warp show each other. Two sets in turn: one barrier for each exchange is enough.
struct Warp {
  float values[2][32];
  float a[2][32][4], b[2][32][2];
  unsigned narrow_a[2][32][4], narrow_b[2][32][2];
  const unsigned char* rows[2][32];
  int turns[32] = {};
};

static std::vector<Fibre> fibres;
static std::vector<Warp> warps;
static std::vector<float> dynamic;
static ucontext_t scheduler;
static Fibre* current;
static std::function<void()> body;
static Index block_index, block_size, grid_size;
static int any_of_block[2], any_turn;
// What a thread met that ends the launch.
static int fault;
// Words behind a block's dynamic shared memory, which nobody writes.
static const size_t GUARD_WORDS = 64;

static unsigned linear() {
  return current->index.x + block_size.x * (current->index.y + block_size.y * current->index.z);
}
static unsigned lane() { return linear() % 32; }
static Warp& warp() { return warps[linear() / 32]; }

static void give_way(State state) {
  current->state = state;
  swapcontext(&current->context, &scheduler);
}

static void enter() {
  body();
  current->state = DONE;
  swapcontext(&current->context, &scheduler);
}

static void begin(Fibre& fibre) {
  getcontext(&fibre.context);
  fibre.context.uc_stack.ss_sp = fibre.stack.data();
  fibre.context.uc_stack.ss_size = fibre.stack.size();
  fibre.context.uc_link = &scheduler;
  fibre.state = READY;
  fibre.copies.assign(1, {});
  makecontext(&fibre.context, enter, 0);
}

static bool release(unsigned first, unsigned last, State state) {
  bool any = false;
  for (unsigned i = first; i < last; i++) {
    if (fibres[i].state != DONE && fibres[i].state != state) return false;
    any = any || fibres[i].state == state;
  }
  for (unsigned i = first; any && i < last; i++)
    if (fibres[i].state == state) fibres[i].state = READY;
  return any;
}

static Result run_block() {
  unsigned count = (unsigned)fibres.size();
  std::fill(dynamic.begin(), dynamic.end(), NAN);
  for (auto& one : warps) one = Warp();
  for (unsigned i = 0; i < count; i++) {
    begin(fibres[i]);
    fibres[i].index = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
  }
  for (;;) {
    bool ran = false, left = false;
    for (auto& one : fibres) {
      if (one.state == READY) {
        ran = true;
        current = &one;
        swapcontext(&scheduler, &one.context);
      }
      left = left || one.state != DONE;
    }
    if (!left) {
      for (size_t i = dynamic.size() - GUARD_WORDS; i < dynamic.size(); i++)
        if (dynamic[i] == dynamic[i]) return OUTSIDE_SHARED;
      return (Result)fault;
    }
    bool released = false;
    for (unsigned first = 0; first < count; first += 32)
      released = release(first, std::min(first + 32, count), AT_WARP) || released;
    released = release(0, count, AT_BLOCK) || released;
    if (!ran && !released) return DEADLOCK;
  }
}

static int launch(std::function<void()> kernel, const unsigned* grid, const unsigned* block, unsigned shared) {
  grid_size = {grid[0], grid[1], grid[2]}, block_size = {block[0], block[1], block[2]};
  unsigned count = block[0] * block[1] * block[2];
  body = std::move(kernel);
  if (fibres.size() != count) fibres = std::vector<Fibre>(count);
  warps.resize((count + 31) / 32);
  dynamic.resize(shared / 4 + 1 + GUARD_WORDS);
  fault = OK;
  for (block_index.z = 0; block_index.z < grid_size.z; block_index.z++)
    for (block_index.y = 0; block_index.y < grid_size.y; block_index.y++)
      for (block_index.x = 0; block_index.x < grid_size.x; block_index.x++)
        if (int failed = run_block()) return failed;
  return OK;
}

static float exchange(float value, unsigned from) {
  Warp& own = warp();
  unsigned me = lane();
  int turn = own.turns[me]++ % 2;
  own.values[turn][me] = value;
  give_way(AT_WARP);
  return own.values[turn][from];
}

}  // namespace emulated

#define threadIdx (emulated::current->index)
#define blockIdx (emulated::block_index)
#define blockDim (emulated::block_size)
#define gridDim (emulated::grid_size)

#define KERNEL(name, Parameters, threads)                                                            \
  static void name##_body(const Parameters& p);                                                      \
  extern "C" int name(const Parameters* p, const unsigned* grid, const unsigned* block, unsigned shared) { \
    if (block[0] * block[1] * block[2] > threads) return 2;                                          \
    return emulated::launch([p] { name##_body(*p); }, grid, block, shared);                          \
  }                                                                                                  \
  extern "C" unsigned name##_size() { return sizeof(Parameters); }                                   \
  static void name##_body(const Parameters& p)
#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(emulated::dynamic.data())

static inline void __syncthreads() { emulated::give_way(emulated::AT_BLOCK); }
static inline void __syncwarp() { emulated::give_way(emulated::AT_WARP); }
static inline int __syncthreads_or(int value) {
  // Nobody adds before all are here, and nobody leaves before all have added.
  emulated::any_of_block[0] = 0;
  __syncthreads();
  emulated::any_of_block[0] |= value;
  __syncthreads();
  int found = emulated::any_of_block[0];
  __syncthreads();
  return found;
}
static inline float __shfl_xor_sync(unsigned, float value, int with) {
  return emulated::exchange(value, emulated::lane() ^ (unsigned)with);
}
static inline float __int_as_float(int bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static inline int __float_as_int(float value) { int i; std::memcpy(&i, &value, 4); return i; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __dadd_rn(double a, double b) { return a + b; }
using std::min;
static inline unsigned long long atomicCAS(unsigned long long* place, unsigned long long old, unsigned long long made) {
  unsigned long long found = *place;
  if (found == old) *place = made;
  return found;
}

static inline float f16_to_f32(unsigned short bits) {
  _Float16 value;
  std::memcpy(&value, &bits, 2);
  return (float)value;
}
static inline unsigned short f32_to_f16(float value) {
  _Float16 narrow = (_Float16)value;
  unsigned short bits;
  std::memcpy(&bits, &narrow, 2);
  return bits;
}
static inline unsigned f32_pair_to_f16(float first, float second) {
  return f32_to_f16(first) | (unsigned)f32_to_f16(second) << 16;
}
// To the nearest, halves to even; there is one NaN.
static inline unsigned short f32_to_bf16(float value) {
  unsigned bits = (unsigned)__float_as_int(value);
  return value != value ? 0x7fff : (unsigned short)((bits + (bits >> 16 & 1) + 0x7fff) >> 16);
}
static inline unsigned f32_pair_to_bf16(float first, float second) {
  return f32_to_bf16(first) | (unsigned)f32_to_bf16(second) << 16;
}
static inline unsigned to_tf32(float value) {
  unsigned bits = (unsigned)__float_as_int(value);
  return std::isfinite(value) ? (bits + 0x1000u) & ~0x1fffu : bits;
}
static inline void multiply_tiles(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
  emulated::Warp& own = emulated::warp();
  unsigned lane = emulated::lane();
  int turn = own.turns[lane]++ % 2;
  for (int i = 0; i < 4; i++) own.a[turn][lane][i] = __int_as_float((int)a[i]);
  for (int i = 0; i < 2; i++) own.b[turn][lane][i] = __int_as_float((int)b[i]);
  emulated::give_way(emulated::AT_WARP);
  for (int i = 0; i < 4; i++) {
    int row = (int)lane / 4 + i / 2 * 8, column = (int)lane % 4 * 2 + i % 2;
    for (int k = 0; k < 8; k++)
      d[i] += own.a[turn][row % 8 * 4 + k % 4][row / 8 + k / 4 * 2] * own.b[turn][column * 4 + k % 4][k / 4];
  }
}

static inline int atomicAdd(int* place, int more) { return (*place += more) - more; }

#include "instructions.hpp"

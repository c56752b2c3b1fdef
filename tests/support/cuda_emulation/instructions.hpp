// What `instructions.cuh` has of a device, on fibres. A copy beside computing is done when it is waited for, and no
// sooner. A place that the device would fault at is the launch's failure.
#pragma once

namespace emulated {

static void check_place(const void* place, unsigned size) {
  if (reinterpret_cast<uintptr_t>(place) % size) fault = MISALIGNED;
}

static int next_turn() { return warp().turns[lane()]++ % 2; }

static const unsigned short* tile_row(int turn, int tile, int row) {
  return (const unsigned short*)warp().rows[turn][tile * 8 + row];
}

static int show_row(const void* row) {
  check_place(row, 16);
  int turn = next_turn();
  warp().rows[turn][lane()] = (const unsigned char*)row;
  give_way(AT_WARP);
  return turn;
}

}  // namespace emulated

#define KERNEL_OF_BLOCKS(name, Parameters, threads, blocks) KERNEL(name, Parameters, threads)

static inline unsigned char* in_memory(unsigned long long address) { return (unsigned char*)address; }

typedef unsigned char* SharedPlace;
static inline SharedPlace shared_place(const void* place) { return (SharedPlace)place; }
static inline void copy_later(void* to, const void* from, int bytes = 16) {
  emulated::check_place(to, 16), emulated::check_place(from, 16);
  emulated::current->copies.back().push_back({to, from, bytes});
}
static inline void end_copies() { emulated::current->copies.emplace_back(); }
template <int LEFT>
static inline void await_copies() {
  // The last one is not ended yet.
  auto& groups = emulated::current->copies;
  while (groups.size() > LEFT + 1) {
    for (auto& one : groups.front()) {
      std::memset(one.to, 0, 16);
      std::memcpy(one.to, one.from, (size_t)one.bytes);
    }
    groups.erase(groups.begin());
  }
}

template <int N> static inline void load_words(const void* place, unsigned* out) {
  emulated::check_place(place, 4 * N);
  std::memcpy(out, place, 4 * N);
}
static inline void store_words(void* place, unsigned a, unsigned b, unsigned c, unsigned d) {
  emulated::check_place(place, 16);
  unsigned four[4] = {a, b, c, d};
  std::memcpy(place, four, 16);
}
static inline unsigned bytes_of(unsigned low, unsigned high, unsigned which) {
  unsigned long long both = (unsigned long long)high << 32 | low;
  unsigned found = 0;
  for (int i = 0; i < 4; i++) found |= (unsigned)(both >> (which >> 4 * i & 7) * 8 & 255) << 8 * i;
  return found;
}
template <bool SIGNED> static inline int dot_bytes(unsigned a, unsigned b, int sum) {
  for (int i = 0; i < 32; i += 8) {
    int byte = (int)(a >> i & 255);
    sum += (SIGNED ? (signed char)byte : byte) * (signed char)(b >> i & 255);
  }
  return sum;
}

static inline void load_tiles(unsigned (&out)[4], const void* row) {
  int turn = emulated::show_row(row), g = emulated::lane() / 4, t = emulated::lane() % 4;
  for (int i = 0; i < 4; i++) std::memcpy(&out[i], emulated::tile_row(turn, i, g) + 2 * t, 4);
}

static inline void load_tiles_transposed(unsigned (&out)[4], const void* row) {
  int turn = emulated::show_row(row), g = emulated::lane() / 4, t = emulated::lane() % 4;
  for (int i = 0; i < 4; i++)
    out[i] = emulated::tile_row(turn, i, 2 * t)[g] | (unsigned)emulated::tile_row(turn, i, 2 * t + 1)[g] << 16;
}

// Types are numbered as in `common.cuh`: 1 is f16, 2 bf16.
template <int T>
static inline float narrow_half(unsigned word, int half) {
  unsigned short bits = (unsigned short)(word >> 16 * half);
  return T == 1 ? f16_to_f32(bits) : __int_as_float((int)((unsigned)bits << 16));
}

template <int T>
static inline unsigned narrow_pair(float first, float second) {
  return T == 1 ? f32_pair_to_f16(first, second) : f32_pair_to_bf16(first, second);
}

template <int T>
static inline unsigned add_narrow(unsigned a, unsigned b) {
  return narrow_pair<T>(narrow_half<T>(a, 0) + narrow_half<T>(b, 0), narrow_half<T>(a, 1) + narrow_half<T>(b, 1));
}

template <int T>
static inline void multiply_narrow(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  emulated::Warp& own = emulated::warp();
  unsigned lane = emulated::lane();
  int turn = emulated::next_turn();
  for (int i = 0; i < 4; i++) own.narrow_a[turn][lane][i] = a[i];
  own.narrow_b[turn][lane][0] = b0, own.narrow_b[turn][lane][1] = b1;
  emulated::give_way(emulated::AT_WARP);
  for (int i = 0; i < 4; i++) {
    int row = (int)lane / 4 + i / 2 * 8, column = (int)lane % 4 * 2 + i % 2;
    for (int k = 0; k < 16; k++) {
      unsigned left = own.narrow_a[turn][row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2];
      unsigned right = own.narrow_b[turn][column * 4 + k % 8 / 2][k / 8];
      d[i] += narrow_half<T>(left, k % 2) * narrow_half<T>(right, k % 2);
    }
  }
}

static inline float fast_exp2(float x) { return exp2f(x); }
static inline float fast_reciprocal(float x) { return 1.0f / x; }
static inline void sincospif(float x, float* sine, float* cosine) {
  *sine = (float)std::sin(M_PI * x), *cosine = (float)std::cos(M_PI * x);
}

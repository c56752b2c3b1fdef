// Activations as fixed-point numbers of 15 bits and a sign: two bytes that `dot_bytes` multiplies.
//
// A step is the part of a row that a warp processes at once. A unit of 64 elements is in the order
// of its weights: for each group of 16 first the upper bytes, then the lower ones, which are
// signed. One scale and the sums of each span's numbers follow, as f32: the scale comes first, or
// last with four spans.

// A step: elements, bytes of a row, bytes with room for a moved row; bytes of a unit of
// activations, and of all of a row's.
template <int T>
struct Step {
  enum {
    ELEMENTS = Narrow<T>::IS ? 1024 : 2048,
    BYTES = ELEMENTS / 32 / Stored<T>::PARTS * Stored<T>::BYTES,
    ROOM = BYTES + 16,
    X_UNIT = Form<T>::CROSSED ? 176 : 144,  // with room, so that lanes meet different banks
    X_BYTES = Narrow<T>::IS ? ELEMENTS * 4 : ELEMENTS / UNIT * X_UNIT
  };
};

#define MOST_FIXED 32512.0f  // 127 * 256: its upper byte is 127, and rounding adds no more
#define INFINITE_BITS 0x7f800000u

static __device__ __forceinline__ u32 larger_bits(u32 a, int with) {
  u32 b = (u32)__float_as_int(__shfl_xor_sync(FULL_WARP, __int_as_float((int)a), with));
  return a > b ? a : b;
}

// 16 elements from `first` on, which either all exist or not at all.
static __device__ __forceinline__ void load_sixteen(const u8* row, i64 first, bool there, u32 (&bits)[16]) {
  const u8* from = row + first * 4;
  if (there && (u64)from % 16 == 0) {
#pragma unroll
    for (int i = 0; i < 16; i += 4) load_words<4>(from + 4 * i, bits + i);
  } else {
#pragma unroll
    for (int i = 0; i < 16; i++) bits[i] = there ? reinterpret_cast<const u32*>(from)[i] : 0;
  }
}

// The scale for elements with at most these bits of magnitude, by which `bits` are divided. For an
// infinity the scale is infinite, and the numbers are 0 and the infinities' signs; for NaN it is
// NaN.
static __device__ __forceinline__ float scaled(u32 most, u32 (&bits)[16], float& inverse) {
  float size = __int_as_float((int)most);
  inverse = MOST_FIXED / size;
  if (most < INFINITE_BITS && inverse < INFINITE) return size * (1.0f / MOST_FIXED);
  bool finite = most < INFINITE_BITS;  // 0, or close to it
#pragma unroll
  for (int i = 0; i < 16; i++)
    bits[i] = !finite && (bits[i] & 0x7fffffff) == INFINITE_BITS ? (bits[i] & 0x80000000u) | 0x3f800000u : 0;
  inverse = finite ? 0.0f : MOST_FIXED;
  return finite ? 0.0f : size;
}

// Four consecutive threads make a unit.
template <int T>
static __device__ __forceinline__ void fix_unit(u32 (&bits)[16], int group, u8* to) {
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) most = (bits[i] & 0x7fffffff) > most ? bits[i] & 0x7fffffff : most;
  most = larger_bits(larger_bits(most, 1), 2);
  float inverse, scale = scaled(most, bits, inverse);
  u32 upper[4], lower[4];
  int sum = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    u32 fixed[4];
    // Adding 1.5 * 2**23 leaves the nearest integer in the lowest bits. It is 128 too large, since
    // the lower byte is signed, which carries half of its range.
#pragma unroll
    for (int j = 0; j < 4; j++)
      fixed[j] = (u32)__float_as_int(__int_as_float((int)bits[4 * i + j]) * inverse + 12583040.0f);
    u32 first = bytes_of(fixed[0], fixed[1], 0x5410), second = bytes_of(fixed[2], fixed[3], 0x5410);
    upper[i] = bytes_of(first, second, 0x7531);
    lower[i] = bytes_of(first, second, 0x6420) ^ 0x80808080;
    sum = dot_bytes<true>(upper[i], 0x01010101, sum);
  }
  sum *= 256;
#pragma unroll
  for (int i = 0; i < 4; i++) sum = dot_bytes<true>(lower[i], 0x01010101, sum);
  store_words(to + group * 32, upper[0], upper[1], upper[2], upper[3]);
  store_words(to + group * 32 + 16, lower[0], lower[1], lower[2], lower[3]);
  float total = (float)sum;
  float* tail = reinterpret_cast<float*>(to + 128);
  if (Form<T>::CROSSED) {
    tail[group] = total;
  } else {
    total += __shfl_xor_sync(FULL_WARP, total, 1);
    if (group % 2 == 0) tail[1 + group / 2] = total;
  }
  if (group == 0) tail[Form<T>::CROSSED ? 4 : 0] = scale;
}

// The activations of whole steps from `start` on; missing ones are 0.
template <int T, int ROWS>
static __device__ __forceinline__ void prepare(
    const ProductParameters& p, const u8* x, i64 start, int steps, u8* to) {
#pragma unroll 1
  for (int r = 0; r < ROWS; r++) {
    const u8* row = x + r * p.x_stride;
    u8* plane = to + r * (p.chunk / Step<T>::ELEMENTS * Step<T>::X_BYTES);
#pragma unroll 1
    for (int i = threadIdx.x; i < steps * (Step<T>::ELEMENTS / 16); i += blockDim.x) {
      int unit = i / 4, group = i % 4;
      i64 first = start + (Narrow<T>::IS ? i * 16 : element_of<T>(unit, group));
      u32 bits[16];
      load_sixteen(row, first, r < p.rows && first < p.k, bits);
      if constexpr (Narrow<T>::IS) {
        // Lanes have 8 contiguous elements. The halves are apart, so that those of a warp's load
        // are contiguous as well.
        u8* place = plane + i / 64 * 4096 + i / 16 % 4 * 1024 + i % 16 * 32;
#pragma unroll
        for (int j = 0; j < 4; j++)
          store_words(
              place + j % 2 * 512 + j / 2 * 16, bits[4 * j], bits[4 * j + 1], bits[4 * j + 2],
              bits[4 * j + 3]);
      } else {
        fix_unit<T>(bits, group, plane + unit * Step<T>::X_UNIT);
      }
    }
  }
}

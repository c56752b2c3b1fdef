// Attention on the matrix units, in one kernel: scores, their softmax and the sum of values, without the scores in memory.
//
// The largest exponent and the total of a line are kept up to date as keys come (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022; Dao, "FlashAttention-2", 2023). Tiles
// of keys and values come to shared memory while those before are computed with. Weights go from the sums of one
// product to the operand of the next in registers: their layouts are the same for narrow floats, and for f32 after the
// keys changed places.
//
// Many rows: a block has 64 or 128 rows of a head, a warp 16 or 32 of them. Few rows (SPLIT): a block has 16 lines of
// heads that share keys, which its warps share; where there are few such blocks, others have other keys, and
// `attention_merge` adds up (Dao et al., "Flash-Decoding", 2023).

// Up to so many tiles, as a power of two, are asked about at once.
#define MOST_LEVEL 3

// Rows of D elements as T in shared memory. An odd number of chunks between rows: tiles meet every bank once.
template <int T, int D> struct Rows {
  enum {
    ITEM = T == F32 ? 4 : 2,
    IN_CHUNK = 16 / ITEM,
    CHUNKS = D / IN_CHUNK,
    BYTES = D * ITEM,
    PITCH = BYTES + 16,
  };
};

template <int T, int D, bool SPLIT> struct Tiling : Rows<T, D> {
  using R = Rows<T, D>;
  enum {
    KEYS = R::BYTES <= 256 ? 64 : R::BYTES <= 512 ? 32 : 16,
    WARPS = SPLIT ? KEYS / 16 : 4,
    THREADS = WARPS * 32,
    TILES = !SPLIT && T != F32 && D <= 64 ? 2 : 1,  // of 16 lines, of a warp
    LINES = SPLIT ? 16 : 64 * TILES,
    OWN_KEYS = SPLIT ? 16 : KEYS,  // of a warp
    STAGE = 2 * KEYS * R::PITCH,
    HELD = R::BYTES <= 256,  // whether queries stay in registers; else they stay in shared memory, behind the stages
    QUERIES = HELD ? 0 : LINES * R::PITCH,
  };
};

// Rows of masks in shared memory, f16 as it is and all else as f32; the gaps keep lanes at different banks.
template <int KEYS> struct MaskRows {
  enum { NARROW_PITCH = KEYS * 2 + 16, WIDE_PITCH = KEYS * 4 + 32 };
};

// Sixteen bytes of a row as T, from elements of any type.
template <int T>
static __device__ __forceinline__ Chunk converted(const u8* row, int type, int first) {
  constexpr int COUNT = T == F32 ? 4 : 8;
  float values[COUNT];
  if (type == F32) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) values[i] = reinterpret_cast<const float*>(row)[first + i];
  } else if (type == F16 || type == BF16) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      u16 bits = reinterpret_cast<const u16*>(row)[first + i];
      values[i] = type == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }
  } else {  // Q8_0 or Q4_0
    const u8* block = row + first / 32 * (type == Q8_0 ? 34 : 18);
    const u8* quanta = block + 2 + (type == Q8_0 ? first % 32 : first % 16);
    float factor = f16_to_f32(*reinterpret_cast<const u16*>(block));
    int shift = first % 32 / 16 * 4;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      int number = type == Q8_0 ? (int)(i8)quanta[i] : (quanta[i] >> shift & 15) - 8;
      values[i] = (float)number * factor;
    }
  }
  Chunk made;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (T == F32)
      made.words[i] = (u32)__float_as_int(values[i]);
    else
      made.words[i] = narrow_pair<T>(values[2 * i], values[2 * i + 1]);
  }
  return made;
}

// ROWS rows to shared memory; those from `count` on and columns behind the last are 0. Where types and places allow,
// copies go on by themselves.
template <int T, int D, int ROWS, int THREADS>
static __device__ __forceinline__ void stage(const u8* from, int stride, int type, int columns, int count, u8* to) {
  using R = Rows<T, D>;
  constexpr int ALL = ROWS * R::CHUNKS;
  const Chunk nothing = {};
  if (type == T && ((u64)from | (u64)stride) % 16 == 0) {
#pragma unroll 8
    for (int j = 0; j < (ALL + THREADS - 1) / THREADS; j++) {
      int i = j * THREADS + threadIdx.x, row = i / R::CHUNKS, chunk = i % R::CHUNKS;
      if (ALL % THREADS != 0 && i >= ALL) break;
      bool there = row < count && chunk * R::IN_CHUNK < columns;
      copy_later(to + row * R::PITCH + chunk * 16, from + (there ? row * stride + chunk * 16 : 0), there ? 16 : 0);
    }
    return;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < ALL; i += THREADS) {
    int row = i / R::CHUNKS, chunk = i % R::CHUNKS;
    bool there = row < count && chunk * R::IN_CHUNK < columns;
    *reinterpret_cast<Chunk*>(to + row * R::PITCH + chunk * 16) =
        there ? converted<T>(from + row * stride, type, chunk * R::IN_CHUNK) : nothing;
  }
}

template <int T>
static __device__ __forceinline__ Chunk sum_of(const Chunk& a, const Chunk& b) {
  Chunk sum;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if constexpr (T == F32)
      sum.words[i] = (u32)__float_as_int(__fadd_rn(__int_as_float((int)a.words[i]), __int_as_float((int)b.words[i])));
    else
      sum.words[i] = add_narrow<T>(a.words[i], b.words[i]);
  }
  return sum;
}

// Adds a row to what this thread staged of ROWS rows, as soon as its copies are there.
template <int T, int D, int ROWS, int THREADS>
static __device__ __forceinline__ void add_bias(const u8* bias, int columns, int count, u8* to) {
  using R = Rows<T, D>;
  constexpr int ALL = ROWS * R::CHUNKS;
  bool whole = (u64)bias % 16 == 0;
#pragma unroll 4
  for (int j = 0; j < (ALL + THREADS - 1) / THREADS; j++) {
    int i = j * THREADS + threadIdx.x, row = i / R::CHUNKS, column = i % R::CHUNKS * R::IN_CHUNK;
    if (row >= count || column >= columns || (ALL % THREADS != 0 && i >= ALL)) continue;
    Chunk* place = reinterpret_cast<Chunk*>(to + row * R::PITCH + column * R::ITEM);
    const u8* from = bias + column * R::ITEM;
    Chunk more;
    if (whole)
      more = *reinterpret_cast<const Chunk*>(from);
    else
      more = converted<T>(bias, T, column);
    *place = sum_of<T>(*place, more);
  }
}

// The lines of a block, and its keys.
template <int T, int D, bool SPLIT> struct Part {
  using S = Tiling<T, D, SPLIT>;
  const AttentionParameters& p;
  int first, count;     // of the lines that share keys, those of this block
  int tile, last_tile;  // of keys
  const u8 *k, *v;
  bool same_mask;  // whether all lines have the same row of the mask, and slope

  __device__ __forceinline__ Part(const AttentionParameters& p) : p(p) {
    int lines = SPLIT ? p.head_repeat * p.rows : p.rows, tiles = (p.keys + S::KEYS - 1) / S::KEYS;
    int split = SPLIT ? (int)(blockIdx.x % (u32)p.splits) : 0;
    // The last rows first: under a mask that hides what comes later they have the most tiles.
    first = (SPLIT ? (int)(blockIdx.x / (u32)p.splits) : (int)(gridDim.x - 1 - blockIdx.x)) * S::LINES;
    count = lines - first < S::LINES ? lines - first : S::LINES;
    tile = split * p.tiles_of_split;
    last_tile = SPLIT && tile + p.tiles_of_split < tiles ? tile + p.tiles_of_split : tiles;
    u32 shared_head = SPLIT ? blockIdx.y : blockIdx.y / (u32)p.head_repeat;
    k = keys_at(p, blockIdx.z, shared_head), v = values_at(p, blockIdx.z, shared_head);
    same_mask = (p.mask_strides[2] == 0 || p.rows == 1) &&
                (!SPLIT || p.head_repeat == 1 || (p.mask_heads == 1 && p.max_bias == 0.0f));
  }

  __device__ __forceinline__ int head(int line) const {
    return SPLIT ? blockIdx.y * p.head_repeat + (first + line) / (u32)p.rows : blockIdx.y;
  }
  __device__ __forceinline__ int row(int line) const { return SPLIT ? (first + line) % (u32)p.rows : first + line; }
  __device__ __forceinline__ const u8* mask(int line) const { return mask_at(p, blockIdx.z, head(line), row(line)); }

  __device__ __forceinline__ void stage_queries(u8* to) const {
    if constexpr (SPLIT) {
      const Chunk nothing = {};
      for (int i = threadIdx.x; i < S::LINES * S::CHUNKS; i += S::THREADS) {
        int line = i / S::CHUNKS, column = i % S::CHUNKS * S::IN_CHUNK;
        bool there = line < count && column < p.d;
        Chunk found = there ? converted<T>(query_at(p, blockIdx.z, head(line), row(line)), p.q_type, column) : nothing;
        if (there && p.has_biases & 1) {
          const u8* bias = in_memory(p.q_bias) + head(line) * p.q_bias_stride;
          found = sum_of<T>(found, converted<T>(bias, T, column));
        }
        *reinterpret_cast<Chunk*>(to + line * S::PITCH + column * S::ITEM) = found;
      }
    } else {
      const u8* q = query_at(p, blockIdx.z, blockIdx.y, first);
      stage<T, D, S::LINES, S::THREADS>(q, (int)p.q_strides[2], p.q_type, p.d, count, to);
    }
  }

  // What is added to queries, when this thread's copies of them are there.
  __device__ __forceinline__ void add_to_queries(u8* to) const {
    if constexpr (!SPLIT)
      if (p.has_biases & 1) {
        const u8* bias = in_memory(p.q_bias) + blockIdx.y * p.q_bias_stride;
        add_bias<T, D, S::LINES, S::THREADS>(bias, p.d, count, to);
      }
  }

  // The same of a tile of keys and values.
  __device__ __forceinline__ void add_to_tile(int number, u8* to) const {
    u32 shared_head = SPLIT ? blockIdx.y : blockIdx.y / (u32)p.head_repeat;
    int left = p.keys - number * S::KEYS;
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      if (!(p.has_biases & 2 << which)) continue;
      const u8* bias = in_memory(which ? p.v_bias : p.k_bias) +
                       shared_head * (which ? p.v_bias_stride : p.k_bias_stride);
      add_bias<T, D, S::KEYS, S::THREADS>(bias, which ? p.dv : p.d, left, to + which * (S::KEYS * S::PITCH));
    }
  }

  // A tile of keys, and behind it its values.
  __device__ __forceinline__ void stage_tile(int number, u8* to) const {
    int left = p.keys - number * S::KEYS;
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      i64 stride = which ? p.v_strides[2] : p.k_strides[2];
      const u8* from = (which ? v : k) + (i64)number * S::KEYS * stride;
      int type = which ? p.v_type : p.k_type, columns = which ? p.dv : p.d;
      stage<T, D, S::KEYS, S::THREADS>(from, (int)stride, type, columns, left, to + which * (S::KEYS * S::PITCH));
    }
  }

  // Of a tile's mask in shared memory.
  __device__ __forceinline__ int mask_bytes() const {
    int pitch = p.mask_type == F16 ? MaskRows<S::KEYS>::NARROW_PITCH : MaskRows<S::KEYS>::WIDE_PITCH;
    return (same_mask ? 1 : S::LINES) * pitch;
  }

  __device__ __forceinline__ int mask_lines() const { return same_mask ? 1 : count; }

  // Whether this thread's share of the mask shows any key of 2^level tiles. Four loads are on their way at once.
  __device__ __forceinline__ bool shows(int number, int level) const {
    if (!p.has_mask) return true;
    int size = size_of(p.mask_type), start = number * S::KEYS, left = p.keys - start;
    u64 places = p.mask | (u64)p.mask_strides[0] | (u64)p.mask_strides[1] | (u64)p.mask_strides[2];
    bool chunks = places % 16 == 0 && p.keys % (16 / size) == 0;
    int in_step = chunks ? 16 / size : 1, steps = (S::KEYS << level) / in_step, all = mask_lines() * steps;
    u32 hidden = p.mask_type == F32 ? 0xff800000u : p.mask_type == F16 ? 0xfc00fc00u : 0xff80ff80u;
#pragma unroll 1
    for (int base = threadIdx.x; base < all; base += 4 * S::THREADS) {
      u32 seen = 0;
#pragma unroll
      for (int j = 0; j < 4; j++) {
        int i = base + j * S::THREADS, line = i / steps, key = (i - line * steps) * in_step;
        if (i >= all || key >= left) continue;
        const u8* place = mask(line) + (i64)(start + key) * size;
        if (chunks) {
          Chunk found = *reinterpret_cast<const Chunk*>(place);
          for (int w = 0; w < 4; w++) seen |= found.words[w] ^ hidden;
        } else {
          seen |= load(place, p.mask_type) != -INFINITE;
        }
      }
      if (seen) return true;
    }
    return false;
  }

  // The mask of a tile; minus infinity behind the last key.
  template <int M>
  __device__ __forceinline__ void stage_mask_as(int number, u8* to) const {
    using R = Rows<M, S::KEYS>;
    constexpr int PITCH = M == F16 ? MaskRows<S::KEYS>::NARROW_PITCH : MaskRows<S::KEYS>::WIDE_PITCH;
    int size = size_of(p.mask_type), left = p.keys - number * S::KEYS;
#pragma unroll 1
    for (int i = threadIdx.x; i < mask_lines() * R::CHUNKS; i += S::THREADS) {
      int line = i / R::CHUNKS, key = i % R::CHUNKS * R::IN_CHUNK;
      const u8* from = mask(line) + ((i64)number * S::KEYS + key) * size;
      u8* place = to + line * PITCH + key * R::ITEM;
      if (p.mask_type == M && (u64)from % 16 == 0 && key + R::IN_CHUNK <= left) {
        copy_later(place, from, 16);
      } else {
#pragma unroll 1
        for (int j = 0; j < R::IN_CHUNK; j++)
          store(place + j * R::ITEM, M, key + j < left ? load(from + j * size, p.mask_type) : -INFINITE);
      }
    }
  }

  __device__ __forceinline__ void stage_mask(int number, u8* to) const {
    if (!p.has_mask) return;
    if (p.mask_type == F16)
      stage_mask_as<F16>(number, to);
    else
      stage_mask_as<F32>(number, to);
  }
};

// A warp's lines: 16 TILES of them. A lane has g and g + 8 of each tile, `half` 0 and 1.
template <int T, int D, bool SPLIT> struct Lines {
  using S = Tiling<T, D, SPLIT>;
  const Part<T, D, SPLIT>& part;
  int lane, warp, g, t;
  float slopes[S::TILES][2];       // times log2 e
  float factor;                    // from what products are kept in to exponents
  float top[S::TILES][2], total[S::TILES][2];  // of a total what this lane has seen of it
  float sums[S::TILES][D / 8][4];
  u32 q[S::HELD ? S::TILES : 1][S::HELD ? S::BYTES / 32 : 1][4];

  __device__ __forceinline__ Lines(const Part<T, D, SPLIT>& part) : part(part) {
    const AttentionParameters& p = part.p;
    lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    factor = is_plain() ? p.scale * LOG2_E : 1.0f;
#pragma unroll
    for (int m = 0; m < S::TILES; m++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        int line = line_of(m, half);
        line = line < part.count ? line : part.count - 1;
        slopes[m][half] = slope_of(p, part.head(line)) * LOG2_E;
        top[m][half] = -INFINITE, total[m][half] = 0.0f;
      }
#pragma unroll
      for (int n = 0; n < D / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[m][n][i] = 0.0f;
    }
  }

  // Whether exponents are the products times a number above 0.
  __device__ __forceinline__ bool is_plain() const { return !part.p.has_mask && part.p.cap == 0.0f && part.p.scale > 0.0f; }
  __device__ __forceinline__ int line_of(int m, int half) const { return (SPLIT ? 0 : warp * 16 * S::TILES) + m * 16 + half * 8 + g; }
  __device__ __forceinline__ int own_keys() const { return SPLIT ? warp * S::OWN_KEYS : 0; }

  __device__ __forceinline__ void load_queries(const u8* from, int m, int k, u32 (&out)[4]) const {
    const u8* rows = from + ((SPLIT ? 0 : warp * 16 * S::TILES) + m * 16 + lane % 16) * S::PITCH;
    load_tiles(out, rows + k * 32 + lane / 16 * 16);
  }

  __device__ __forceinline__ void hold_queries(const u8* from) {
#pragma unroll
    for (int m = 0; m < S::TILES; m++)
#pragma unroll
      for (int k = 0; k < S::BYTES / 32; k++) load_queries(from, m, k, q[m][k]);
  }

  // Products with the warp's keys of a tile; 32 bytes of the rows at a time.
  __device__ __forceinline__ void multiply_keys(const u8* queries, const u8* ks, float (&s)[S::TILES][S::OWN_KEYS / 8][4]) const {
#pragma unroll
    for (int m = 0; m < S::TILES; m++)
#pragma unroll
      for (int n = 0; n < S::OWN_KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[m][n][i] = 0.0f;
    const u8* rows = ks + (own_keys() + lane / 16 * 8 + lane % 8) * S::PITCH + lane / 8 % 2 * 16;
    constexpr int AT_ONCE = S::HELD ? S::BYTES / 32 : 2;
#pragma unroll AT_ONCE
    for (int k = 0; k < S::BYTES / 32; k++) {
      u32 a[S::TILES][4];
#pragma unroll
      for (int m = 0; m < S::TILES; m++) {
        if constexpr (S::HELD)
          for (int i = 0; i < 4; i++) a[m][i] = q[m][k][i];
        else
          load_queries(queries, m, k, a[m]);
      }
#pragma unroll
      for (int n = 0; n < S::OWN_KEYS / 16; n++) {
        u32 b[4];
        load_tiles(b, rows + n * 16 * S::PITCH + k * 32);
#pragma unroll
        for (int m = 0; m < S::TILES; m++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            if constexpr (T == F32)
              multiply_wide(s[m][2 * n + i], a[m], b[2 * i], b[2 * i + 1]);
            else
              multiply_narrow<T>(s[m][2 * n + i], a[m], b[2 * i], b[2 * i + 1]);
          }
      }
    }
  }

  // Adds what the mask has, times slopes, to products times `outer`.
  template <int M, bool SAME>
  __device__ __forceinline__ void add_mask(
      const u8* mask, float outer, float (&s)[S::TILES][S::OWN_KEYS / 8][4]) const {
    constexpr int PITCH = M == F16 ? MaskRows<S::KEYS>::NARROW_PITCH : MaskRows<S::KEYS>::WIDE_PITCH;
    const u8* own = mask + (own_keys() + 2 * t) * (M == F16 ? 2 : 4);
#pragma unroll
    for (int n = 0; n < S::OWN_KEYS / 8; n++) {
      float shown[2];
#pragma unroll
      for (int m = 0; m < S::TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          if ((m == 0 && half == 0) || !SAME) {
            const u8* place = own + (SAME ? 0 : line_of(m, half)) * PITCH + n * (M == F16 ? 16 : 32);
            if constexpr (M == F16) {
              u32 two = *reinterpret_cast<const u32*>(place);
              shown[0] = f16_to_f32((u16)(two & 0xffff)), shown[1] = f16_to_f32((u16)(two >> 16));
            } else {
              Pair two = *reinterpret_cast<const Pair*>(place);
              shown[0] = __int_as_float((int)two.words[0]), shown[1] = __int_as_float((int)two.words[1]);
            }
            shown[0] *= slopes[m][half], shown[1] *= slopes[m][half];
          }
#pragma unroll
          for (int i = 0; i < 2; i++) s[m][n][half * 2 + i] = fmaf(s[m][n][half * 2 + i], outer, shown[i]);
        }
    }
  }

  // Makes products exponents, up to `factor`.
  __device__ __forceinline__ void scale(
      int start, const u8* mask, float (&s)[S::TILES][S::OWN_KEYS / 8][4]) const {
    const AttentionParameters& p = part.p;
    if (p.cap != 0.0f) each(s, [&](float& one, int) { one = fast_tanh(one * (p.scale / p.cap)); });
    float outer = (p.cap != 0.0f ? p.cap : p.scale) * LOG2_E;
    if (p.has_mask) {
      if (p.mask_type == F16)
        part.same_mask ? add_mask<F16, true>(mask, outer, s) : add_mask<F16, false>(mask, outer, s);
      else
        part.same_mask ? add_mask<F32, true>(mask, outer, s) : add_mask<F32, false>(mask, outer, s);
      return;
    }
    if (!is_plain()) each(s, [&](float& one, int) { one *= outer; });
    if (start + S::OWN_KEYS > p.keys)
      each(s, [&](float& one, int key) { one = start + key < p.keys ? one : -INFINITE; });
  }

  // Calls with every element of this lane and its key.
  template <class F>
  __device__ __forceinline__ void each(float (&s)[S::TILES][S::OWN_KEYS / 8][4], F call) const {
#pragma unroll
    for (int m = 0; m < S::TILES; m++)
#pragma unroll
      for (int n = 0; n < S::OWN_KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) call(s[m][n][i], n * 8 + 2 * t + i % 2);
  }

  // Makes exponents weights, and what was added up before smaller where a larger exponent came.
  __device__ __forceinline__ void weigh(float (&s)[S::TILES][S::OWN_KEYS / 8][4]) {
#pragma unroll
    for (int m = 0; m < S::TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // A NaN is not kept here, but its weight is NaN and with it the total.
        float higher = top[m][half];
#pragma unroll
        for (int n = 0; n < S::OWN_KEYS / 8; n++)
          higher = fmaxf(higher, fmaxf(s[m][n][half * 2], s[m][n][half * 2 + 1]));
        higher = fmaxf(higher, __shfl_xor_sync(FULL_WARP, higher, 1));
        higher = fmaxf(higher, __shfl_xor_sync(FULL_WARP, higher, 2));
        float base = higher == -INFINITE ? 0.0f : higher * factor;
        float shrink = fast_exp2(fmaf(top[m][half], factor, -base)), added = 0.0f;
        top[m][half] = higher;
#pragma unroll
        for (int n = 0; n < S::OWN_KEYS / 8; n++)
#pragma unroll
          for (int i = 0; i < 2; i++) {
            float& one = s[m][n][half * 2 + i];
            one = fast_exp2(fmaf(one, factor, -base));
            added += one;
          }
        total[m][half] = fmaf(total[m][half], shrink, added);
#pragma unroll
        for (int n = 0; n < D / 8; n++) sums[m][n][half * 2] *= shrink, sums[m][n][half * 2 + 1] *= shrink;
      }
  }

  // Adds values times weights.
  __device__ __forceinline__ void add_values(const u8* vs, const float (&s)[S::TILES][S::OWN_KEYS / 8][4]) {
    if constexpr (T == F32) {
      const u8* rows = vs + (own_keys() + 2 * t) * S::PITCH + g * 4;
#pragma unroll
      for (int key = 0; key < S::OWN_KEYS; key += 8)
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
          // Operand k is key 2 k for k < 4, and behind that key 2 k - 7.
          const u8* place = rows + key * S::PITCH + n * 32;
          u32 b0 = *reinterpret_cast<const u32*>(place), b1 = *reinterpret_cast<const u32*>(place + S::PITCH);
#pragma unroll
          for (int m = 0; m < S::TILES; m++) {
            const float(&w)[4] = s[m][key / 8];
            u32 a[4] = {(u32)__float_as_int(w[0]), (u32)__float_as_int(w[2]), (u32)__float_as_int(w[1]),
                        (u32)__float_as_int(w[3])};
            multiply_wide(sums[m][n], a, b0, b1);
          }
        }
    } else {
      const u8* rows = vs + (own_keys() + lane % 16) * S::PITCH + lane / 16 * 16;
#pragma unroll
      for (int key = 0; key < S::OWN_KEYS; key += 16) {
        u32 a[S::TILES][4];
#pragma unroll
        for (int m = 0; m < S::TILES; m++)
#pragma unroll
          for (int i = 0; i < 4; i++)
            a[m][i] = narrow_pair<T>(s[m][key / 8 + i / 2][i % 2 * 2], s[m][key / 8 + i / 2][i % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < D / 16; n++) {
          u32 b[4];
          load_tiles_transposed(b, rows + key * S::PITCH + n * 32);
#pragma unroll
          for (int m = 0; m < S::TILES; m++) {
            multiply_narrow<T>(sums[m][2 * n], a[m], b[0], b[1]);
            multiply_narrow<T>(sums[m][2 * n + 1], a[m], b[2], b[3]);
          }
        }
      }
    }
  }
};

template <int T, int D>
static __device__ __forceinline__ void write_wide(const Lines<T, D, false>& lines, u8* result) {
  using S = Tiling<T, D, false>;
  const AttentionParameters& p = lines.part.p;
  int stride = (int)p.result_strides[2];
  bool pairs = ((u64)result | (u64)stride) % 8 == 0;
#pragma unroll
  for (int m = 0; m < S::TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      int line = lines.line_of(m, half);
      float* row = reinterpret_cast<float*>(result + line * stride) + 2 * lines.t;
      if (line >= lines.part.count) continue;
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        float first = lines.sums[m][n][half * 2], second = lines.sums[m][n][half * 2 + 1];
        if (n * 8 + 2 * lines.t >= p.dv) continue;
        if (pairs) {
          Pair two = {{(u32)__float_as_int(first), (u32)__float_as_int(second)}};
          *reinterpret_cast<Pair*>(row + n * 8) = two;
        } else {
          row[n * 8] = first, row[n * 8 + 1] = second;
        }
      }
    }
}

// Narrow rows go through the warp's own part of shared memory, so that sixteen bytes are written at once.
template <int T, int D>
static __device__ __forceinline__ void write_narrow(const Lines<T, D, false>& lines, u8* result, u8* own) {
  using S = Tiling<T, D, false>;
  using R = Rows<F16, D>;
  constexpr int OWN = 16 * S::TILES;
  const AttentionParameters& p = lines.part.p;
#pragma unroll
  for (int m = 0; m < S::TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int n = 0; n < D / 8; n++) {
        float first = lines.sums[m][n][half * 2], second = lines.sums[m][n][half * 2 + 1];
        *reinterpret_cast<u32*>(own + (m * 16 + half * 8 + lines.g) * R::PITCH + n * 16 + lines.t * 4) =
            p.result_type == F16 ? narrow_pair<F16>(first, second) : narrow_pair<BF16>(first, second);
      }
  __syncwarp();
  int stride = (int)p.result_strides[2];
  bool chunks = ((u64)result | (u64)stride) % 16 == 0;
#pragma unroll 4
  for (int i = lines.lane; i < OWN * R::CHUNKS; i += 32) {
    int line = i / R::CHUNKS, chunk = i % R::CHUNKS;
    if (lines.warp * OWN + line >= lines.part.count || chunk * 8 >= p.dv) continue;
    Chunk found = *reinterpret_cast<const Chunk*>(own + line * R::PITCH + chunk * 16);
    u8* place = result + (lines.warp * OWN + line) * stride + chunk * 16;
    if (chunks) {
      *reinterpret_cast<Chunk*>(place) = found;
    } else {
#pragma unroll
      for (int j = 0; j < 8; j++) reinterpret_cast<u16*>(place)[j] = (u16)(found.words[j / 2] >> j % 2 * 16);
    }
  }
}

// Divides a line's sums by its total, in which its sink counts.
template <int T, int D>
static __device__ __forceinline__ void write_lines(Lines<T, D, false>& lines, u8* spare) {
  using S = Tiling<T, D, false>;
  const AttentionParameters& p = lines.part.p;
  float sink = sink_of(p, lines.part.head(0)) * LOG2_E;
#pragma unroll
  for (int m = 0; m < S::TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float own = lines.top[m][half] * lines.factor, highest = larger(own, sink), shrink = power(own, highest);
      float all = fmaf(lines.total[m][half], shrink, p.has_sinks ? power(sink, highest) : 0.0f);
      shrink = shrink / (all == 0.0f ? 1.0f : all);
#pragma unroll
      for (int n = 0; n < D / 8; n++) lines.sums[m][n][half * 2] *= shrink, lines.sums[m][n][half * 2 + 1] *= shrink;
    }
  u8* result = result_at(p, blockIdx.z, blockIdx.y, lines.part.first);
  if (p.result_type == F32)
    write_wide(lines, result);
  else
    write_narrow(lines, result, spare + lines.warp * (16 * S::TILES * Rows<F16, D>::PITCH));
}

// Adds up what the warps have of the block's lines; the result where the keys are not split, else a part of it.
template <int T, int D>
static __device__ __forceinline__ void merge_warps(Lines<T, D, true>& lines, float* shared) {
  using S = Tiling<T, D, true>;
  const AttentionParameters& p = lines.part.p;
  float *tops = shared, *totals = tops + S::WARPS * 16, *sums = totals + S::WARPS * 16;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    int place = lines.warp * 16 + half * 8 + lines.g;
    if (lines.t == 0) tops[place] = lines.top[0][half] * lines.factor, totals[place] = lines.total[0][half];
#pragma unroll
    for (int n = 0; n < D / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) sums[place * D + n * 8 + 2 * lines.t + i] = lines.sums[0][n][half * 2 + i];
  }
  __syncthreads();
  i64 all_lines = (i64)gridDim.z * p.heads * p.rows;
  for (int i = threadIdx.x; i < lines.part.count * p.dv; i += S::THREADS) {
    int line = i / p.dv, column = i % p.dv, head = lines.part.head(line), row = lines.part.row(line);
    float sink = p.splits == 1 ? sink_of(p, head) * LOG2_E : -INFINITE, highest = sink, all = 0.0f, found = 0.0f;
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) highest = larger(highest, tops[w * 16 + line]);
#pragma unroll
    for (int w = 0; w < S::WARPS; w++) {
      float shrink = power(tops[w * 16 + line], highest);
      all = fmaf(totals[w * 16 + line], shrink, all);
      found = fmaf(sums[(w * 16 + line) * D + column], shrink, found);
    }
    if (p.splits == 1) {
      if (p.has_sinks) all += power(sink, highest);
      store(result_at(p, blockIdx.z, head, row) + column * size_of(p.result_type), p.result_type,
            found / (all == 0.0f ? 1.0f : all));
    } else {
      i64 number = ((i64)blockIdx.z * p.heads + head) * p.rows + row;
      float* place = partial_at(p, (int)(blockIdx.x % (u32)p.splits), all_lines, number);
      place[column] = found;
      if (column == 0) place[p.dv] = highest, place[p.dv + 1] = all;
    }
  }
}

template <int T, int D, bool SPLIT>
static __device__ __forceinline__ void attend(const AttentionParameters& p) {
  using S = Tiling<T, D, SPLIT>;
  DYNAMIC_SHARED(u8, shared);
  Part<T, D, SPLIT> part(p);
  // Queries lie where the second tile will, unless they stay in shared memory; the first one comes to the other stage.
  u8* queries = shared + (S::HELD ? 0 : 2 * S::STAGE);
  if constexpr (!SPLIT) part.stage_queries(queries);
  end_copies();
  u8* masks = shared + 2 * S::STAGE + S::QUERIES;
  int mask_bytes = part.mask_bytes(), at = 0;
  Lines<T, D, SPLIT> lines(part);
  for (int tile = part.tile - 1, next; tile < part.last_tile; tile = next, at = 1 - at) {
    next = tile + 1;
    bool is_first = next == part.tile;
    if (!is_first) {
      bool shown = next < part.last_tile && part.shows(next, 0);
      await_copies<0>();
      if (p.has_biases) part.add_to_tile(tile, shared + at * S::STAGE);
      // Behind this barrier everybody's copies of this tile are there, and nobody reads the other stage any more:
      // neither the tile before nor queries. Tiles that the mask hides from all lines are left out.
      // Where one is, ever more behind it are asked about at once.
      bool any = __syncthreads_or(shown);
      for (int level = 0; next < part.last_tile && !(any && level == 0);) {
        next += any ? 0 : 1 << level;
        level = any ? 0 : level < MOST_LEVEL ? level + 1 : level;
        shown = next < part.last_tile && part.shows(next, level);
        any = __syncthreads_or(shown);
      }
    }
    if (next < part.last_tile) {
      part.stage_tile(next, shared + (1 - at) * S::STAGE);
      part.stage_mask(next, masks + (1 - at) * mask_bytes);
    }
    end_copies();
    if (is_first) {
      // Few queries are read while the first tile comes.
      if constexpr (SPLIT) part.stage_queries(queries);
      if (S::HELD || p.has_biases & 1) {
        await_copies<1>();
        part.add_to_queries(queries);
      }
      if constexpr (S::HELD) {
        __syncthreads();
        lines.hold_queries(queries);
      }
      continue;
    }
    const u8* ks = shared + at * S::STAGE;
    float s[S::TILES][S::OWN_KEYS / 8][4];
    lines.multiply_keys(queries, ks, s);
    lines.scale(tile * S::KEYS + lines.own_keys(), masks + at * mask_bytes, s);
    lines.weigh(s);
    lines.add_values(ks + S::KEYS * S::PITCH, s);
  }
#pragma unroll
  for (int m = 0; m < S::TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float& total = lines.total[m][half];
      total += __shfl_xor_sync(FULL_WARP, total, 1);
      total += __shfl_xor_sync(FULL_WARP, total, 2);
    }
  // Others may still read the last tile, and queries that stayed.
  if constexpr (SPLIT || !S::HELD) __syncthreads();
  if constexpr (SPLIT) {
    merge_warps(lines, reinterpret_cast<float*>(shared));
  } else {
    // The stage that the next tile would have come to has no readers.
    write_lines(lines, S::HELD ? shared + at * S::STAGE : queries);
  }
}

// Kernels of heads of up to D elements: `many` rows, and few.
#define ATTENTION(T, name, D)                                                                                   \
  KERNEL_OF_BLOCKS(attention_##name##_##D, AttentionParameters, 128, (D % 64 == 32 || D == 128 ? 3 : 2)) { attend<T, D, false>(p); } \
  KERNEL(attention_##name##_##D##_split, AttentionParameters, (Tiling<T, D, true>::THREADS)) { attend<T, D, true>(p); }

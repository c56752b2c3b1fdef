// An attention block's lines and keys, and their copies to shared memory.

// The most tiles that are checked at once, as a power of two.
#define MOST_LEVEL 3

// The lines of a block, and its keys.
template <int T, int D, bool SPLIT> struct Part {
  using S = Tiling<T, D, SPLIT>;
  const AttentionParameters& p;
  int first, count;     // this block's lines, of those that share keys
  int tile, last_tile;  // of keys
  const u8 *k, *v;
  bool same_mask;  // true if all lines share a row of the mask and the slope

  __device__ __forceinline__ Part(const AttentionParameters& p) : p(p) {
    int lines = SPLIT ? p.head_repeat * p.rows : p.rows, tiles = (p.keys + S::KEYS - 1) / S::KEYS;
    int split = SPLIT ? (int)(blockIdx.x % (u32)p.splits) : 0;
    // The last rows first: with a causal mask they have the most tiles.
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

  // Adds the bias to queries when this thread's copies of them have arrived.
  __device__ __forceinline__ void add_to_queries(u8* to) const {
    if constexpr (!SPLIT)
      if (p.has_biases & 1) {
        const u8* bias = in_memory(p.q_bias) + blockIdx.y * p.q_bias_stride;
        add_bias<T, D, S::LINES, S::THREADS>(bias, p.d, count, to);
      }
  }

  // The same for a tile of keys and values.
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

  // A tile of keys, followed by its values.
  __device__ __forceinline__ void stage_tile(int number, u8* to) const {
    int left = p.keys - number * S::KEYS;
#pragma unroll 1
    for (int which = 0; which < 2; which++) {
      i64 stride = which ? p.v_strides[2] : p.k_strides[2];
      const u8* rows = which ? v : k;
      u8* place = to + which * (S::KEYS * S::PITCH);
      int type = which ? p.v_type : p.k_type, columns = which ? p.dv : p.d;
      if (p.pages) {
        i64 page_stride = which ? p.v_page_stride : p.k_page_stride;
        auto at = [&](int row) {
          return row_in_page(p, blockIdx.z, rows, page_stride, stride, (u32)(number * S::KEYS + row));
        };
        bool chunks = ((u64)rows | (u64)stride | (u64)page_stride) % 16 == 0;
        stage_rows<T, D, S::KEYS, S::THREADS>(at, chunks, type, columns, left, place);
      } else {
        const u8* from = rows + (i64)number * S::KEYS * stride;
        stage<T, D, S::KEYS, S::THREADS>(from, (int)stride, type, columns, left, place);
      }
    }
  }

  // The places of a tile's mask in shared memory.
  __device__ __forceinline__ int mask_bytes() const {
    int pitch = p.mask_type == F16 ? MaskRows<S::KEYS>::NARROW_PITCH : MaskRows<S::KEYS>::WIDE_PITCH;
    return (same_mask ? 1 : S::LINES) * pitch;
  }

  __device__ __forceinline__ int mask_lines() const { return same_mask ? 1 : count; }

  // True if this thread's share of the mask shows any key of 2^level tiles. Four loads are in
  // flight at once.
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

  // The mask of a tile; minus infinity after the last key.
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

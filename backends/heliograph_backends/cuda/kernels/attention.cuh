// Attention on the matrix units, in one kernel: scores, their softmax and the sum of values,
// without storing the scores.
//
// The largest exponent and the total of a line are updated as keys come (Milakov and Gimelshein,
// "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention", 2022; Dao,
// "FlashAttention-2", 2023). Tiles of keys and values are copied to shared memory while the
// previous ones are computed with. Weights move from the sums of one product to the operand of the
// next in registers: their layouts are the same for narrow floats, and for f32 after the keys are
// permuted.
//
// Many rows: a block has 64 or 128 rows of a head, a warp 16 or 32 of them. Few rows (SPLIT): a
// block has 16 lines of heads that share keys, and its warps share the keys. If that gives few
// blocks, further blocks process other keys, and `attention_merge` adds the parts (Dao et al.,
// "Flash-Decoding", 2023).

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

// Narrow rows go through the warp's own part of shared memory, so that 16 bytes are written at
// once.
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

// Divides a line's sums by its total, which includes its sink.
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

// Adds the sums of the warps for the block's lines, and writes the result, or a part of it if the
// keys are split.
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
  check_pages<S::THREADS>(p);
  Part<T, D, SPLIT> part(p);
  // Queries use the memory of the second tile, unless they stay in shared memory; the first tile
  // uses the other stage.
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
      // After this barrier all copies of this tile have arrived, and no warp reads the other stage,
      // neither the tile before nor queries. Tiles that the mask hides from all lines are skipped.
      // After one, increasing numbers of tiles are checked at once.
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
      // Few queries are read while the first tile is copied.
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
  // Other warps may still read the last tile, and queries that stayed.
  if constexpr (SPLIT || !S::HELD) __syncthreads();
  if constexpr (SPLIT) {
    merge_warps(lines, reinterpret_cast<float*>(shared));
  } else {
    // The stage of the next tile has no readers.
    write_lines(lines, S::HELD ? shared + at * S::STAGE : queries);
  }
}

// Kernels for heads of up to D elements: for many rows, and for few.
#define ATTENTION(T, name, D)                                                                                   \
  KERNEL_OF_BLOCKS(attention_##name##_##D, AttentionParameters, 128, (D % 64 == 32 || D == 128 ? 3 : 2)) { attend<T, D, false>(p); } \
  KERNEL(attention_##name##_##D##_split, AttentionParameters, (Tiling<T, D, true>::THREADS)) { attend<T, D, true>(p); }

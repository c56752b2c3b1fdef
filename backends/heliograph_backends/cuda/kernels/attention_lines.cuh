// The registers of an attention warp for its block's lines: queries, largest exponents, totals and
// sums of values.

// A warp's lines: 16 TILES of them. A lane has g and g + 8 of each tile, `half` 0 and 1.
template <int T, int D, bool SPLIT> struct Lines {
  using S = Tiling<T, D, SPLIT>;
  const Part<T, D, SPLIT>& part;
  int lane, warp, g, t;
  float slopes[S::TILES][2];       // times log2 e
  float factor;                    // from the scale of products to exponents
  float top[S::TILES][2], total[S::TILES][2];  // `total`: this lane's part of it
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

  // True if exponents are the products times a positive number.
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

  // Adds the mask, times slopes, to products times `outer`.
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

  // Turns products into exponents, up to `factor`.
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

  // Calls with each element of this lane and its key.
  template <class F>
  __device__ __forceinline__ void each(float (&s)[S::TILES][S::OWN_KEYS / 8][4], F call) const {
#pragma unroll
    for (int m = 0; m < S::TILES; m++)
#pragma unroll
      for (int n = 0; n < S::OWN_KEYS / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) call(s[m][n][i], n * 8 + 2 * t + i % 2);
  }

  // Turns exponents into weights, and scales earlier sums down when a larger exponent comes.
  __device__ __forceinline__ void weigh(float (&s)[S::TILES][S::OWN_KEYS / 8][4]) {
#pragma unroll
    for (int m = 0; m < S::TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        // A NaN is not kept here, but its weight is NaN, and so is the total.
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
          // Operand k is key 2 k for k < 4, and from there key 2 k - 7.
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

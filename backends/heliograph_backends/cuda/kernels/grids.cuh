// Points of the grids of iq1, iq2 and iq3: eight elements of a row as signed bytes.
//
// The tables `GRID_*` of `sources.py` stand before this. The levels of iq1 are eight times those of
// the definition with their shift, so its factors are an eighth.

static __device__ __forceinline__ u32 half_word(const u8* place) { return *reinterpret_cast<const u16*>(place); }

static __device__ __forceinline__ u32 whole_word(const u8* place) {
  return half_word(place) | half_word(place + 2) << 16;
}

// Seven bits of signs, and an eighth that makes their number of ones even.
static __device__ __forceinline__ u32 even_signs(u32 seven) {
  u32 folded = (seven ^ seven >> 4) & 15;
  return seven | (0x6996u >> folded & 1) << 7;
}

// Four positive bytes, negated where the lowest bits are set; a byte is never 0.
static __device__ __forceinline__ u32 negated(u32 bytes, u32 bits) {
  u32 ones = ((bits & 15) * 0x00204081u) & 0x01010101u, mask = ones * 255;
  return (bytes ^ mask) + ones;
}

// The bytes of four levels at places of four bits each.
template <int T>
static __device__ __forceinline__ u32 levels_at(u32 places) {
  if constexpr (T == IQ3_XXS) return bytes_of(0x1c140c04u, 0x3e342c24u, places);
  if constexpr (T == IQ3_S) return bytes_of(0x07050301u, 0x0f0d0b09u, places);
  return bytes_of(0x002b1908u, 0, places);
}

static __device__ __forceinline__ u32 shifted_levels_at(u32 places, u32 is_down) {
  return bytes_of(is_down ? 0x0007fff7u : 0x000901f9u, 0, places);
}

// Eight elements of group `group` of 32 of a part of a block.
template <int T>
static __device__ __forceinline__ void group_of(const u8* block, int part, int group, u32& first, u32& second) {
  u32 one, other, signs;
  if constexpr (T == IQ1_S || T == IQ1_M) {
    u32 high;
    if constexpr (T == IQ1_S) {
      u32 own = half_word(block + 34 + 2 * part);
      high = (own >> 3 * group & 7) | (own >> 15) << 3;
    } else {
      high = block[32 + 2 * part + group / 2] >> group % 2 * 4 & 15;
    }
    u32 point = GRID_IQ1[block[(T == IQ1_S ? 2 : 0) + 4 * part + group] | (high & 7) << 8];
    first = shifted_levels_at(point & 0xffff, high >> 3), second = shifted_levels_at(point >> 16, high >> 3);
    return;
  } else if constexpr (T == IQ3_XXS || T == IQ3_S) {
    const u8* places = block + 2 + 8 * part + 2 * group;
    if constexpr (T == IQ3_XXS) {
      one = GRID_IQ3_XXS[places[0]], other = GRID_IQ3_XXS[places[1]];
      signs = even_signs(whole_word(block + 66 + 4 * part) >> 7 * group & 127);
    } else {
      u32 ninth = block[66 + part] >> 2 * group;
      one = GRID_IQ3_S[places[0] | (ninth & 1) << 8], other = GRID_IQ3_S[places[1] | (ninth >> 1 & 1) << 8];
      signs = block[74 + 4 * part + group];
    }
  } else {
    u32 point;
    if constexpr (T == IQ2_XXS) {
      point = GRID_IQ2_XXS[block[2 + 8 * part + group]];
      signs = even_signs(whole_word(block + 6 + 8 * part) >> 7 * group & 127);
    } else if constexpr (T == IQ2_XS) {
      u32 both = half_word(block + 2 + 8 * part + 2 * group);
      point = GRID_IQ2_XS[both & 511], signs = even_signs(both >> 9);
    } else {  // IQ2_S
      point = GRID_IQ2_S[block[2 + 4 * part + group] | (block[66 + part] >> 2 * group & 3) << 8];
      signs = block[34 + 4 * part + group];
    }
    one = point & 0xffff, other = point >> 16;
  }
  first = negated(levels_at<T>(one), signs), second = negated(levels_at<T>(other), signs >> 4);
}

// The factor of the elements of a half of a part.
template <int T>
static __device__ __forceinline__ float factor_of_half(const u8* block, int part, int half) {
  float scale;
  if constexpr (T == IQ1_M) {
    u32 found = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) found |= half_word(block + 48 + 2 * i) >> 12 << 4 * i;
    scale = f16_to_f32((u16)found);
    u32 small = half_word(block + 48 + part / 2 * 2) >> (part % 2 * 6 + half * 3) & 7;
    return scale * (float)(2 * small + 1) * 0.125f;
  }
  scale = f16_to_f32((u16)half_word(block));
  if constexpr (T == IQ1_S) return scale * (float)(2 * (half_word(block + 34 + 2 * part) >> 12 & 7) + 1) * 0.125f;
  if constexpr (T == IQ3_S) return scale * (float)(2 * (block[106 + part / 2] >> part % 2 * 4 & 15) + 1);
  u32 small;
  if constexpr (T == IQ2_XXS)
    small = whole_word(block + 6 + 8 * part) >> 28;
  else if constexpr (T == IQ3_XXS)
    small = whole_word(block + 66 + 4 * part) >> 28;
  else
    small = block[(T == IQ2_XS ? 66 : 74) + part] >> half * 4 & 15;
  return scale * ((float)small + 0.5f) * (T == IQ3_XXS ? 0.5f : 0.25f);
}

// Half of a float of four exponent and three mantissa bits; its top bit means nothing.
static __device__ __forceinline__ float small_float_of(u32 byte) {
  return byte == 127 ? 0.0f : __int_as_float((int)((byte & 127) << 20)) * 6.64613998e35f;
}

// ggml's blocks: 32 elements of a row at a time, as f32 in registers.
//
// `part_of<T>(row, part, out)` returns elements 32 * part to 32 * part + 31 of a row that is stored
// as T. The layouts are those of `heliograph_proto.quantization`; the results equal its, bit for
// bit except for sums. Blocks lie at odd multiples of two bytes, so at most two bytes are read at
// once; those of mxfp4 lie anywhere.

template <int T> struct Stored;  // bytes of a block, and its number of parts of 32 elements
template <> struct Stored<F16> { enum { BYTES = 64, PARTS = 1 }; };
template <> struct Stored<BF16> { enum { BYTES = 64, PARTS = 1 }; };
template <> struct Stored<Q4_0> { enum { BYTES = 18, PARTS = 1 }; };
template <> struct Stored<Q4_1> { enum { BYTES = 20, PARTS = 1 }; };
template <> struct Stored<Q5_0> { enum { BYTES = 22, PARTS = 1 }; };
template <> struct Stored<Q5_1> { enum { BYTES = 24, PARTS = 1 }; };
template <> struct Stored<Q8_0> { enum { BYTES = 34, PARTS = 1 }; };
template <> struct Stored<Q2_K> { enum { BYTES = 84, PARTS = 8 }; };
template <> struct Stored<Q3_K> { enum { BYTES = 110, PARTS = 8 }; };
template <> struct Stored<Q4_K> { enum { BYTES = 144, PARTS = 8 }; };
template <> struct Stored<Q5_K> { enum { BYTES = 176, PARTS = 8 }; };
template <> struct Stored<Q6_K> { enum { BYTES = 210, PARTS = 8 }; };
template <> struct Stored<IQ4_NL> { enum { BYTES = 18, PARTS = 1 }; };
template <> struct Stored<IQ4_XS> { enum { BYTES = 136, PARTS = 8 }; };
template <> struct Stored<MXFP4> { enum { BYTES = 17, PARTS = 1 }; };
template <> struct Stored<TQ1_0> { enum { BYTES = 54, PARTS = 8 }; };
template <> struct Stored<TQ2_0> { enum { BYTES = 66, PARTS = 8 }; };
template <> struct Stored<IQ1_S> { enum { BYTES = 50, PARTS = 8 }; };
template <> struct Stored<IQ1_M> { enum { BYTES = 56, PARTS = 8 }; };
template <> struct Stored<IQ2_XXS> { enum { BYTES = 66, PARTS = 8 }; };
template <> struct Stored<IQ2_XS> { enum { BYTES = 74, PARTS = 8 }; };
template <> struct Stored<IQ2_S> { enum { BYTES = 82, PARTS = 8 }; };
template <> struct Stored<IQ3_XXS> { enum { BYTES = 98, PARTS = 8 }; };
template <> struct Stored<IQ3_S> { enum { BYTES = 110, PARTS = 8 }; };
template <> struct Stored<NVFP4> { enum { BYTES = 36, PARTS = 2 }; };

// True for types whose elements are points of a grid.
template <int T>
struct OfGrid {
  enum { IS = T >= IQ1_S && T <= IQ3_S };
};

static __device__ __forceinline__ float scale_at(const u8* place) {
  return f16_to_f32(*reinterpret_cast<const u16*>(place));
}

// Small integers as floats: 2**23 + n has n in its lowest bits. This is exact, and avoids a slow
// conversion.
static __device__ __forceinline__ float whole(u32 n) { return __int_as_float((int)(0x4b000000u | n)) - 8388608.0f; }

// 16 bytes of nibbles: first all lower ones, then the upper ones.
static __device__ __forceinline__ void nibbles(const u8* quanta, u32 (&out)[32]) {
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    u32 two = *reinterpret_cast<const u16*>(quanta + i);
    out[i] = two & 15, out[i + 1] = two >> 8 & 15, out[i + 16] = two >> 4 & 15, out[i + 17] = two >> 12;
  }
}

static __device__ __forceinline__ u32 word_at(const u8* place) {
  const u16* halves = reinterpret_cast<const u16*>(place);
  return halves[0] | (u32)halves[1] << 16;
}

// Scale and offset of one of eight parts: six bits each, those of the last four split in two.
static __device__ __forceinline__ void scales_of_eight(const u8* block, int part, float& factor, float& offset) {
  const u8* packed = block + 4;
  u32 low, least;
  if (part < 4) {
    low = packed[part] & 63, least = packed[part + 4] & 63;
  } else {
    low = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    least = packed[part + 4] >> 4 | (packed[part] >> 6) << 4;
  }
  factor = scale_at(block) * whole(low), offset = scale_at(block + 2) * whole(least);
}

// The signed numbers of sixteen places, as bytes, four in a word: `heliograph_proto`'s CODES, and
// FP4_CODES.
template <int T>
struct Codes {
  enum { IS_FLOAT = T == MXFP4 || T == NVFP4 };
  static const u32 FIRST = IS_FLOAT ? 0x03020100u : 0xbfad9881u;
  static const u32 SECOND = IS_FLOAT ? 0x0c080604u : 0xf6eaddcfu;
  static const u32 THIRD = IS_FLOAT ? 0xfdfeff00u : 0x26190d01u;
  static const u32 FOURTH = IS_FLOAT ? 0xf4f8fafcu : 0x71594535u;
};

// The numbers of the four lowest nibbles, which are places.
template <int T>
static __device__ __forceinline__ u32 four_codes(u32 places) {
  u32 which = places & 0x7777;
  u32 small = bytes_of(Codes<T>::FIRST, Codes<T>::SECOND, which);
  u32 large = bytes_of(Codes<T>::THIRD, Codes<T>::FOURTH, which);
  return bytes_of(small, large, 0x3210 + (places >> 1 & 0x4444));
}

// The numbers of the lower nibbles of four bytes, and of the upper ones.
template <int T>
static __device__ __forceinline__ void codes_of(u32 places, u32& lower, u32& upper) {
  u32 first = four_codes<T>(places), second = four_codes<T>(places >> 16);
  lower = bytes_of(first, second, 0x6420), upper = bytes_of(first, second, 0x7531);
}

// A power of two, whose exponent is a byte; the first two are smaller than normal floats.
static __device__ __forceinline__ float power_of(u32 exponent) {
  return __int_as_float((int)(exponent < 2 ? 0x200000u << exponent : (exponent - 1) << 23));
}

// The scale of one of eight parts of iq4_xs: `high` has two bits of each, `low` four.
static __device__ __forceinline__ float scale_of_part(float scale, u32 high, u32 low, int part) {
  return scale * (whole((low >> 4 * part & 15) | (high >> 2 * part & 3) << 4) - 32.0f);
}

// In base three, a digit of each byte of a word is the carry of a multiplication by 3, after others
// by 3.
static __device__ __forceinline__ u32 digits_of(u32 bytes, int digit) {
  u32 power = (u32)(0x511b090301ull >> 8 * digit) & 255;
  u32 even = (bytes & 0x00ff00ff) * power & 0x00ff00ff, odd = (bytes >> 8 & 0x00ff00ff) * power & 0x00ff00ff;
  return (even * 3 >> 8 & 0x00030003) | (odd * 3 & 0x03000300);
}

// Of a run of 16 elements of tq1_0: the digit of each word, and the first byte.
static __device__ __forceinline__ int digit_of_run(int run, int word) {
  return run < 10 ? run / 2 : run < 15 ? run - 10 : word;
}

static __device__ __forceinline__ int start_of_run(int run) {
  return run < 10 ? run % 2 * 16 : run < 15 ? 32 : 48;
}

template <int T>
static __device__ __forceinline__ void part_of(const u8* row, i64 number, float (&out)[32]) {
  const u8* block = row + number / Stored<T>::PARTS * Stored<T>::BYTES;
  const int part = (int)(number % Stored<T>::PARTS);
  if constexpr (T == F16 || T == BF16) {
    const u16* bits = reinterpret_cast<const u16*>(block);
#pragma unroll
    for (int i = 0; i < 32; i++) out[i] = T == F16 ? f16_to_f32(bits[i]) : bf16_to_f32(bits[i]);
  } else if constexpr (T == Q8_0) {
    float factor = scale_at(block);
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      u32 two = *reinterpret_cast<const u16*>(block + 2 + i);
      out[i] = (whole((two & 255) ^ 128) - 128.0f) * factor;
      out[i + 1] = (whole((two >> 8) ^ 128) - 128.0f) * factor;
    }
  } else if constexpr (T == Q4_0 || T == Q4_1 || T == Q5_0 || T == Q5_1) {
    constexpr bool five = T == Q5_0 || T == Q5_1, least = T == Q4_1 || T == Q5_1;
    constexpr int head = least ? 4 : 2;
    u32 quanta[32], fifth = five ? word_at(block + head) : 0;
    nibbles(block + head + (five ? 4 : 0), quanta);
    float factor = scale_at(block), offset = least ? scale_at(block + 2) : 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      float number = whole(five ? quanta[i] | (fifth >> i & 1) << 4 : quanta[i]);
      out[i] = least ? number * factor + offset : (number - (five ? 16.0f : 8.0f)) * factor;
    }
  } else if constexpr (T == Q2_K) {
    // A part is two of 16 groups; its two bits come from the 32 bytes of its half.
    const u8* quanta = block + 16 + part / 4 * 32;
    float scale = scale_at(block + 80), least = scale_at(block + 82);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      u32 scales = block[part * 2 + i / 16];
      out[i] = whole(quanta[i] >> part % 4 * 2 & 3) * (scale * whole(scales & 15)) - least * whole(scales >> 4);
    }
  } else if constexpr (T == Q3_K) {
    const u8* high = block;
    const u8* low = block + 32 + part / 4 * 32;
    const u8* scales = block + 96;
    float scale = scale_at(block + 108);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      int sixteenth = part * 2 + i / 16;
      u32 lower = scales[sixteenth % 8] >> sixteenth / 8 * 4 & 15;
      u32 upper = scales[8 + sixteenth % 4] >> sixteenth / 4 * 2 & 3;
      float factor = scale * (whole(lower | upper << 4) - 32.0f);
      out[i] = (whole((low[i] >> part % 4 * 2 & 3) | (high[i] >> part & 1) << 2) - 4.0f) * factor;
    }
  } else if constexpr (T == Q4_K || T == Q5_K) {
    constexpr bool five = T == Q5_K;
    float factor, offset;
    scales_of_eight(block, part, factor, offset);
    const u8* quanta = block + (five ? 48 : 16) + part / 2 * 32;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      u32 number = quanta[i] >> part % 2 * 4 & 15;
      if (five) number |= (block[16 + i] >> part & 1) << 4;
      out[i] = whole(number) * factor - offset;
    }
  } else if constexpr (T == IQ4_NL || T == IQ4_XS || T == MXFP4) {
    const u8* quanta = block + (T == IQ4_NL ? 2 : T == MXFP4 ? 1 : 8 + part * 16);
    float factor = T == MXFP4 ? power_of(block[0]) : scale_at(block);
    if (T == IQ4_XS)
      factor = scale_of_part(factor, *reinterpret_cast<const u16*>(block + 2), word_at(block + 4), part);
#pragma unroll
    for (int i = 0; i < 16; i++) {
      u32 both = four_codes<T>(quanta[i]);
      out[i] = (float)(i8)(both & 255) * factor, out[i + 16] = (float)(i8)(both >> 8 & 255) * factor;
    }
  } else if constexpr (T == TQ1_0) {
    float scale = scale_at(block + 52);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      int run = part * 2 + i / 16, word = i % 16 / 4;
      int place = start_of_run(run) + (run < 15 ? i % 16 : i % 4);
      out[i] = (whole(digits_of(block[place], digit_of_run(run, word))) - 1.0f) * scale;
    }
  } else if constexpr (T == TQ2_0) {
    float scale = scale_at(block + 64);
#pragma unroll
    for (int i = 0; i < 32; i++) out[i] = (whole(block[part / 4 * 32 + i] >> part % 4 * 2 & 3) - 1.0f) * scale;
  } else if constexpr (OfGrid<T>::IS) {
#pragma unroll
    for (int group = 0; group < 4; group++) {
      u32 words[2];
      group_of<T>(block, part, group, words[0], words[1]);
      float factor = factor_of_half<T>(block, part, group / 2);
#pragma unroll
      for (int i = 0; i < 8; i++) out[group * 8 + i] = (float)(i8)(words[i / 4] >> i % 4 * 8 & 255) * factor;
    }
  } else if constexpr (T == NVFP4) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
      int half = i / 8;
      float factor = small_float_of(block[part * 2 + half]);
      u32 both = four_codes<T>(block[4 + part * 16 + i]);
      out[half * 16 + i % 8] = (float)(i8)(both & 255) * factor;
      out[half * 16 + i % 8 + 8] = (float)(i8)(both >> 8 & 255) * factor;
    }
  } else {  // Q6_K
    const u8* low = block + part / 4 * 64 + part % 2 * 32;
    const u8* high = block + 128 + part / 4 * 32;
    const i8* scales = reinterpret_cast<const i8*>(block + 192) + part * 2;
    float scale = scale_at(block + 208);
#pragma unroll
    for (int i = 0; i < 32; i++) {
      u32 number = (low[i] >> part % 4 / 2 * 4 & 15) | (high[i] >> part % 4 * 2 & 3) << 4;
      out[i] = (whole(number) - 32.0f) * (scale * (float)scales[i / 16]);
    }
  }
}

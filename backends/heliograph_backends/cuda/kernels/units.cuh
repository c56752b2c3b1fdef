// Stored weights as integers: a unit is 64 elements of a row, each a factor times a byte plus an
// offset.
//
// A lane decodes a unit at once: two blocks of 32, or the quarter of a block of 256 whose bits
// share bytes. It is four groups of 16 elements, four words of bytes each; `element_of` returns a
// group's first element in the row. Factors, and offsets, belong to one or two groups (`SPANS` of a
// unit). The layouts are those of `heliograph_proto.quantization`. Rows begin at multiples of 16 in
// shared memory, or of the alignment that their words need.

#define UNIT 64

// True if the bits of a block of 256 are spread over its halves: a unit is then four groups 32
// apart.
template <int T>
struct Form {
  enum {
    CROSSED = T == Q2_K || T == Q3_K || T == Q6_K || T == TQ2_0,
    SPANS = CROSSED || T == IQ1_M || T == IQ2_XS || T == IQ2_S || T == NVFP4 ? 4 : 2,
    SIGNED = T == Q8_0 || T == IQ4_NL || T == IQ4_XS || T == MXFP4 || T == NVFP4 || OfGrid<T>::IS,
    // The excess of each number.
    TOO_LARGE = 8 * (T == Q4_0) + 16 * (T == Q5_0) + 4 * (T == Q3_K) + 32 * (T == Q6_K) +
                (T == TQ1_0 || T == TQ2_0),
    OFFSETS = !SIGNED
  };
};

// The first element of a group.
template <int T>
static __device__ __forceinline__ int element_of(int unit, int group) {
  if (!Form<T>::CROSSED) return unit * UNIT + group * 16;
  return unit / 4 * 256 + unit % 4 / 2 * 128 + group * 32 + unit % 2 * 16;
}

static __device__ __forceinline__ float low_half(u32 word) { return f16_to_f32((u16)(word & 0xffff)); }
static __device__ __forceinline__ float high_half(u32 word) { return f16_to_f32((u16)(word >> 16)); }

// Words at any byte.
template <int N>
static __device__ __forceinline__ void words_at(const u8* place, u32 (&out)[N]) {
  int odd = (int)((u64)place % 4);
  u32 which = 0x3210 + 0x1111 * odd, next, word;
  load_words<1>(place - odd, &word);
#pragma unroll
  for (int i = 0; i < N; i++) {
    load_words<1>(place - odd + 4 * i + 4, &next);
    out[i] = bytes_of(word, next, which);
    word = next;
  }
}

// Four bits from `from` on, each in bit 4 of its own byte.
static __device__ __forceinline__ u32 fifth_bits(u32 bits, int from) {
  return (bits >> from & 15) * 0x02040810u & 0x10101010u;
}

// Two consecutive blocks of 32: their headers, and their numbers.
template <int T>
static __device__ __forceinline__ void decode_pair(
    const u8* place, u32 (&out)[16], float (&factors)[2], float (&offsets)[2]) {
  constexpr int WORDS = Stored<T>::BYTES / 2, WIDTH = WORDS % 4 == 0 ? 4 : WORDS % 2 == 0 ? 2 : 1;
  u32 x[WORDS];
#pragma unroll
  for (int i = 0; i < WORDS; i += WIDTH) load_words<WIDTH>(place + 4 * i, x + i);
#pragma unroll
  for (int b = 0; b < 2; b++) {
    // Halves of words before the block's first word.
    const int at = b * Stored<T>::BYTES / 2;
    auto word = [&](int half) {
      int i = (at + half) / 2;
      return (at + half) % 2 ? bytes_of(x[i], x[i + 1], 0x5432) : x[i];
    };
    auto number = [&](int half) {
      return (at + half) % 2 ? high_half(x[(at + half) / 2]) : low_half(x[(at + half) / 2]);
    };
    factors[b] = number(0);
    offsets[b] = T == Q4_1 || T == Q5_1 ? number(1) : factors[b] * -(float)Form<T>::TOO_LARGE;
    if constexpr (T == Q8_0) {
#pragma unroll
      for (int i = 0; i < 8; i++) out[b * 8 + i] = word(1 + 2 * i);
    } else if constexpr (T == IQ4_NL) {
#pragma unroll
      for (int i = 0; i < 4; i++) codes_of<T>(word(1 + 2 * i), out[b * 8 + i], out[b * 8 + 4 + i]);
    } else {
      constexpr bool five = T == Q5_0 || T == Q5_1;
      constexpr int head = T == Q4_1 || T == Q5_1 ? 2 : 1;
      u32 fifth = five ? word(head) : 0;
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 both = word(head + (five ? 2 : 0) + 2 * i);
        out[b * 8 + i] = both & 0x0f0f0f0f, out[b * 8 + 4 + i] = both >> 4 & 0x0f0f0f0f;
        if (five)
          out[b * 8 + i] |= fifth_bits(fifth, 4 * i), out[b * 8 + 4 + i] |= fifth_bits(fifth, 16 + 4 * i);
      }
    }
  }
}

// A quarter of a block whose scales and offsets are six bits each: elements 64 * quarter and on.
template <int T>
static __device__ __forceinline__ void decode_six_bits(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[2], float (&offsets)[2]) {
  u32 head[4], x[8], fifth[8];
  load_words<4>(block, head);
  const u8* quanta = block + (T == Q5_K ? 48 : 16) + quarter * 32;
  load_words<4>(quanta, x), load_words<4>(quanta + 16, x + 4);
  if constexpr (T == Q5_K) load_words<4>(block + 16, fifth), load_words<4>(block + 32, fifth + 4);
#pragma unroll
  for (int i = 0; i < 8; i++) {
    out[i] = x[i] & 0x0f0f0f0f, out[8 + i] = x[i] >> 4 & 0x0f0f0f0f;
    if constexpr (T == Q5_K) {
      u32 bits = fifth[i] >> 2 * quarter;
      out[i] |= bits << 4 & 0x10101010, out[8 + i] |= bits << 3 & 0x10101010;
    }
  }
  bool early = quarter < 2;
  u32 scales = early ? head[1] & 0x3f3f3f3f : (head[3] & 0x0f0f0f0f) | (head[1] >> 2 & 0x30303030);
  u32 least = early ? head[2] & 0x3f3f3f3f : (head[3] >> 4 & 0x0f0f0f0f) | (head[2] >> 2 & 0x30303030);
  scales >>= quarter % 2 * 16, least >>= quarter % 2 * 16;
  float scale = low_half(head[0]), offset = -high_half(head[0]);
  factors[0] = scale * whole(scales & 63), factors[1] = scale * whole(scales >> 8 & 63);
  offsets[0] = offset * whole(least & 63), offsets[1] = offset * whole(least >> 8 & 63);
}

// For the crossed types a quarter is half of the bytes of one half of the block.
static __device__ __forceinline__ void decode_q2_k(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[4], float (&offsets)[4]) {
  u32 x[4], scales[2], head;
  int half = quarter / 2, right = quarter % 2;
#pragma unroll
  for (int i = 0; i < 4; i++) load_words<1>(block + 16 + quarter * 16 + 4 * i, x + i);
  load_words<1>(block + half * 8, scales), load_words<1>(block + half * 8 + 4, scales + 1);
  load_words<1>(block + 80, &head);
  float scale = low_half(head), offset = -high_half(head);
#pragma unroll
  for (int g = 0; g < 4; g++) {
    u32 packed = scales[g / 2] >> (g % 2 * 16 + right * 8);
    factors[g] = scale * whole(packed & 15), offsets[g] = offset * whole(packed >> 4 & 15);
#pragma unroll
    for (int i = 0; i < 4; i++) out[g * 4 + i] = x[i] >> 2 * g & 0x03030303;
  }
}

static __device__ __forceinline__ void decode_q3_k(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[4], float (&offsets)[4]) {
  u32 x[4], third[4], packed[3];
  int half = quarter / 2, right = quarter % 2;
  words_at(block + 32 + quarter * 16, x), words_at(block + right * 16, third), words_at(block + 96, packed);
  float scale = scale_at(block + 108);
  // Six bits: first the lower four of all, then the upper two.
  u32 lower = packed[0] >> 4 * half, later = packed[1] >> 4 * half, upper = packed[2] >> 4 * half;
  u32 scales[2] = {
      (lower & 0x0f0f0f0f) | (upper << 4 & 0x30303030), (later & 0x0f0f0f0f) | (upper << 2 & 0x30303030)};
#pragma unroll
  for (int i = 0; i < 4; i++) third[i] >>= 4 * half;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    factors[g] = scale * (whole(scales[g / 2] >> (g % 2 * 16 + right * 8) & 63) - 32.0f);
    offsets[g] = factors[g] * -(float)Form<Q3_K>::TOO_LARGE;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 bit = g < 2 ? third[i] << (2 - g) : third[i] >> (g - 2);
      out[g * 4 + i] = (x[i] >> 2 * g & 0x03030303) | (bit & 0x04040404);
    }
  }
}

static __device__ __forceinline__ void decode_q6_k(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[4], float (&offsets)[4]) {
  u32 low[2][4], high[4];
  int half = quarter / 2, right = quarter % 2;
  words_at(block + half * 64 + right * 16, low[0]), words_at(block + half * 64 + right * 16 + 32, low[1]);
  words_at(block + 128 + quarter * 16, high);
  const i8* scales = reinterpret_cast<const i8*>(block + 192 + half * 8 + right);
  float scale = scale_at(block + 208);
#pragma unroll
  for (int g = 0; g < 4; g++) {
    factors[g] = scale * (float)scales[2 * g];
    offsets[g] = factors[g] * -(float)Form<Q6_K>::TOO_LARGE;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 upper = g == 0 ? high[i] << 4 : g == 1 ? high[i] << 2 : g == 2 ? high[i] : high[i] >> 2;
      out[g * 4 + i] = (low[g % 2][i] >> g / 2 * 4 & 0x0f0f0f0f) | (upper & 0x30303030);
    }
  }
}

// Two consecutive blocks of 17 bytes.
static __device__ __forceinline__ void decode_mxfp4(
    const u8* place, u32 (&out)[16], float (&factors)[2], float (&offsets)[2]) {
  u32 x[9];
  words_at(place, x);
  factors[0] = power_of(x[0] & 255), factors[1] = power_of(x[4] >> 8 & 255);
  offsets[0] = offsets[1] = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    codes_of<MXFP4>(bytes_of(x[i], x[i + 1], 0x4321), out[i], out[4 + i]);
    codes_of<MXFP4>(bytes_of(x[4 + i], x[5 + i], 0x5432), out[8 + i], out[12 + i]);
  }
}

static __device__ __forceinline__ void decode_iq4_xs(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[2], float (&offsets)[2]) {
  u32 head[2], x[8];
  load_words<1>(block, head), load_words<1>(block + 4, head + 1);
#pragma unroll
  for (int i = 0; i < 8; i++) load_words<1>(block + 8 + quarter * 32 + 4 * i, x + i);
#pragma unroll
  for (int b = 0; b < 2; b++) {
    factors[b] = scale_of_part(low_half(head[0]), head[0] >> 16, head[1], quarter * 2 + b), offsets[b] = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) codes_of<IQ4_XS>(x[b * 4 + i], out[b * 8 + i], out[b * 8 + 4 + i]);
  }
}

static __device__ __forceinline__ void decode_tq1_0(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[2], float (&offsets)[2]) {
  factors[0] = factors[1] = scale_at(block + 52);
  offsets[0] = offsets[1] = factors[0] * -(float)Form<TQ1_0>::TOO_LARGE;
#pragma unroll
  for (int g = 0; g < 4; g++) {
    int run = quarter * 4 + g;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      u32 x[1];
      words_at(block + start_of_run(run) + (run < 15 ? 4 * i : 0), x);
      out[g * 4 + i] = digits_of(x[0], digit_of_run(run, i));
    }
  }
}

static __device__ __forceinline__ void decode_tq2_0(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[4], float (&offsets)[4]) {
  u32 x[4];
  words_at(block + quarter * 16, x);
  float scale = scale_at(block + 64);
#pragma unroll
  for (int g = 0; g < 4; g++) {
    factors[g] = scale, offsets[g] = scale * -(float)Form<TQ2_0>::TOO_LARGE;
#pragma unroll
    for (int i = 0; i < 4; i++) out[g * 4 + i] = x[i] >> 2 * g & 0x03030303;
  }
}

template <int T>
static __device__ __forceinline__ void decode_grid(
    const u8* block, int quarter, u32 (&out)[16], float (&factors)[Form<T>::SPANS],
    float (&offsets)[Form<T>::SPANS]) {
  constexpr int EACH = Form<T>::SPANS / 2;
#pragma unroll
  for (int b = 0; b < 2; b++) {
    int part = quarter * 2 + b;
#pragma unroll
    for (int s = 0; s < EACH; s++)
      factors[b * EACH + s] = factor_of_half<T>(block, part, s), offsets[b * EACH + s] = 0.0f;
#pragma unroll
    for (int g = 0; g < 4; g++) group_of<T>(block, part, g, out[b * 8 + g * 2], out[b * 8 + g * 2 + 1]);
  }
}

static __device__ __forceinline__ void decode_nvfp4(
    const u8* block, u32 (&out)[16], float (&factors)[4], float (&offsets)[4]) {
#pragma unroll
  for (int g = 0; g < 4; g++) {
    factors[g] = small_float_of(block[g]), offsets[g] = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++)
      codes_of<NVFP4>(whole_word(block + 4 + g * 8 + i * 4), out[g * 4 + i], out[g * 4 + 2 + i]);
  }
}

// A unit of a row: its numbers, and the factor and offset of each span; offsets are 0 for types
// without them.
template <int T>
static __device__ __forceinline__ void decode(
    const u8* row, int unit, u32 (&out)[16], float (&factors)[Form<T>::SPANS],
    float (&offsets)[Form<T>::SPANS]) {
  if constexpr (T == MXFP4) {
    decode_mxfp4(row + unit * 2 * Stored<T>::BYTES, out, factors, offsets);
  } else if constexpr (T == NVFP4) {
    decode_nvfp4(row + unit * Stored<T>::BYTES, out, factors, offsets);
  } else if constexpr (Stored<T>::PARTS == 1) {
    decode_pair<T>(row + unit * 2 * Stored<T>::BYTES, out, factors, offsets);
  } else {
    const u8* block = row + unit / 4 * Stored<T>::BYTES;
    if constexpr (T == Q2_K)
      decode_q2_k(block, unit % 4, out, factors, offsets);
    else if constexpr (T == Q3_K)
      decode_q3_k(block, unit % 4, out, factors, offsets);
    else if constexpr (T == Q6_K)
      decode_q6_k(block, unit % 4, out, factors, offsets);
    else if constexpr (OfGrid<T>::IS)
      decode_grid<T>(block, unit % 4, out, factors, offsets);
    else if constexpr (T == IQ4_XS)
      decode_iq4_xs(block, unit % 4, out, factors, offsets);
    else if constexpr (T == TQ1_0)
      decode_tq1_0(block, unit % 4, out, factors, offsets);
    else if constexpr (T == TQ2_0)
      decode_tq2_0(block, unit % 4, out, factors, offsets);
    else
      decode_six_bits<T>(block, unit % 4, out, factors, offsets);
  }
}

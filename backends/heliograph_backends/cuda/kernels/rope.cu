// Rotary position embedding with plain positions.
//
// An angle is a token's position times a number of its pair, in turns: one product in f64, of which
// only the fraction matters. So f32 only computes sine and cosine of at most half a turn. A thread
// has four pairs of a token, for some of its heads.

#define MOST_PAIRS 128
#define ROPE_THREADS 256
#define HEADS_AT_ONCE 4

struct RopeParameters {
  Walk walk;  // of the leading dimensions and the tokens, which are its last one
  i64 tokens;
  Operand x;
  Operand result;
  Operand positions;  // i32
  Operand factors;    // f32, one for each pair
  i64 head_strides[2];
  i64 inner[2];
  double turns[MOST_PAIRS];  // of each pair for each position, without its factor
  int heads;
  int width;
  int has_factors;
  int pairs;
  int start;
  int adjacent;  // true if a pair is contiguous
  int heads_of_unit;
  int units_of_token;
  float size;  // a factor of the rotated vectors
  int packed;  // true if elements are contiguous, and four pairs begin at multiples of four
};

struct Turn {
  float cosine[4], sine[4];

  __device__ __forceinline__ Turn(const RopeParameters& p, int position, int pair) {
    const float* factors = reinterpret_cast<const float*>(in_memory(p.factors.address));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int own = pair + i < p.pairs ? pair + i : p.pairs - 1;
      double turns = position * p.turns[own];
      if (p.has_factors) turns /= factors[own];
      sincospif(2.0f * (float)(turns - rint(turns)), &sine[i], &cosine[i]);
      sine[i] *= p.size, cosine[i] *= p.size;
    }
  }

  // Rotates the pair (a, b).
  __device__ __forceinline__ void apply(int i, float& a, float& b) const {
    float turned = a * cosine[i] - b * sine[i];
    b = a * sine[i] + b * cosine[i];
    a = turned;
  }
};

// Four pairs of several heads, all read before the first is written. A pair is the elements at the
// same place of both fours, or neighbours in each.
template <bool NARROW>
static __device__ __forceinline__ void turn_heads(
    const RopeParameters& p, const Turn& turn, const u8* from, u8* to, int first, int second, int heads) {
  using F = Four<NARROW>;
  const typename F::Words nothing = {};
  for (int start = 0; start < heads; start += HEADS_AT_ONCE) {
    typename F::Words a[HEADS_AT_ONCE], b[HEADS_AT_ONCE];
#pragma unroll
    for (int h = 0; h < HEADS_AT_ONCE; h++) {
      const u8* row = from + (start + h) * p.head_strides[0];
      a[h] = start + h < heads ? *reinterpret_cast<const typename F::Words*>(row + first * F::SIZE) : nothing;
      b[h] = start + h < heads ? *reinterpret_cast<const typename F::Words*>(row + second * F::SIZE) : nothing;
    }
#pragma unroll
    for (int h = 0; h < HEADS_AT_ONCE; h++) {
      if (start + h >= heads) break;
      float x[4], y[4];
      F::open(a[h], p.x.type, x), F::open(b[h], p.x.type, y);
      if (p.adjacent) {
        turn.apply(0, x[0], x[1]), turn.apply(1, x[2], x[3]);
        turn.apply(2, y[0], y[1]), turn.apply(3, y[2], y[3]);
      } else {
#pragma unroll
        for (int i = 0; i < 4; i++) turn.apply(i, x[i], y[i]);
      }
      u8* row = to + (start + h) * p.head_strides[1];
      *reinterpret_cast<typename F::Words*>(row + first * F::SIZE) = F::close(p.x.type, x);
      *reinterpret_cast<typename F::Words*>(row + second * F::SIZE) = F::close(p.x.type, y);
    }
  }
}

// The same pairs one by one, wherever they lie.
static __device__ __forceinline__ void turn_slowly(
    const RopeParameters& p, const Turn& turn, const u8* from, u8* to, int pair, int heads) {
  for (int head = 0; head < heads; head++) {
    const u8* in = from + head * p.head_strides[0];
    u8* out = to + head * p.head_strides[1];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (pair + i >= p.pairs) break;
      int first = p.start + (p.adjacent ? 2 * (pair + i) : pair + i), second = first + (p.adjacent ? 1 : p.pairs);
      float a = load(in + first * p.inner[0], p.x.type), b = load(in + second * p.inner[0], p.x.type);
      turn.apply(i, a, b);
      store(out + first * p.inner[1], p.result.type, a), store(out + second * p.inner[1], p.result.type, b);
    }
  }
}

// Copies the elements that belong to no pair.
static __device__ __forceinline__ void keep_rest(
    const RopeParameters& p, const u8* from, u8* to, int number, int step, int heads) {
  int rest = p.width - 2 * p.pairs;
  for (int head = 0; head < heads; head++)
    for (int i = number; i < rest; i += step) {
      int column = i < p.start ? i : i + 2 * p.pairs;
      float kept = load(from + head * p.head_strides[0] + column * p.inner[0], p.x.type);
      store(to + head * p.head_strides[1] + column * p.inner[1], p.result.type, kept);
    }
}

KERNEL(rope, RopeParameters, ROPE_THREADS) {
  // A unit is some heads of a token; `groups` threads have one.
  int groups = (p.pairs + 3) / 4, units = ROPE_THREADS / groups, unit = threadIdx.x / groups;
  int pair = ((int)threadIdx.x - unit * groups) * 4;
  u32 number = blockIdx.x * units + unit, token = number / (u32)p.units_of_token;
  if (unit >= units || token >= (u32)p.tokens) return;
  int first_head = (int)(number - token * p.units_of_token) * p.heads_of_unit;
  int heads = p.heads - first_head < p.heads_of_unit ? p.heads - first_head : p.heads_of_unit;
  const u8* from = row_of(p.walk, p.x, token) + first_head * p.head_strides[0];
  u8* to = row_of(p.walk, p.result, token) + first_head * p.head_strides[1];
  Turn turn(p, *reinterpret_cast<const int*>(row_of(p.walk, p.positions, token)), pair);
  int first = p.start + (p.adjacent ? 2 * pair : pair), second = first + (p.adjacent ? 4 : p.pairs);
  u64 places = (u64)from | (u64)to | (u64)p.head_strides[0] | (u64)p.head_strides[1];
  if (!p.packed || places % (p.x.type == F32 ? 16 : 8) != 0)
    turn_slowly(p, turn, from, to, pair, heads);
  else if (p.x.type == F32)
    turn_heads<false>(p, turn, from, to, first, second, heads);
  else
    turn_heads<true>(p, turn, from, to, first, second, heads);
  keep_rest(p, from, to, pair / 4, groups, heads);
}

// Rotary position embedding with plain positions. A thread has one pair of a token, for all heads.

struct RopeParameters {
  Walk walk;  // of the leading dimensions and the tokens, which are its last one
  i64 tokens;
  i64 heads;
  i64 width;
  Operand x;
  Operand result;
  Operand positions;  // i32
  Operand factors;    // f32, one for each pair
  i64 head_strides[2];
  i64 inner[2];
  int has_factors;
  int pairs;
  int start;
  int adjacent;     // whether a pair lies side by side
  double log_base;  // of freq_base, natural
  double per_pair;  // -2 / n_dims
  double freq_scale;
  double size;  // of the rotated vectors
  double ext_factor;
  double low;  // YaRN's mix changes from here
  double range;
};

static __device__ __forceinline__ double angle_of(const RopeParameters& p, int position, int pair) {
  double plain = position * exp(p.log_base * (pair * p.per_pair));
  if (p.has_factors) plain /= reinterpret_cast<const float*>(p.factors.address)[pair];
  double scaled = p.freq_scale * plain;
  if (p.ext_factor == 0.0) return scaled;
  double ramp = (pair - p.low) / p.range;
  double mix = (1.0 - (ramp < 0.0 ? 0.0 : ramp > 1.0 ? 1.0 : ramp)) * p.ext_factor;
  return scaled * (1.0 - mix) + plain * mix;
}

KERNEL(rope, RopeParameters, 256) {
  i64 per_token = p.width - p.pairs;  // pairs, and the elements that stay
  i64 step = (i64)gridDim.x * blockDim.x;
  for (i64 index = (i64)blockIdx.x * blockDim.x + threadIdx.x; index < p.tokens * per_token; index += step) {
    i64 token = index / per_token;
    int work = (int)(index - token * per_token);
    const u8* from = row_of(p.walk, p.x, token);
    u8* to = row_of(p.walk, p.result, token);
    if (work >= p.pairs) {
      int rest = work - p.pairs, column = rest < p.start ? rest : rest + 2 * p.pairs;
      for (i64 head = 0; head < p.heads; head++)
        store(to + head * p.head_strides[1] + column * p.inner[1], p.result.type,
              load(from + head * p.head_strides[0] + column * p.inner[0], p.x.type));
      continue;
    }
    int first = p.start + (p.adjacent ? 2 * work : work), second = first + (p.adjacent ? 1 : p.pairs);
    int position = *reinterpret_cast<const int*>(row_of(p.walk, p.positions, token));
    double angle = angle_of(p, position, work);
    float cosine = (float)(p.size * cos(angle)), sine = (float)(p.size * sin(angle));
    for (i64 head = 0; head < p.heads; head++) {
      const u8* in = from + head * p.head_strides[0];
      u8* out = to + head * p.head_strides[1];
      float a = load(in + first * p.inner[0], p.x.type), b = load(in + second * p.inner[0], p.x.type);
      store(out + first * p.inner[1], p.result.type, a * cosine - b * sine);
      store(out + second * p.inner[1], p.result.type, a * sine + b * cosine);
    }
  }
}

// The common part of the kernels generated for chains of many elements.
//
// `code_generation.py` appends the properties of one chain: `ChainParameters`, a `Chain`; VECTOR,
// the elements that a thread loads at once from each operand; AHEAD, the vectors whose loads a
// thread issues before it uses the first; `Once`, the values that are the same for all elements;
// `Inputs`, the values loaded for each; `chained`, the instructions; and `put`, which stores the
// result. `chain.cu` follows. Counts are in vectors.

#define THREADS 256
#define UNROLLED _Pragma("unroll")
#define EACH UNROLLED for (int i = 0; i < N; i++)

// Empty arrays have one element.
template <int OPERANDS, int WALKED, int DIMENSIONS, int NUMBERS>
struct Chain {
  enum { WALKS = WALKED, AXES = DIMENSIONS };
  u32 vectors;
  u32 tiles;
  u32 rest;  // elements after the last whole vector
  u32 reserved;
  u64 addresses[OPERANDS];                                                 // the first one is the result
  Divisor divisors[DIMENSIONS ? DIMENSIONS : 1];                           // the last size is in vectors
  i64 strides[WALKED ? WALKED : 1][DIMENSIONS ? DIMENSIONS : 1];           // of operands that are walked
  float numbers[NUMBERS ? NUMBERS : 1];
};

template <int TYPE>
struct Item {
  enum { BYTES = TYPE == F32 ? 4 : 2 };
};

// COUNT elements as they lie in memory.
template <int TYPE, int COUNT>
struct Pack {
  enum { BYTES = COUNT * Item<TYPE>::BYTES, WORDS = (BYTES + 3) / 4 };
  u32 words[WORDS];

  __device__ __forceinline__ void load(const u8* place) {
    if (BYTES == 16) {
      uint4 found = *reinterpret_cast<const uint4*>(place);
      words[0] = found.x, words[1 % WORDS] = found.y, words[2 % WORDS] = found.z, words[3 % WORDS] = found.w;
    } else if (BYTES == 8) {
      uint2 found = *reinterpret_cast<const uint2*>(place);
      words[0] = found.x, words[1 % WORDS] = found.y;
    } else if (BYTES == 4) {
      words[0] = *reinterpret_cast<const u32*>(place);
    } else {
      words[0] = *reinterpret_cast<const u16*>(place);
    }
  }

  __device__ __forceinline__ void store(u8* place) const {
    if (BYTES == 16) {
      uint4 made = {words[0], words[1 % WORDS], words[2 % WORDS], words[3 % WORDS]};
      *reinterpret_cast<uint4*>(place) = made;
    } else if (BYTES == 8) {
      uint2 made = {words[0], words[1 % WORDS]};
      *reinterpret_cast<uint2*>(place) = made;
    } else if (BYTES == 4) {
      *reinterpret_cast<u32*>(place) = words[0];
    } else {
      *reinterpret_cast<u16*>(place) = (u16)words[0];
    }
  }

  __device__ __forceinline__ float at(int i) const {
    if (TYPE == F32) return __int_as_float((int)words[i % WORDS]);
    u16 bits = (u16)(words[i / 2] >> (i % 2 * 16));
    return TYPE == F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
  }

  __device__ __forceinline__ void read(float (&values)[COUNT]) const {
    UNROLLED for (int i = 0; i < COUNT; i++) values[i] = at(i);
  }

  __device__ __forceinline__ void fill(const float (&values)[COUNT]) {
    if (TYPE == F32) {
      UNROLLED for (int i = 0; i < COUNT; i++) words[i % WORDS] = (u32)__float_as_int(values[i]);
    } else if (COUNT == 1) {
      words[0] = TYPE == F16 ? f32_to_f16(values[0]) : f32_to_bf16(values[0]);
    } else {
      UNROLLED for (int i = 0; i < COUNT / 2; i++) {
        float first = values[2 * i % COUNT], second = values[(2 * i + 1) % COUNT];
        words[i] = TYPE == F16 ? f32_pair_to_f16(first, second) : f32_pair_to_bf16(first, second);
      }
    }
  }
};

// The values after they are stored and loaded again.
template <int TYPE, int N>
static __device__ __forceinline__ void round_to(float (&values)[N]) {
  Pack<TYPE, N> stored;
  stored.fill(values);
  stored.read(values);
}

// The address of the vector `ahead` steps of all threads after vector `first`.
template <int TYPE, int N>
static __device__ __forceinline__ u8* in_order(u64 address, u64 first, int ahead) {
  const int bytes = N * Item<TYPE>::BYTES;
  return reinterpret_cast<u8*>(address) + first * bytes + ahead * (THREADS * bytes);
}

// The offsets of a vector's elements in the walked operands.
template <int N, typename Parameters>
struct Places {
  enum { WALKS = Parameters::WALKS, AXES = Parameters::AXES };
  i64 offsets[WALKS ? WALKS : 1];

  __device__ __forceinline__ void find(const Parameters& p, u32 vector) {
    UNROLLED for (int w = 0; w < WALKS; w++) offsets[w] = 0;
    UNROLLED for (int axis = AXES - 1; axis >= 0; axis--) {
      u32 above = axis ? divided(vector, p.divisors[axis]) : 0;
      u32 at = axis ? vector - above * p.divisors[axis].size : vector;
      if (axis == AXES - 1) at *= N;
      UNROLLED for (int w = 0; w < WALKS; w++) offsets[w] += (i64)at * p.strides[w][axis];
      vector = above;
    }
  }
};

static __device__ __forceinline__ u8* walked(u64 address, i64 offset) {
  return reinterpret_cast<u8*>(address) + offset;
}

template <int TYPE, int N>
static __device__ __forceinline__ void load_apart(const u8* place, i64 stride, float (&values)[N]) {
  EACH values[i] = load(place + i * stride, TYPE);
}

template <int TYPE, int N>
static __device__ __forceinline__ void store_apart(u8* place, i64 stride, const float (&values)[N]) {
  EACH store(place + i * stride, TYPE, values[i]);
}

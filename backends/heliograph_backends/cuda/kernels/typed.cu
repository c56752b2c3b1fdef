// Elementwise operations between types: choices, comparisons, conversions, and those of whole
// numbers; and of floats those that chains seldom have, since each takes registers from all others
// of the interpreter. One operation at a time.

// The numbers of `typed.py`. Floats have those of `Type`.
enum Number { N_I8 = 3, N_U8, N_BOOL, N_I16, N_U16, N_I32, N_U32, N_I64, N_U64, N_OTHER };

enum Typed {
  T_WHERE, T_CAST, T_EQUAL, T_NOT_EQUAL, T_LESS, T_LESS_EQUAL, T_GREATER, T_GREATER_EQUAL, T_LOGICAL_AND,
  T_LOGICAL_OR, T_LOGICAL_XOR, T_LOGICAL_NOT, T_ISNAN, T_ISINF, T_ISFINITE, T_SIGNBIT, T_ADD, T_SUB, T_MUL,
  T_MAXIMUM, T_MINIMUM, T_NEG, T_ABS, T_SGN, T_SQR, T_BITWISE_AND, T_BITWISE_OR, T_BITWISE_XOR,
  T_BITWISE_INVERT, T_POW, T_ATAN2, T_HYPOT, T_COPYSIGN, T_ACOS, T_ACOSH, T_ASIN, T_ASINH, T_ATAN, T_ATANH
};

#define MOST_TYPED 4  // the result, and up to three operands

struct TypedParameters {
  Divisor divisors[MOST_DIMENSIONS];
  i64 strides[MOST_TYPED][MOST_DIMENSIONS];
  u64 addresses[MOST_TYPED];
  u32 count;
  int dimensions;
  int operation;
  int operands;  // with the result
  int result_type;
  int type;  // of the operands
  int item_bytes;
  int reserved;
};

static __device__ __forceinline__ i64 whole_at(const u8* place, int type) {
  switch (type) {
    case N_I8: return *reinterpret_cast<const i8*>(place);
    case N_U8:
    case N_BOOL: return *place;
    case N_I16: return *reinterpret_cast<const short*>(place);
    case N_U16: return *reinterpret_cast<const u16*>(place);
    case N_I32: return *reinterpret_cast<const int*>(place);
    case N_U32: return *reinterpret_cast<const u32*>(place);
    default: return *reinterpret_cast<const i64*>(place);
  }
}

static __device__ __forceinline__ void put_whole(u8* place, int type, i64 value) {
  switch (type) {
    case N_I8:
    case N_U8:
    case N_BOOL: *place = (u8)value; break;
    case N_I16:
    case N_U16: *reinterpret_cast<u16*>(place) = (u16)value; break;
    case N_I32:
    case N_U32: *reinterpret_cast<u32*>(place) = (u32)value; break;
    default: *reinterpret_cast<i64*>(place) = value;
  }
}

static __device__ __forceinline__ float computed(int operation, float a, float b) {
  switch (operation) {
    case T_POW: return powf(a, b);
    case T_ATAN2: return atan2f(a, b);
    case T_HYPOT: return hypotf(a, b);
    case T_COPYSIGN: return copysignf(a, b);
    case T_ACOS: return acosf(a);
    case T_ACOSH: return acoshf(a);
    case T_ASIN: return asinf(a);
    case T_ASINH: return asinhf(a);
    case T_ATAN: return atanf(a);
    default: return atanhf(a);
  }
}

template <typename T>
static __device__ __forceinline__ bool compared(int operation, T a, T b) {
  switch (operation) {
    case T_EQUAL: return a == b;
    case T_NOT_EQUAL: return a != b;
    case T_LESS: return a < b;
    case T_LESS_EQUAL: return a <= b;
    case T_GREATER: return a > b;
    default: return a >= b;
  }
}

// Of a float alone: its bits tell, so that numbers that count as 0 keep their sign.
static __device__ __forceinline__ bool asked(int operation, float value) {
  u32 bits = (u32)__float_as_int(value), size = bits & 0x7fffffffu;
  switch (operation) {
    case T_ISNAN: return size > 0x7f800000u;
    case T_ISINF: return size == 0x7f800000u;
    case T_ISFINITE: return size < 0x7f800000u;
    default: return bits >> 31;
  }
}

// Without signs, so that sums and products wrap around.
static __device__ __forceinline__ u64 computed(int operation, int type, u64 a, u64 b) {
  // The order of numbers without a sign is that of these with one.
  u64 turned = type == N_U64 ? 1ull << 63 : 0ull;
  bool less = (i64)(a ^ turned) < (i64)(b ^ turned), negative = type != N_U64 && (i64)a < 0;
  switch (operation) {
    case T_ADD: return a + b;
    case T_SUB: return a - b;
    case T_MUL: return a * b;
    case T_MAXIMUM: return less ? b : a;
    case T_MINIMUM: return less ? a : b;
    case T_NEG: return 0ull - a;
    case T_ABS: return negative ? 0ull - a : a;
    case T_SGN: return negative ? ~0ull : a != 0;
    case T_SQR: return a * a;
    case T_BITWISE_AND: return a & b;
    case T_BITWISE_OR: return a | b;
    case T_BITWISE_XOR: return a ^ b;
    default: return ~a;
  }
}

static __device__ __forceinline__ void convert(const TypedParameters& p, u8* to, const u8* from) {
  bool is_float = p.type <= BF16;
  float value = is_float ? load(from, p.type) : 0.0f;
  i64 number = is_float ? 0 : whole_at(from, p.type);
  if (p.result_type <= BF16) {
    float made = is_float ? value : p.type == N_U64 ? (float)(u64)number : (float)number;
    store(to, p.result_type, made);
  } else if (p.result_type == N_BOOL) {
    // Numbers that count as 0 are not 0.
    *to = is_float ? ((u32)__float_as_int(value) & 0x7fffffffu) != 0 : number != 0;
  } else {
    put_whole(to, p.result_type, !is_float ? number : p.result_type == N_U64 && value > 0 ? (i64)(u64)value : (i64)value);
  }
}

template <typename Item>
static __device__ __forceinline__ void choose(u8* to, const u8* from) {
  *reinterpret_cast<Item*>(to) = *reinterpret_cast<const Item*>(from);
}

static __device__ __forceinline__ void compute_typed(
    const TypedParameters& p, u8* to, const u8* a, const u8* b, const u8* c) {
  switch (p.operation) {
    case T_WHERE: {
      const u8* from = *a ? b : c;
      switch (p.item_bytes) {
        case 1: choose<u8>(to, from); break;
        case 2: choose<u16>(to, from); break;
        case 4: choose<u32>(to, from); break;
        default: choose<u64>(to, from);
      }
      break;
    }
    case T_CAST: convert(p, to, a); break;
    case T_LOGICAL_AND: *to = *a && *b; break;
    case T_LOGICAL_OR: *to = *a || *b; break;
    case T_LOGICAL_XOR: *to = !*a != !*b; break;
    case T_LOGICAL_NOT: *to = !*a; break;
    case T_ISNAN:
    case T_ISINF:
    case T_ISFINITE:
    case T_SIGNBIT: *to = asked(p.operation, load(a, p.type)); break;
    default:
      if (p.operation <= T_GREATER_EQUAL) {
        if (p.type <= BF16) {
          *to = compared(p.operation, load(a, p.type), load(b, p.type));
        } else {
          u64 turned = p.type == N_U64 ? 1ull << 63 : 0ull;
          i64 left = (i64)((u64)whole_at(a, p.type) ^ turned), right = (i64)((u64)whole_at(b, p.type) ^ turned);
          *to = compared(p.operation, left, right);
        }
      } else if (p.operation >= T_POW) {
        float right = p.operands > 2 ? load(b, p.type) : 0.0f;
        store(to, p.type, computed(p.operation, load(a, p.type), right));
      } else {
        u64 left = (u64)whole_at(a, p.type), right = p.operands > 2 ? (u64)whole_at(b, p.type) : 0ull;
        put_whole(to, p.type, (i64)computed(p.operation, p.type, left, right));
      }
  }
}

KERNEL(typed, TypedParameters, 256) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += step) {
    u8* places[MOST_TYPED];
#pragma unroll
    for (int i = 0; i < MOST_TYPED; i++) places[i] = reinterpret_cast<u8*>(p.addresses[i]);
    u32 number = (u32)index;
#pragma unroll
    for (int axis = MOST_DIMENSIONS - 1; axis >= 0; axis--) {
      if (axis >= p.dimensions) continue;
      u32 above = axis ? divided(number, p.divisors[axis]) : 0;
      u32 at = axis ? number - above * p.divisors[axis].size : number;
#pragma unroll
      for (int i = 0; i < MOST_TYPED; i++) places[i] += at * p.strides[i][axis];
      number = above;
    }
    compute_typed(p, places[0], places[1], places[2], places[3]);
  }
}

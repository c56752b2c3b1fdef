// Elements that change places: padded, rolled and resampled.

enum Outside { ZERO = 0, AROUND = 1, MIRRORED = 2 };

struct PlaceParameters {
  Divisor sizes[MOST_DIMENSIONS];  // of the result
  i64 from_strides[MOST_DIMENSIONS];
  i64 to_strides[MOST_DIMENSIONS];
  u64 from;
  u64 to;
  int left[MOST_DIMENSIONS];  // the result's place of element 0
  int have[MOST_DIMENSIONS];  // elements of the source
  u32 count;
  int dimensions;
  int item_bytes;
  int outside;
};

// Each element from the source, whose places outside are 0, count around, or are mirrored.
template <typename Item>
static __device__ __forceinline__ void place_items(const PlaceParameters& p) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += step) {
    const u8* from = reinterpret_cast<const u8*>(p.from);
    u8* to = reinterpret_cast<u8*>(p.to);
    u32 number = (u32)index;
    bool inside = true;
#pragma unroll 1
    for (int axis = p.dimensions - 1; axis >= 0; axis--) {
      u32 above = divided(number, p.sizes[axis]);
      int place = (int)(number - above * p.sizes[axis].size), have = p.have[axis];
      to += place * p.to_strides[axis], number = above;
      place -= p.left[axis];
      if (p.outside == AROUND) place %= have, place += place < 0 ? have : 0;
      if (p.outside == MIRRORED) place = place < 0 ? -place : place, place = place < have ? place : 2 * have - 2 - place;
      inside = inside && (u32)place < (u32)have;
      from += place * p.from_strides[axis];
    }
    *reinterpret_cast<Item*>(to) = inside ? *reinterpret_cast<const Item*>(from) : (Item)0;
  }
}

KERNEL(place_elements, PlaceParameters, 256) {
  switch (p.item_bytes) {
    case 1: place_items<u8>(p); break;
    case 2: place_items<u16>(p); break;
    case 4: place_items<u32>(p); break;
    default: place_items<u64>(p);
  }
}

enum Resampling { NEAREST = 0, LINEAR = 1, CUBIC = 2, TRIANGLES = 3 };

struct UpscaleParameters {
  Divisor sizes[MOST_DIMENSIONS];  // of the result; the last two are the plane's
  i64 x_strides[MOST_DIMENSIONS];
  i64 result_strides[MOST_DIMENSIONS];
  u64 x;
  u64 result;
  double scale[2];    // old places for a new one
  double support[2];  // old places on each side that triangles cover
  double offset;      // of an element's middle: 0 if corners are aligned
  int have[MOST_DIMENSIONS];
  int corners[2];     // the nearest element with aligned corners
  u32 count;
  int dimensions;
  int mode;
  int type;
};

// Places have the definition's bits, since a floor depends on them: nothing is contracted.
static __device__ __forceinline__ double position(const UpscaleParameters& p, int axis, int at) {
  return __dadd_rn(__dmul_rn(__dadd_rn((double)at, p.offset), p.scale[axis]), -p.offset);
}

static __device__ __forceinline__ double between(double value, double low, double high) {
  return value < low ? low : value > high ? high : value;
}

// Tap `number` of a place: the element and its weight. Keys, "Cubic convolution interpolation for
// digital image processing", 1981, with a = -0.75.
static __device__ __forceinline__ double tap_of(const UpscaleParameters& p, double at, int have, int number, int& place) {
  double before = floor(at), last = (double)(have - 1);
  if (p.mode == LINEAR) {
    double first = between(before, 0.0, last), part = between(at - first, 0.0, 1.0);
    place = (int)between(before + number, 0.0, last);
    return number ? part : 1.0 - part;
  }
  double a = -0.75, away = fabs(at - before - (number - 1));
  place = (int)between(before + (number - 1), 0.0, last);
  if (number == 1 || number == 2) return ((a + 2) * away - (a + 3)) * away * away + 1;
  return ((a * away - 5 * a) * away + 8 * a) * away - 4 * a;
}

// The elements that a triangle covers, and the sum of their weights.
struct Covered {
  int first, end;
  double middle, total;
};

static __device__ __forceinline__ double triangle(const Covered& covered, double offset, double support, int place) {
  double weight = 1.0 - fabs(place - covered.middle + offset) / support;
  return weight > 0.0 ? weight : 0.0;
}

static __device__ __forceinline__ Covered covered_by(const UpscaleParameters& p, int axis, int at, int have) {
  Covered found;
  found.middle = position(p, axis, at) + p.offset, found.total = 0.0;
  double first = found.middle - p.support[axis] + p.offset, end = found.middle + p.support[axis] + p.offset;
  found.first = (int)(first > 0.0 ? first : 0.0), found.end = (int)(end < have ? end : (double)have);
  for (int place = found.first; place < found.end; place++)
    found.total += triangle(found, p.offset, p.support[axis], place);
  return found;
}

KERNEL(upscale, UpscaleParameters, 256) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += step) {
    const u8* x = reinterpret_cast<const u8*>(p.x);
    u8* result = reinterpret_cast<u8*>(p.result);
    u32 number = (u32)index;
    int at[2], plane = p.dimensions - 2;
#pragma unroll 1
    for (int axis = p.dimensions - 1; axis >= 0; axis--) {
      u32 size = p.sizes[axis].size, above = divided(number, p.sizes[axis]), place = number - above * size;
      result += place * p.result_strides[axis], number = above;
      if (axis >= plane) at[axis - plane] = (int)place;
      if (axis >= plane && p.mode != NEAREST) continue;
      bool corners = axis >= plane && p.corners[axis - plane];
      u32 have = (u32)p.have[axis];
      u64 nearest = corners ? (u64)place * (have - 1) / (size - 1) : have == size ? place : (u64)place * have / size;
      x += nearest * p.x_strides[axis];
    }
    int height = p.have[plane], width = p.have[plane + 1];
    i64 down = p.x_strides[plane], across = p.x_strides[plane + 1];
    float sum = 0.0f;
    if (p.mode == NEAREST) {
      sum = load(x, p.type);
    } else if (p.mode == TRIANGLES) {
      Covered rows = covered_by(p, 0, at[0], height), columns = covered_by(p, 1, at[1], width);
      for (int j = columns.first; j < columns.end; j++) {
        float column = 0.0f;
        for (int i = rows.first; i < rows.end; i++) {
          float weight = (float)(triangle(rows, p.offset, p.support[0], i) / rows.total);
          column = __fadd_rn(column, __fmul_rn(load(x + i * down + j * across, p.type), weight));
        }
        float weight = (float)(triangle(columns, p.offset, p.support[1], j) / columns.total);
        sum = __fadd_rn(sum, __fmul_rn(column, weight));
      }
    } else {
      int taps = p.mode == LINEAR ? 2 : 4, row, column;
      double y = position(p, 0, at[0]), z = position(p, 1, at[1]);
      for (int i = 0; i < taps; i++) {
        double weight = tap_of(p, y, height, i, row);
        for (int j = 0; j < taps; j++) {
          float both = (float)(weight * tap_of(p, z, width, j, column));
          sum = __fadd_rn(sum, __fmul_rn(load(x + row * down + column * across, p.type), both));
        }
      }
    }
    store(result, p.type, sum);
  }
}

struct TriangleParameters {
  Divisor sizes[MOST_DIMENSIONS];  // the last two are rows and columns
  i64 from_strides[MOST_DIMENSIONS];
  i64 to_strides[MOST_DIMENSIONS];
  u64 from;
  u64 to;
  i64 offset;   // of the diagonal, to the right
  u64 outside;  // the bits of what is not kept
  u32 count;
  int dimensions;
  int item_bytes;
  int keeps_beyond;  // what is after the diagonal; else what is not
};

template <typename Item>
static __device__ __forceinline__ void keep_triangle(const TriangleParameters& p) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += step) {
    const u8* from = reinterpret_cast<const u8*>(p.from);
    u8* to = reinterpret_cast<u8*>(p.to);
    u32 number = (u32)index;
    i64 beyond = -p.offset;  // columns after the diagonal's
#pragma unroll 1
    for (int axis = p.dimensions - 1; axis >= 0; axis--) {
      u32 above = divided(number, p.sizes[axis]), at = number - above * p.sizes[axis].size;
      from += at * p.from_strides[axis], to += at * p.to_strides[axis], number = above;
      if (axis == p.dimensions - 1) beyond += at;
      if (axis == p.dimensions - 2) beyond -= at;
    }
    bool kept = (beyond > 0) == (p.keeps_beyond != 0);
    *reinterpret_cast<Item*>(to) = kept ? *reinterpret_cast<const Item*>(from) : (Item)p.outside;
  }
}

KERNEL(triangle, TriangleParameters, 256) {
  switch (p.item_bytes) {
    case 1: keep_triangle<u8>(p); break;
    case 2: keep_triangle<u16>(p); break;
    case 4: keep_triangle<u32>(p); break;
    default: keep_triangle<u64>(p);
  }
}

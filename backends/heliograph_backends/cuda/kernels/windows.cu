// Windows without products: pools and their gradients, windows as rows and the sums of such rows.
// Each thread, or warp, has results of its own and adds in the definition's order, so gradients are
// gathered: no two threads write the same place.

// Dimensions before those of the windows, for up to three operands.
struct Planes {
  Divisor divisors[MOST_DIMENSIONS];
  i64 strides[3][MOST_DIMENSIONS];
  int dimensions;
  int reserved;
};

static __device__ __forceinline__ const u8* plane_of(const Planes& planes, int operand, u64 address, u32 number) {
  const u8* found = reinterpret_cast<const u8*>(address);
#pragma unroll 1
  for (int axis = planes.dimensions - 1; axis >= 0; axis--) {
    u32 above = divided(number, planes.divisors[axis]);
    found += (number - above * planes.divisors[axis].size) * planes.strides[operand][axis];
    number = above;
  }
  return found;
}

struct PoolParameters {
  Planes planes;  // of x, the result and the gradient
  u64 x;
  u64 result;
  u64 gradient;  // of the windows
  i64 x_strides[2];
  i64 result_strides[2];
  i64 gradient_strides[2];
  Divisor results_along[2];
  int sizes[2];    // of x
  int windows[2];  // of the gradient
  int kernel[2];
  int step[2];
  int padding[2];
  int x_type;
  int gradient_type;
  int is_mean;
  int leaves_padding_out;  // of the mean's count
  int lanes;               // threads of a window: 1 or 32
  int reserved;
  u32 results;
  float area;
};

#define LOWEST -3.402823466e38f

struct Window {
  int first[2], end[2];  // inside of x

  __device__ __forceinline__ int count() const { return (end[0] - first[0]) * (end[1] - first[1]); }
};

static __device__ __forceinline__ Window window_of(const PoolParameters& p, int axis_0, int axis_1) {
  Window found;
  int at[2] = {axis_0, axis_1};
#pragma unroll
  for (int axis = 0; axis < 2; axis++) {
    int start = at[axis] * p.step[axis] - p.padding[axis], end = start + p.kernel[axis];
    found.first[axis] = start > 0 ? start : 0;
    found.end[axis] = end < p.sizes[axis] ? end : p.sizes[axis];
    // A window in the padding has no elements.
    if (found.end[axis] < found.first[axis]) found.end[axis] = found.first[axis];
  }
  return found;
}

// The largest element of windows, or their mean. Padding counts as the lowest number, or as 0.
KERNEL(pool, PoolParameters, 256) {
  int lane = p.lanes == 1 ? 0 : threadIdx.x % 32;
  u64 step = (u64)gridDim.x * (256 / p.lanes);
  for (u64 index = (u64)blockIdx.x * (256 / p.lanes) + threadIdx.x / p.lanes; index < p.results; index += step) {
    u32 line = divided((u32)index, p.results_along[1]), x = (u32)index - line * p.results_along[1].size;
    u32 plane = divided(line, p.results_along[0]), y = line - plane * p.results_along[0].size;
    const u8* from = plane_of(p.planes, 0, p.x, plane);
    Window window = window_of(p, (int)y, (int)x);
    float found = p.is_mean ? 0.0f : -INFINITE;
    for (int i = window.first[0]; i < window.end[0]; i++)
      for (int j = window.first[1] + lane; j < window.end[1]; j += p.lanes) {
        float value = load(from + i * p.x_strides[0] + j * p.x_strides[1], p.x_type);
        found = p.is_mean ? found + value : larger(found, value);
      }
    if (p.lanes > 1) found = p.is_mean ? warp_sum(found) : warp_larger(found);
    if (p.is_mean) {
      int counted = window.count();
      found /= !p.leaves_padding_out ? p.area : counted > 1 ? (float)counted : 1.0f;
    } else {
      int most = min(p.kernel[0], p.sizes[0]) * min(p.kernel[1], p.sizes[1]);
      if (window.count() < most) found = larger(found, LOWEST);
    }
    u8* to = const_cast<u8*>(plane_of(p.planes, 1, p.result, plane));
    if (lane == 0) *reinterpret_cast<float*>(to + y * p.result_strides[0] + x * p.result_strides[1]) = found;
  }
}

// True if an element is a window's largest: the first of equal ones, and of those that are no
// numbers.
static __device__ __forceinline__ bool is_first_largest(
    const PoolParameters& p, const u8* from, const Window& window, int y, int x, float value) {
  for (int i = window.first[0]; i < window.end[0]; i++)
    for (int j = window.first[1]; j < window.end[1]; j++) {
      float other = load(from + i * p.x_strides[0] + j * p.x_strides[1], p.x_type);
      bool before = i < y || (i == y && j < x);
      if (other != other ? before || value == value : before ? other >= value : other > value) return false;
    }
  return true;
}

// The gradient of x: each element adds those of the windows that it is in, in their order.
KERNEL(pool_back, PoolParameters, 256) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.results; index += step) {
    u32 line = divided((u32)index, p.results_along[1]), plane = divided(line, p.results_along[0]);
    int at[2] = {(int)(line - plane * p.results_along[0].size), (int)((u32)index - line * p.results_along[1].size)};
    const u8* from = plane_of(p.planes, 0, p.x, plane);
    const u8* given = plane_of(p.planes, 2, p.gradient, plane);
    float value = load(from + at[0] * p.x_strides[0] + at[1] * p.x_strides[1], p.x_type), sum = 0.0f;
    int first[2], end[2];
#pragma unroll
    for (int axis = 0; axis < 2; axis++) {
      int reach = at[axis] + p.padding[axis];
      first[axis] = reach < p.kernel[axis] ? 0 : (reach - p.kernel[axis]) / p.step[axis] + 1;
      end[axis] = min(p.windows[axis], reach / p.step[axis] + 1);
    }
    for (int i = first[0]; i < end[0]; i++)
      for (int j = first[1]; j < end[1]; j++) {
        float gradient = load(given + i * p.gradient_strides[0] + j * p.gradient_strides[1], p.gradient_type);
        if (p.is_mean)
          sum = __fadd_rn(sum, gradient / p.area);
        else if (is_first_largest(p, from, window_of(p, i, j), at[0], at[1], value))
          sum = __fadd_rn(sum, gradient);
      }
    u8* to = const_cast<u8*>(plane_of(p.planes, 1, p.result, plane));
    *reinterpret_cast<float*>(to + at[0] * p.result_strides[0] + at[1] * p.result_strides[1]) = sum;
  }
}

struct ColumnsParameters {
  u64 from;
  u64 to;          // without gaps
  i64 strides[5];  // of what is read: data [image, channel, places], or rows [image, windows, element]
  Divisor taps[3];
  Divisor windows[3];
  Divisor places[3];  // of the data
  Divisor channels;
  int step[3];
  int padding[3];
  int spread[3];
  int from_type;
  int to_type;
  u32 count;
};

// Windows as rows: [image, windows, channel, taps] of data [image, channel, places].
KERNEL(columns, ColumnsParameters, 256) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += step) {
    u32 number = (u32)index;
    int at[3];
#pragma unroll
    for (int axis = 2; axis >= 0; axis--) {
      u32 above = divided(number, p.taps[axis]);
      at[axis] = (int)(number - above * p.taps[axis].size) * p.spread[axis] - p.padding[axis], number = above;
    }
    u32 rest = divided(number, p.channels);
    i64 offset = (number - rest * p.channels.size) * p.strides[1];
    bool inside = true;
#pragma unroll
    for (int axis = 2; axis >= 0; axis--) {
      u32 above = divided(rest, p.windows[axis]);
      at[axis] += (int)(rest - above * p.windows[axis].size) * p.step[axis], rest = above;
      inside = inside && (u32)at[axis] < p.places[axis].size;
      offset += at[axis] * p.strides[2 + axis];
    }
    offset += rest * p.strides[0];
    float value = inside ? load(reinterpret_cast<const u8*>(p.from) + offset, p.from_type) : 0.0f;
    store(reinterpret_cast<u8*>(p.to) + (u64)index * size_of(p.to_type), p.to_type, value);
  }
}

// The sums of such rows where they overlap: data [image, channel, places]. An element is in one
// window at most for each tap.
KERNEL(columns_back, ColumnsParameters, 256) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.count; index += step) {
    u32 number = (u32)index;
    int at[3];
#pragma unroll
    for (int axis = 2; axis >= 0; axis--) {
      u32 above = divided(number, p.places[axis]);
      at[axis] = (int)(number - above * p.places[axis].size) + p.padding[axis], number = above;
    }
    u32 image = divided(number, p.channels), element = number - image * p.channels.size;
    element *= p.taps[0].size * p.taps[1].size * p.taps[2].size;
    const u8* from = reinterpret_cast<const u8*>(p.from) + image * p.strides[0];
    float sum = 0.0f;
    for (int i = 0; i < (int)p.taps[0].size; i++)
      for (int j = 0; j < (int)p.taps[1].size; j++)
        for (int k = 0; k < (int)p.taps[2].size; k++, element++) {
          int tap[3] = {i, j, k};
          i64 offset = element * p.strides[4];
          bool inside = true;
#pragma unroll
          for (int axis = 0; axis < 3; axis++) {
            int start = at[axis] - tap[axis] * p.spread[axis], window = start / p.step[axis];
            inside = inside && start >= 0 && window * p.step[axis] == start && window < (int)p.windows[axis].size;
            offset += window * p.strides[1 + axis];
          }
          if (inside) sum = __fadd_rn(sum, load(from + offset, p.from_type));
        }
    store(reinterpret_cast<u8*>(p.to) + (u64)index * size_of(p.to_type), p.to_type, sum);
  }
}

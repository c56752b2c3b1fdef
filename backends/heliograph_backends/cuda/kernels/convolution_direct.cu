// Convolutions of few channels in a group, such as those of each channel by itself: a thread has
// results of its own, and reads what neighbours read too from the first-level cache.

// One result, tap by tap.
KERNEL(convolution_direct, ConvolutionParameters, 256) {
  u64 step = (u64)gridDim.x * 256;
  for (u64 index = (u64)blockIdx.x * 256 + threadIdx.x; index < p.results; index += step) {
    Column column = column_of(p, (u32)index);
    u32 image = divided(column.image, p.channels), channel = column.image - image * p.channels.size;
    column.image = image;
    const u8* kernel = in_memory(p.kernel) + channel * p.kernel_strides[0];
    const u8* data = in_memory(p.data) + image * p.data_strides[0];
    data += (i64)(channel / (u32)p.rows) * p.data_channels * p.data_strides[1];
    int start[3];
#pragma unroll
    for (int axis = 0; axis < 3; axis++) start[axis] = column.at[axis] * p.step[axis] - p.padding[axis];
    float sum = 0.0f;
    for (int c = 0; c < p.data_channels; c++)
      for (u32 i = 0; i < p.taps[0].size; i++)
        for (u32 j = 0; j < p.taps[1].size; j++) {
          int z = start[0] + (int)i * p.spread[0], y = start[1] + (int)j * p.spread[1];
          if ((u32)z >= (u32)p.sizes[0] || (u32)y >= (u32)p.sizes[1]) continue;
          const u8* from = data + c * p.data_strides[1] + z * p.data_strides[2] + y * p.data_strides[3];
          const u8* by = kernel + c * p.kernel_strides[1] + i * p.kernel_strides[2] + j * p.kernel_strides[3];
          for (u32 k = 0; k < p.taps[2].size; k++) {
            int x = start[2] + (int)k * p.spread[2];
            if ((u32)x < (u32)p.sizes[2])
              sum = fmaf(
                  load(by + k * p.kernel_strides[4], p.kernel_type), load(from + x * p.data_strides[4], p.data_type),
                  sum);
          }
        }
    finish(p, column, channel, sum);
  }
}

// Four results below each other, of a window of its own channel: each place of the data that they
// have in common is read once.
#define RESULTS_BELOW 4

template <int TAPS, int STEP>
static __device__ __forceinline__ void convolve_below(const ConvolutionParameters& p) {
  // Places across are one dimension of the index, groups of results below each other another.
  u32 across = p.outputs[2].size, below = (p.outputs[1].size + RESULTS_BELOW - 1) / RESULTS_BELOW;
  u32 plane = across * below;
  for (u32 both = blockIdx.y; both < p.images * p.channels.size; both += gridDim.y) {
    u32 image = divided(both, p.channels), channel = both - image * p.channels.size;
    const u8* kernel = in_memory(p.kernel) + channel * p.kernel_strides[0];
    const u8* data = in_memory(p.data) + image * p.data_strides[0];
    data += (i64)(channel / (u32)p.rows) * p.data_strides[1];
    float weights[TAPS][TAPS];
#pragma unroll
    for (int j = 0; j < TAPS; j++)
#pragma unroll
      for (int k = 0; k < TAPS; k++)
        weights[j][k] = load(kernel + j * p.kernel_strides[3] + k * p.kernel_strides[4], p.kernel_type);
    for (u32 index = blockIdx.x * 256 + threadIdx.x; index < plane; index += gridDim.x * 256) {
      u32 part = divided(index, p.outputs[2]);
      Column column = {image, {0, (int)part * RESULTS_BELOW, (int)(index - part * across)}};
      int y = column.at[1] * STEP - p.padding[1], x = column.at[2] * STEP - p.padding[2];
      float sums[RESULTS_BELOW] = {};
#pragma unroll
      for (int line = 0; line < (RESULTS_BELOW - 1) * STEP + TAPS; line++) {
        if ((u32)(y + line) >= (u32)p.sizes[1]) continue;
        const u8* from = data + (y + line) * p.data_strides[3];
#pragma unroll
        for (int k = 0; k < TAPS; k++) {
          if ((u32)(x + k) >= (u32)p.sizes[2]) continue;
          float value = load(from + (x + k) * p.data_strides[4], p.data_type);
#pragma unroll
          for (int i = 0; i < RESULTS_BELOW; i++)
            if (line - i * STEP >= 0 && line - i * STEP < TAPS)
              sums[i] = fmaf(weights[(line - i * STEP) % TAPS][k], value, sums[i]);
        }
      }
      int first = column.at[1];
#pragma unroll
      for (int i = 0; i < RESULTS_BELOW; i++) {
        column.at[1] = first + i;
        if (column.at[1] < (int)p.outputs[1].size) finish(p, column, channel, sums[i]);
      }
    }
  }
}

#define CONVOLUTION_BELOW(taps, step) \
  KERNEL(convolution_below_##taps##_##step, ConvolutionParameters, 256) { convolve_below<taps, step>(p); }
CONVOLUTION_BELOW(3, 1)
CONVOLUTION_BELOW(3, 2)
CONVOLUTION_BELOW(5, 1)
CONVOLUTION_BELOW(5, 2)

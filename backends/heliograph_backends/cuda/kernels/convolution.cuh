// Shared by convolutions: where results and windows lie, and what ends a result.
//
// Data is [image, channel, 3 places], the kernel [channel of the result, channel of the data, 3
// taps]; fewer dimensions have sizes of 1 in front. Result i of a dimension reads place i step -
// padding + tap spread for each tap, and 0 outside of the data. A transposed convolution is such
// convolutions beside each other, one for each place modulo the stride, whose taps go backwards: see
// `convolution.py`.

enum Activation { NO_ACTIVATION = 0, RELU = 1, CLAMP = 2 };

struct ConvolutionParameters {
  u64 kernel;
  u64 data;
  u64 result;
  u64 partial;  // the parts of sums, [split, result]
  u64 bias;
  u64 addend;
  i64 kernel_strides[5];  // bytes, as all strides
  i64 data_strides[5];
  i64 result_strides[5];
  i64 addend_strides[5];
  i64 bias_stride;
  Divisor outputs[3];  // results along each dimension
  Divisor taps[3];
  Divisor channels;      // of the result
  Divisor row_tiles;     // tiles of the channels of a group
  int sizes[3];          // of the data
  int step[3];
  int padding[3];
  int spread[3];
  int rows;              // channels of the result of a group
  int data_channels;     // channels of the data of a group
  int depth;             // those times the taps
  int splits;            // of the sum over the depth
  int steps_of_split;    // tiles of a split's depth
  int kernel_type;
  int data_type;
  int packed;            // a channel's part of the kernel lies without gaps
  int has_bias;
  int has_addend;
  int activation;
  float low;
  float high;
  u32 columns;           // images times results of a channel
  u32 results;           // all
  u32 images;
};

// A result: its image and its place in each dimension.
struct Column {
  u32 image;
  int at[3];
};

static __device__ __forceinline__ Column column_of(const ConvolutionParameters& p, u32 number) {
  Column found;
#pragma unroll
  for (int axis = 2; axis >= 0; axis--) {
    u32 above = divided(number, p.outputs[axis]);
    found.at[axis] = (int)(number - above * p.outputs[axis].size), number = above;
  }
  found.image = number;
  return found;
}

static __device__ __forceinline__ i64 offset_of(const i64 (&strides)[5], const Column& column, u32 channel) {
  return column.image * strides[0] + channel * strides[1] + column.at[0] * strides[2] + column.at[1] * strides[3] +
         column.at[2] * strides[4];
}

// Rounded after each operation, as the ops by themselves are.
static __device__ __forceinline__ void finish(
    const ConvolutionParameters& p, const Column& column, u32 channel, float value) {
  if (p.has_bias)
    value = __fadd_rn(value, *reinterpret_cast<const float*>(in_memory(p.bias) + channel * p.bias_stride));
  if (p.has_addend)
    value = __fadd_rn(
        value, *reinterpret_cast<const float*>(in_memory(p.addend) + offset_of(p.addend_strides, column, channel)));
  if (p.activation == RELU) value = larger(value, 0.0f);
  if (p.activation == CLAMP) value = smaller(larger(value, p.low), p.high);
  *reinterpret_cast<float*>(in_memory(p.result) + offset_of(p.result_strides, column, channel)) = value;
}

// Attention of heads whose rows are not whole chunks of 16 bytes, and what adds up parts of the others.

#define FEW_WARPS 4
#define MOST_D 256

// A block has one line, and its warps share the keys.
KERNEL(attention_few, AttentionParameters, FEW_WARPS * 32) {
  __shared__ float tops[FEW_WARPS], totals[FEW_WARPS], sums[FEW_WARPS][MOST_D];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, row = blockIdx.x;
  u32 head = blockIdx.y, batch = blockIdx.z, shared_head = head / (u32)p.head_repeat;
  const u8 *q_row = query_at(p, batch, head, row), *mask = p.has_mask ? mask_at(p, batch, head, row) : nullptr;
  const u8 *keys = keys_at(p, batch, shared_head), *values = values_at(p, batch, shared_head);
  float slope = slope_of(p, head) * LOG2_E, sink = sink_of(p, head) * LOG2_E;
  float q[MOST_D / 32], sum[MOST_D / 32], top = -INFINITE, total = 0.0f;
#pragma unroll
  for (int i = 0; i < MOST_D / 32; i++) {
    int column = lane + 32 * i;
    q[i] = column < p.d ? load(q_row + column * size_of(p.q_type), p.q_type) : 0.0f;
    sum[i] = 0.0f;
  }
  for (int key = warp; key < p.keys; key += FEW_WARPS) {
    const u8* k = keys + key * p.k_strides[2];
    const u8* v = values + key * p.v_strides[2];
    float product = 0.0f;
#pragma unroll
    for (int i = 0; i < MOST_D / 32; i++)
      if (lane + 32 * i < p.d) product += q[i] * load(k + (lane + 32 * i) * size_of(p.k_type), p.k_type);
    product = warp_sum(product);
    float score = p.cap != 0.0f ? fast_tanh(product * (p.scale / p.cap)) * (p.cap * LOG2_E)
                                : product * (p.scale * LOG2_E);
    if (p.has_mask) score += slope * load(mask + (i64)key * size_of(p.mask_type), p.mask_type);
    float higher = larger(top, score), shrink = power(top, higher), weight = power(score, higher);
    total = total * shrink + weight;
#pragma unroll
    for (int i = 0; i < MOST_D / 32; i++)
      if (lane + 32 * i < p.dv)
        sum[i] = sum[i] * shrink + weight * load(v + (lane + 32 * i) * size_of(p.v_type), p.v_type);
    top = higher;
  }
  if (lane == 0) tops[warp] = top, totals[warp] = total;
#pragma unroll
  for (int i = 0; i < MOST_D / 32; i++)
    if (lane + 32 * i < p.dv) sums[warp][lane + 32 * i] = sum[i];
  __syncthreads();
  float highest = sink, all = 0.0f;
  for (int w = 0; w < FEW_WARPS; w++) highest = larger(highest, tops[w]);
  for (int w = 0; w < FEW_WARPS; w++) all += totals[w] * power(tops[w], highest);
  if (p.has_sinks) all += power(sink, highest);
  u8* result = result_at(p, batch, head, row);
  for (int column = threadIdx.x; column < p.dv; column += FEW_WARPS * 32) {
    float found = 0.0f;
    for (int w = 0; w < FEW_WARPS; w++) found += sums[w][column] * power(tops[w], highest);
    store(result + column * size_of(p.result_type), p.result_type, found / (all == 0.0f ? 1.0f : all));
  }
}

#define MERGE_THREADS 128

// A block has one line; its parts are added up in their order.
KERNEL(attention_merge, AttentionParameters, MERGE_THREADS) {
  u32 line = blockIdx.x, row = line % (u32)p.rows, matrix = line / (u32)p.rows;
  u32 head = matrix % (u32)p.heads, batch = matrix / (u32)p.heads;
  i64 lines = gridDim.x;
  float sink = sink_of(p, head) * LOG2_E, highest = sink, all = 0.0f;
  for (int split = 0; split < p.splits; split++) highest = larger(highest, partial_at(p, split, lines, line)[p.dv]);
  for (int split = 0; split < p.splits; split++) {
    const float* part = partial_at(p, split, lines, line) + p.dv;
    all = fmaf(part[1], power(part[0], highest), all);
  }
  if (p.has_sinks) all += power(sink, highest);
  u8* result = result_at(p, batch, head, row);
  for (int column = threadIdx.x; column < p.dv; column += MERGE_THREADS) {
    float found = 0.0f;
    for (int split = 0; split < p.splits; split++) {
      const float* part = partial_at(p, split, lines, line);
      found = fmaf(part[column], power(part[p.dv], highest), found);
    }
    store(result + column * size_of(p.result_type), p.result_type, found / (all == 0.0f ? 1.0f : all));
  }
}

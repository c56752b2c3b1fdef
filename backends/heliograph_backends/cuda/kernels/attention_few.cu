// Attention of heads whose rows are not whole chunks of 16 bytes, and the merge of parts of the
// others.

#define FEW_WARPS 4
#define MOST_D 256

// A block has one line, and its warps share the keys.
KERNEL(attention_few, AttentionParameters, FEW_WARPS * 32) {
  __shared__ float tops[FEW_WARPS], totals[FEW_WARPS], sums[FEW_WARPS][MOST_D];
  check_pages<FEW_WARPS * 32>(p);
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
    const u8 *k = keys + key * p.k_strides[2], *v = values + key * p.v_strides[2];
    if (p.pages) {
      k = row_in_page(p, batch, keys, p.k_page_stride, p.k_strides[2], (u32)key);
      v = row_in_page(p, batch, values, p.v_page_stride, p.v_strides[2], (u32)key);
    }
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
#define MOST_SPLITS 64

// A block has one line; its parts are added in order.
KERNEL(attention_merge, AttentionParameters, MERGE_THREADS) {
  __shared__ float weights[MOST_SPLITS];
  u32 line = blockIdx.x, row = line % (u32)p.rows, matrix = line / (u32)p.rows;
  u32 head = matrix % (u32)p.heads, batch = matrix / (u32)p.heads;
  i64 lines = gridDim.x;
  int lane = threadIdx.x % 32;
  // Each warp reads all parts, a lane two of them.
  float tops[2], totals[2], sink = sink_of(p, head) * LOG2_E;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    bool there = lane + 32 * i < p.splits;
    const float* part = partial_at(p, there ? lane + 32 * i : 0, lines, line) + p.dv;
    tops[i] = there ? part[0] : -INFINITE, totals[i] = there ? part[1] : 0.0f;
  }
  float highest = larger(warp_larger(larger(tops[0], tops[1])), sink);
#pragma unroll
  for (int i = 0; i < 2; i++) {
    tops[i] = power(tops[i], highest), totals[i] *= tops[i];
    if (threadIdx.x < 32) weights[lane + 32 * i] = tops[i];
  }
  float all = warp_sum(totals[0] + totals[1]) + (p.has_sinks ? power(sink, highest) : 0.0f);
  float part = 1.0f / (all == 0.0f ? 1.0f : all);
  __syncthreads();
  u8* result = result_at(p, batch, head, row);
  for (int column = threadIdx.x; column < p.dv; column += MERGE_THREADS) {
    const float* from = partial_at(p, 0, lines, line) + column;
    float found = 0.0f;
#pragma unroll 8
    for (int split = 0; split < p.splits; split++) found = fmaf(from[split * lines * (p.dv + 2)], weights[split], found);
    store(result + column * size_of(p.result_type), p.result_type, found * part);
  }
}

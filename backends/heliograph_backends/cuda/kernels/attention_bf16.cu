// The attention kernels for keys and values in bf16.

ATTENTION(BF16, bf16, 32)
ATTENTION(BF16, bf16, 64)
ATTENTION(BF16, bf16, 96)
ATTENTION(BF16, bf16, 128)
ATTENTION(BF16, bf16, 256)

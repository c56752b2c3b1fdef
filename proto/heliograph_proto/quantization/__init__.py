"""Conversion of floats to ggml's block-quantized types and bf16, and back.

Within the package it imports only the types and the errors.
"""

#: The types of weights whose products CPUs compute in integers, with rows that are rounded to q8_0.
ROUNDED_ROWS = frozenset(
    [
        "q8_0",
        "q4_0",
        "q4_1",
        "q5_0",
        "q5_1",
        "q2_k",
        "q3_k",
        "q4_k",
        "q5_k",
        "q6_k",
        "iq4_nl",
        "iq4_xs",
        "mxfp4",
        "tq1_0",
        "tq2_0",
    ]
)

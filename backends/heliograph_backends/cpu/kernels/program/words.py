"""The words of an encoded program, shared by the builder, which is plain Python, and the native
runner.

A program is one array of int64 words: a header, then steps. A step is

    header | space | operands ... | words of its kind

Every step walks one space of six outer dimensions, rows and columns, cut into blocks of ROW_BLOCK
by COLUMN_BLOCK; BLOCKS_PER_TILE consecutive blocks are one tile, the unit that a worker claims. All
of this depends only on shapes. An operand names a slot in a table of base addresses that is bound
at run time, so a program runs on any memory.

All offsets, strides and sizes below are counted in bytes, all positions in words.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

WORD_BYTES: Final = 8
CACHE_LINE_BYTES: Final = 64
OUTER_DIMENSIONS: Final = 6
PANEL_COLUMNS: Final = 32

# Program header.
STEP_COUNT: Final = 0
PROGRAM_HEADER_WORDS: Final = 8

# Step header and space.
KIND: Final = 0
STEP_WORDS: Final = 1
TILES: Final = 2
BLOCKS: Final = 3
BLOCKS_PER_TILE: Final = 4
COUNTER: Final = 5  # number of the step among the shared ones, or -1: worker 0 runs it alone
ROWS: Final = 6
COLUMNS: Final = 7
ROW_BLOCK: Final = 8
COLUMN_BLOCK: Final = 9
ROW_BLOCKS: Final = 10
COLUMN_BLOCKS: Final = 11
STREAMS: Final = 12  # 1: results are written past the caches
# Concurrency: bit 0 is set if the step need not wait for the one before it; the bits above are the
# number of shared steps that are open while its set runs, counted from the program's first.
TOGETHER: Final = 13
MOST_CLAIMED: Final = 14  # the most tiles that a worker claims at once
OUTER_SIZES: Final = 15
STEP_HEADER_WORDS: Final = OUTER_SIZES + OUTER_DIMENSIONS

# Operand.
SLOT: Final = 0
OFFSET: Final = 1
ROW_STRIDE: Final = 2
COLUMN_STRIDE: Final = 3
OUTER_STRIDES: Final = 4
OPERAND_WORDS: Final = OUTER_STRIDES + OUTER_DIMENSIONS

# Matrix products, after the step header: three operands, then these words, then the epilogue's
# body.
LEFT: Final = STEP_HEADER_WORDS
RIGHT: Final = LEFT + OPERAND_WORDS
PRODUCT: Final = RIGHT + OPERAND_WORDS
DEPTH: Final = PRODUCT + OPERAND_WORDS
DEPTH_BLOCK: Final = DEPTH + 1
PACK_LEFT: Final = DEPTH + 2  # 1: gathered; `elements.HALF` or `BRAIN`: converted to float32
PACK_RIGHT: Final = DEPTH + 3  # 0: packed; 1: float32; PATCHES; else a `Stored`, see `stored_types`
RIGHT_BLOCK: Final = DEPTH + 4  # values of k in one row stride of the right side
HAS_EPILOGUE: Final = DEPTH + 5  # 1: an elementwise body; 2: a chain
GEOMETRY_AT: Final = DEPTH + 6  # of patches: the position of the geometry's words in the step
EPILOGUE: Final = DEPTH + 7
#: In place of a form of the right side: columns are windows of an image, see `PLANE_STRIDE`.
PATCHES: Final = -1

# The geometry of windows of images: strides of the image in bytes, then numbers of elements.
PLANE_STRIDE: Final = 0  # from a channel to the next
LINE_STRIDE: Final = 1
PIXEL_STRIDE: Final = 2
IMAGE_HEIGHT: Final = 3
IMAGE_WIDTH: Final = 4
RESULT_WIDTH: Final = 5
WINDOW_HEIGHT: Final = 6
WINDOW_WIDTH: Final = 7
STEP_DOWN: Final = 8  # from a window to the next
STEP_ACROSS: Final = 9
SPREAD_DOWN: Final = 10  # from an element of a window to the next
SPREAD_ACROSS: Final = 11
PADDING_ABOVE: Final = 12
PADDING_LEFT: Final = 13
# The data types of image and kernel, `elements.HALF` or `BRAIN` or 0 for float32, and the offset in
# the packing area of the image's lines as float32.
NARROW_IMAGE: Final = 14
NARROW_KERNEL: Final = 15
WIDE_LINES_AT: Final = 16
GEOMETRY_WORDS: Final = 17

# Row kernels, after the step header: four operands (SLOT -1 where absent), then a float32 parameter
# and the data type of the rows.
SOURCE: Final = STEP_HEADER_WORDS
WEIGHT: Final = SOURCE + OPERAND_WORDS
BIAS: Final = WEIGHT + OPERAND_WORDS
TARGET: Final = BIAS + OPERAND_WORDS
PARAMETER: Final = TARGET + OPERAND_WORDS
ROWS_AS: Final = PARAMETER + 1  # 0: float32; else `elements.HALF` or `BRAIN`

# Softmax (the weight is the mask, the bias the sinks), after the parameter: strides from a row to
# the word of its head's slope, then these words.
SLOPES_OF: Final = PARAMETER + 2
MASKED_AS: Final = SLOPES_OF + OPERAND_WORDS  # 0: float32; else `elements.HALF` or `BRAIN`
ROW_SLOPES: Final = MASKED_AS + 1  # the number of slopes; 0: all are 1
ROW_SLOPES_AT: Final = MASKED_AS + 2

# Rotary embedding, after the parameter of a row kernel whose weight is the positions (int32; a row
# has one or several) and whose bias is the factors. For each pair of a head: two float64, the angle
# of one position before factors and the scale after them, and the place of its position.
WIDTH: Final = PARAMETER + 2  # elements of a head
START: Final = PARAMETER + 3  # first rotated element of a head
ADJACENT: Final = PARAMETER + 4  # 1: a pair is adjacent elements; 0: one of each half
SIZE: Final = PARAMETER + 5  # factor of a pair's length, float64
TURNED_AS: Final = PARAMETER + 6  # 0: float32; else `elements.HALF` or `BRAIN`
PAIRS: Final = PARAMETER + 7
ROTATIONS: Final = PARAMETER + 8
PAIR_WORDS: Final = 3

# Moves with conversion: two operands, the indices (int32 or int64; absent if all rows are moved in
# order), then these words. A column is one element; its stride is that of a unit, an element or a
# block.
MOVED_FROM: Final = STEP_HEADER_WORDS
MOVED_TO: Final = MOVED_FROM + OPERAND_WORDS
WHICH: Final = MOVED_TO + OPERAND_WORDS
CONVERSION: Final = WHICH + OPERAND_WORDS  # see `elements`
FROM_ELEMENTS: Final = CONVERSION + 1  # elements of a unit that is read
TO_ELEMENTS: Final = CONVERSION + 2  # elements of a unit that is written
FROM_BYTES: Final = CONVERSION + 3
TO_BYTES: Final = CONVERSION + 4
WHICH_BYTES: Final = CONVERSION + 5  # bytes of an index
CHOICES: Final = CONVERSION + 6  # indices must be smaller
WHICH_COUNT: Final = CONVERSION + 7  # of a scatter: the rows that each block of columns writes

# Attention: operands (SLOT -1 where absent), then these words. HEADS only has strides, from a row
# of queries to the word of its head's slope.
QUERIES: Final = STEP_HEADER_WORDS
KEYS: Final = QUERIES + OPERAND_WORDS
VALUES: Final = KEYS + OPERAND_WORDS
ATTENDED: Final = VALUES + OPERAND_WORDS
MASK: Final = ATTENDED + OPERAND_WORDS
SINKS: Final = MASK + OPERAND_WORDS
PAGES: Final = SINKS + OPERAND_WORDS
HEADS: Final = PAGES + OPERAND_WORDS
KEY_COUNT: Final = HEADS + OPERAND_WORDS
KEY_WIDTH: Final = KEY_COUNT + 1
KEY_FORM: Final = KEY_COUNT + 2  # a `Stored`, see `stored_types`
VALUE_FORM: Final = KEY_COUNT + 3  # 1: float32; else a `Stored`
VALUE_ELEMENTS: Final = KEY_COUNT + 4  # of a block of values
VALUE_BYTES: Final = KEY_COUNT + 5
MASK_CONVERSION: Final = KEY_COUNT + 6  # to float32, see `elements`
SCORE_SCALE: Final = KEY_COUNT + 7  # float32, as the next
SCORE_CAP: Final = KEY_COUNT + 8  # 0: none
SLOPE_COUNT: Final = KEY_COUNT + 9  # 0: all slopes are 1
STATES_AT: Final = KEY_COUNT + 10  # offset in the packing area, as the next four
BIASES_AT: Final = KEY_COUNT + 11
SCORES_AT: Final = KEY_COUNT + 12
PANELS_AT: Final = KEY_COUNT + 13
WIDE_VALUES_AT: Final = KEY_COUNT + 14
PIECES_AT: Final = KEY_COUNT + 15
# Without tables of pages, all keys are one page.
PAGE_KEYS: Final = KEY_COUNT + 16
PAGE_COUNT: Final = KEY_COUNT + 17  # numbers in tables must be smaller
KEY_PAGE_BYTES: Final = KEY_COUNT + 18  # from a page to the next
VALUE_PAGE_BYTES: Final = KEY_COUNT + 19
TABLES: Final = KEY_COUNT + 20
TABLE_BYTES: Final = KEY_COUNT + 21  # from a table to the next
TABLE_PAGES: Final = KEY_COUNT + 22
KEY_BYTES: Final = KEY_COUNT + 23  # of a row of keys
SLOPES: Final = KEY_COUNT + 24
# Keys whose scores are held at the same time.
KEY_BLOCK: Final = 128
# The pieces of a block of keys, each of one page: the first key's place in the block, the number of
# keys, and the addresses of keys and values, 0 if the mask hides them all. After them is that of
# the keys that come next.
PIECE_FIRST: Final = 0
PIECE_COUNT: Final = 1
PIECE_KEYS: Final = 2
PIECE_VALUES: Final = 3
PIECE_BYTES: Final = 4 * WORD_BYTES
# The state of each row during the pass over the keys: the largest score, the factor of the sums
# (both float32), and the sum of powers (float64).
LARGEST_SCORE: Final = 0
RESCALED: Final = 4
TOTAL: Final = 8
STATE_BYTES: Final = 16

# Products with experts: four operands, then these words. The outer axis of weights is experts, that
# of rows and result is tokens; rows of ids are tokens.
EXPERT_WEIGHTS: Final = STEP_HEADER_WORDS
EXPERT_ROWS: Final = EXPERT_WEIGHTS + OPERAND_WORDS
EXPERT_IDS: Final = EXPERT_ROWS + OPERAND_WORDS
EXPERT_RESULT: Final = EXPERT_IDS + OPERAND_WORDS
EXPERT_FORM: Final = EXPERT_RESULT + OPERAND_WORDS  # a `Stored`, see `stored_types`
EXPERT_BLOCK: Final = EXPERT_FORM + 1  # values of k in a block
EXPERT_BLOCK_BYTES: Final = EXPERT_FORM + 2
EXPERT_COUNT: Final = EXPERT_FORM + 3
EXPERT_DEPTH: Final = EXPERT_FORM + 4
EXPERT_TOKENS: Final = EXPERT_FORM + 5
EXPERT_USED: Final = EXPERT_FORM + 6  # ids of a token
EXPERT_OWN: Final = EXPERT_FORM + 7  # rows of a token, which its ids use in turn
EXPERT_ID_BYTES: Final = EXPERT_FORM + 8
EXPERT_BY_ID: Final = EXPERT_FORM + 9  # 1: blocks belong to ids, 0: to experts
EXPERT_ROWS_AT_ONCE: Final = EXPERT_FORM + 10
EXPERT_PRODUCT_AT: Final = EXPERT_FORM + 11  # offset in the scratch, as the next two
EXPERT_LEFT_AT: Final = EXPERT_FORM + 12
EXPERT_PANELS_AT: Final = EXPERT_FORM + 13
# Values of k that are unpacked at once.
UNPACKED_DEPTH: Final = 1024

# Windows over each channel: image, weights (SLOT -1 where absent) and result, whose rows are
# channels, then these words, the geometry, and the epilogue's body.
WINDOWS_OF: Final = STEP_HEADER_WORDS
WINDOWS_WEIGHTS: Final = WINDOWS_OF + OPERAND_WORDS
WINDOWED: Final = WINDOWS_WEIGHTS + OPERAND_WORDS
WINDOWS_AS: Final = WINDOWED + OPERAND_WORDS  # see `Windowing`
WINDOWS_PITCH: Final = WINDOWS_AS + 1  # elements of a staged line
WINDOWS_LINE_AT: Final = WINDOWS_AS + 2  # offset in the packing area; 0: lines are not joined
WINDOWS_PLANES_AT: Final = WINDOWS_AS + 3
WINDOWS_HAS_EPILOGUE: Final = WINDOWS_AS + 4
WINDOWS_LANES_AT: Final = WINDOWS_AS + 5  # of sixteen channels as lanes; 0: lanes are places
WINDOWS_GEOMETRY: Final = WINDOWS_AS + 6
WINDOWS_EPILOGUE: Final = WINDOWS_GEOMETRY + GEOMETRY_WORDS

# Sorts and searches along rows: source and target, then these words.
SORTED: Final = STEP_HEADER_WORDS
SORTED_TO: Final = SORTED + OPERAND_WORDS
SORTED_AS: Final = SORTED_TO + OPERAND_WORDS  # 0: float32; INTEGERS: int32; else HALF or BRAIN
SORT_KEPT: Final = SORTED_AS + 1  # the places that are written; 0: the first one alone, of all
SORT_FALLING: Final = SORTED_AS + 2  # 1: the largest element is the first
SORT_ROOM: Final = SORTED_AS + 3  # elements that are held at once; 0: a whole row, twice
#: In place of a float type: int32.
INTEGERS: Final = 1
#: The rows of which all places are sorted have at most so many elements, of 16 bytes of scratch.
MOST_SORTED: Final = 2**19
#: Elements of a row whose keys are made at once.
KEYS_AT_ONCE: Final = 1024

# Running sums and products along rows: source and target, then these words.
RUNNING: Final = STEP_HEADER_WORDS
RUNNING_TO: Final = RUNNING + OPERAND_WORDS
RUNNING_AS: Final = RUNNING_TO + OPERAND_WORDS  # as SORTED_AS, or WIDE_INTEGERS or DOUBLES
RUNNING_PRODUCT: Final = RUNNING_AS + 1
WIDE_INTEGERS: Final = 2
DOUBLES: Final = 3

# Images that are resampled: source and target, whose rows are lines, then these words. They are
# followed by the tables: for each line its taps, each an offset in bytes and a float64 weight; for
# each tap across the offsets of all columns, then their weights, as whole vectors.
RESAMPLED: Final = STEP_HEADER_WORDS
RESAMPLED_TO: Final = RESAMPLED + OPERAND_WORDS
RESAMPLED_TAPS: Final = RESAMPLED_TO + OPERAND_WORDS  # in each dimension; 0: elements are copied
RESAMPLED_PITCH: Final = RESAMPLED_TAPS + 1  # columns, as whole vectors
RESAMPLED_TABLE: Final = RESAMPLED_TAPS + 2

# Windows as rows: image, rows, and the data types, then the geometry. The same words serve the
# gradients: of rows (image is the gradient's result), and of a pool, which has the image too.
UNFOLDED: Final = STEP_HEADER_WORDS
UNFOLDED_TO: Final = UNFOLDED + OPERAND_WORDS
UNFOLDED_OF: Final = UNFOLDED_TO + OPERAND_WORDS  # a pool's image (SLOT -1 where absent)
UNFOLDED_AS: Final = UNFOLDED_OF + OPERAND_WORDS  # see `Unfolding`
UNFOLDED_BYTES: Final = UNFOLDED_AS + 1  # of an element that is moved
UNFOLDED_ROUNDED: Final = UNFOLDED_AS + 2  # HALF or BRAIN for rows of f16 or bf16 of float32; else 0
UNFOLDED_CHANNELS: Final = UNFOLDED_AS + 3
UNFOLDED_LINES: Final = UNFOLDED_AS + 4  # rows of windows; RESULT_WIDTH is the windows of each
UNFOLDED_GEOMETRY: Final = UNFOLDED_AS + 5

# Elementwise body: at STEP_HEADER_WORDS of an elementwise step, at EPILOGUE of a matrix product. It
# is followed by the operands (each with an ACCESS word after it), the constants (one word each) and
# the instructions.
OPERANDS: Final = 0
REGISTERS: Final = 1
CONSTANTS: Final = 2
INSTRUCTIONS: Final = 3
CHUNK: Final = 4
BODY_HEADER_WORDS: Final = 5
ACCESS: Final = OPERAND_WORDS
BODY_OPERAND_WORDS: Final = OPERAND_WORDS + 1
READ: Final = 1
WRITTEN: Final = 2
# Operands whose elements are not of four bytes are staged: at these bits are the conversions to and
# from four bytes, see `elements`.
WIDENING: Final = 2
ROUNDING: Final = 12
# Above all conversions: elements lie side by side and are read as they lie, several in a value; the
# operand's strides are those of values.
AS_THEY_LIE: Final = 1 << ROUNDING - 1

# A chain, in place of a body: instructions that each read the result of the one before, of which the
# first one reads the product and the last one writes it. The product is followed by links, each an
# instruction with the address of its other source: an operand, or a constant in the link.
CHAIN_LENGTH: Final = 0
CHAIN_FORM: Final = 1  # see `ChainForm`
CHAIN_LEAST: Final = 2  # float32, as the next: the bounds of a form with bounds
CHAIN_MOST: Final = 3
CHAIN_PRODUCT: Final = 4
CHAIN_LINKS: Final = CHAIN_PRODUCT + OPERAND_WORDS
LINK_OPERATION: Final = 0
LINK_SWAPPED: Final = 1  # 1: the other source is the first one
LINK_IMMEDIATES: Final = 2
LINK_CONSTANT: Final = 3  # float32
LINK_OPERAND: Final = 4  # SLOT -1: the constant
LINK_WORDS: Final = LINK_OPERAND + OPERAND_WORDS

# Rows of at least this many columns are chunks by themselves: staging several in a longer chunk
# would cost more than it saves.
WIDE_ROW: Final = 96

# Instruction: values are numbered operands first, then registers, then constants.
OPERATION: Final = 0
RESULT: Final = 1
FIRST: Final = 2
SECOND: Final = 3
IMMEDIATES: Final = 4  # two float32, the first in the low half
THIRD: Final = 5
INSTRUCTION_WORDS: Final = 6
# Added to the operation: write the result past the caches; prefetch the first source.
STREAMED: Final = 256
FETCHED: Final = 512

# Each worker's scratch, in bytes: the block's outer indices, the address of the table of entries,
# the tile that the worker probably runs next, the address of the run's control block, the addresses
# of the values in this chunk, those of the operands in this block, buffers, packed matrices.
INDEX_AT: Final = 0
ENTRIES_AT: Final = 48
NEXT_AT: Final = 64
CONTROL_AT: Final = 72
MAXIMUM_VALUES: Final = 64
TABLE_AT: Final = 128
BASES_AT: Final = TABLE_AT + MAXIMUM_VALUES * WORD_BYTES
BUFFERS_AT: Final = BASES_AT + MAXIMUM_VALUES * WORD_BYTES
BUFFER_AREA_BYTES: Final = 128 * 1024
MAXIMUM_PAIRS: Final = BUFFER_AREA_BYTES // 16
# The place of a row that is staged as float32, after the angles or a row of results, and its most
# elements.
STAGED_AT: Final = BUFFERS_AT + BUFFER_AREA_BYTES // 2
MAXIMUM_NARROW: Final = BUFFER_AREA_BYTES // 8
PACK_AT: Final = BUFFERS_AT + BUFFER_AREA_BYTES
STRIP_GAP_BYTES: Final = 64

# The control block; words that different workers write are on different cache lines.
ABORT: Final = 0
PAUSE: Final = 1
STATUS: Final = 8
FAILED_STEP: Final = 9
FAILED_INDEX: Final = 10  # the index that is out of range
ENTRIES: Final = 11  # the address of the table of entries, see `Place`
REACHED_STEP: Final = 12  # where a paused run goes on; 0: at its start
REACHED_TILE: Final = 13  # of that step, if the leader runs it alone
MAILS: Final = 16  # the address of the table of the helpers' mails
SCRATCHES: Final = 17  # the address of the table of the helpers' scratch
WORKERS: Final = 18  # the number of workers in the run
PROCESSOR: Final = 19  # the leader's processor at the start of the run
TIMES: Final = 24  # the address of each step's nanoseconds in all runs, and of their number; 0: none
CLOCK: Final = 25  # the address of clock_gettime, and the number of its clock
CLOCK_NUMBER: Final = 26
CLOCK_SECONDS: Final = 27  # what it writes
CLOCK_NANOSECONDS: Final = 28
STEP_BEGAN: Final = 29  # the time when the leader began the present step
PROGRESS: Final = 32  # the number of shared steps opened so far
COUNTERS: Final = 40
CLAIMED: Final = 0
DONE: Final = 8
COUNTER_WORDS: Final = 16
FINISHED: Final = 1 << 62  # value of PROGRESS after the last step

# A helper's mail: its state and its program.
MAIL_STATE: Final = 0
MAIL_BEFORE: Final = 1  # the state before a program was posted
MAIL_CODE: Final = 2
MAIL_SLOTS: Final = 3
MAIL_CONTROL: Final = 4
MAIL_SCRATCH: Final = 5
MAIL_PROCESSOR: Final = 8  # the helper's processor when it last looked; see `workers`
MAIL_WORDS: Final = 16


class Mail(IntEnum):
    """The state of a helper."""

    PARKED = 0  # its thread sleeps or is waking up
    WAITING = 1  # it looks for a program
    POSTED = 2  # a program is posted, but not seen yet
    TAKEN = 3  # it runs the program


class Kind(IntEnum):
    """The kind of a step."""

    ELEMENTWISE = 0
    MATMUL = 1
    LAYER_NORM = 2
    RMS_NORM = 3
    SOFT_MAX = 4
    L2_NORM = 5
    SUM = 6
    MEAN = 7
    MAX = 8
    ROTARY = 9
    CONVERT = 10
    GATHER = 11
    SCATTER = 12
    ATTENTION = 13
    EXPERTS = 14
    WINDOWS = 15
    SORT = 16
    RUNNING = 17
    RESAMPLE = 18
    UNFOLD = 19
    CONVOLVE = 20


class Windowing(IntEnum):
    """The number that a window becomes."""

    PRODUCT = 0  # the sum of its products with weights
    LARGEST = 1
    MEAN = 2


class Unfolding(IntEnum):
    """The use of windows: rows of their elements, or gradients."""

    ROWS = 0  # windows become rows
    ROWS_BACK = 1  # rows are added up at the places of their elements
    MEAN_BACK = 2  # the gradients of a pool are added up
    LARGEST_BACK = 3


class ChainForm(IntEnum):
    """Chains with a loop of their own: a number for each row is added, then perhaps elements are
    (ADDED), then one of the others is applied."""

    BIASED = 0
    ADDED = 1
    RECTIFIED = 2  # negative numbers become 0
    BOUNDED = 4
    HARDSWISH = 6
    SILU = 8
    OTHER = 16  # any chain


class Place(IntEnum):
    """Places in the table of entries' addresses, after those of kinds, of the entries that other
    entries call."""

    MULTIPLY_FEW = len(Kind)
    UNPACK_PANELS = len(Kind) + 1
    PACK_ROW = len(Kind) + 2
    PACK_PATCHES = len(Kind) + 3
    FINISH_ROWS = len(Kind) + 4
    STAGE_INTEGERS = len(Kind) + 5
    MULTIPLY_INTEGERS = len(Kind) + 6


#: The name of the entry at each place of the table.
TABLE: Final[dict[int, str]] = {
    Kind.ELEMENTWISE: "elementwise_body",
    Kind.MATMUL: "matmul_block",
    **dict.fromkeys(range(Kind.LAYER_NORM, Kind.MAX + 1), "rows_block"),
    Kind.ROTARY: "rotary_block",
    **dict.fromkeys((Kind.CONVERT, Kind.GATHER, Kind.SCATTER), "moves_block"),
    Kind.ATTENTION: "attention_block",
    Kind.EXPERTS: "experts_block",
    Place.MULTIPLY_FEW: "multiply_few",
    Place.UNPACK_PANELS: "unpack_panels",
    Place.PACK_ROW: "pack_row",
    Kind.WINDOWS: "windows_block",
    **dict.fromkeys((Kind.SORT, Kind.RUNNING), "searches_block"),
    **dict.fromkeys((Kind.RESAMPLE, Kind.UNFOLD), "images_block"),
    Kind.CONVOLVE: "convolve_block",
    Place.PACK_PATCHES: "pack_patches",
    Place.FINISH_ROWS: "finish_rows",
    Place.STAGE_INTEGERS: "stage_integers",
    Place.MULTIPLY_INTEGERS: "multiply_integers",
}
#: Places as bits: those that every program uses, and those for stored elements.
ALWAYS: Final = 1 << Kind.ELEMENTWISE | 1 << Kind.CONVERT
FOR_STORED: Final = 1 << Place.MULTIPLY_FEW | 1 << Place.UNPACK_PANELS | 1 << Place.PACK_ROW
FOR_INTEGERS: Final = 1 << Place.STAGE_INTEGERS | 1 << Place.MULTIPLY_INTEGERS
FOR_PATCHES: Final = 1 << Place.PACK_PATCHES
FOR_CHAINS: Final = 1 << Place.FINISH_ROWS

#: This plus a conversion of `elements`, in place of a kind: the entry of moves converts rows for
#: other kernels. Below are the positions of the words that describe the rows; the step is that of
#: the narrow elements.
CONVERTED: Final = 256
CONVERTED_TO: Final = 0
CONVERTED_FROM: Final = 1
CONVERTED_STEP: Final = 2
CONVERTED_COUNT: Final = 3
CONVERTED_ROWS: Final = 4
CONVERTED_TO_ROW: Final = 5
CONVERTED_FROM_ROW: Final = 6
CONVERTED_WORDS: Final = 8


class Status(IntEnum):
    """The status of a run."""

    OK = 0
    ABORTED = 1
    INVALID = 2  # a step of an unknown kind, which the builder never makes
    OUTSIDE = 3  # an index out of range
    PAUSED = 4


class Operation(IntEnum):
    """The instructions of elementwise programs, on values of four bytes: float32, unless the name
    says otherwise; x and y are sources, p and q immediates.

    Each rounds to float32 as written, operator by operator, so a chain has the same bits fused and
    unfused.
    """

    #: An enum's own hash is computed in Python.
    __hash__ = int.__hash__

    COPY = 0
    ADD = 1
    SUB = 2
    MUL = 3
    DIV = 4
    MAXIMUM = 5  # NaN if either is, as in NumPy
    MINIMUM = 6
    NEG = 7
    ABS = 8
    SQRT = 9
    RSQRT = 10  # 1 / sqrt(x)
    SQUARE = 11
    EXP = 12
    LOG = 13
    ERF = 14
    TANH = 15
    SIGMOID = 16  # 1 / (1 + exp(-x))
    RELU = 17  # maximum(x, 0)
    GELU_ERF = 18  # 0.5 * x * (1 + erf(x * sqrt(1/2)))
    GELU = 19  # 0.5 * x * (1 + tanh(sqrt(2/pi) * (x + 0.044715 * x**3)))
    GELU_QUICK = 20  # x / (1 + exp(-1.702 * x))
    SILU = 21  # x / (1 + exp(-x))
    SCALE_BIAS = 22  # x * p + q
    CLAMP = 23  # minimum(maximum(x, p), q)
    SGN = 24  # -1, 0, 1 or NaN
    STEP = 25  # 1 if x > 0, else 0
    FLOOR = 26
    CEIL = 27
    ROUND = 28  # halves to even
    TRUNC = 29
    HARDSIGMOID = 30  # clamp(x + 3, 0, 6) / 6
    HARDSWISH = 31  # x * hardsigmoid(x)
    LEAKY_RELU = 32  # x if x > 0, else x * p
    EXPM1 = 33
    ELU = 34  # x if x > 0, else expm1(x)
    SOFTPLUS = 35  # maximum(x, 0) + log1p(exp(-abs(x)))
    RELU_BACK = 36  # 0 if y <= 0, else x
    COPYSIGN = 37  # x with the sign of y
    # Below, a truth value is the int32 1 or 0, and integers have 32 bits.
    WHERE = 38  # the second source where the first is not 0, else the third
    EQUAL = 39
    LESS = 40
    LESS_EQUAL = 41
    IS_NAN = 42
    IS_INF = 43
    IS_FINITE = 44
    IS_ZERO = 45  # of an integer, as the next ones
    SAME = 46  # x == y
    INT_LESS = 47
    UINT_LESS = 48
    AND = 49
    OR = 50
    XOR = 51
    INVERT = 52
    SHIFT_LEFT = 53  # 0 for counts outside of 0 to 31
    INT_SHIFT_RIGHT = 54  # for these counts the sign
    UINT_SHIFT_RIGHT = 55
    INT_ADD = 56
    INT_SUB = 57
    INT_MUL = 58
    INT_MAXIMUM = 59
    INT_MINIMUM = 60
    UINT_MAXIMUM = 61
    UINT_MINIMUM = 62
    INT_ABS = 63
    INT_SGN = 64
    INT_DIVIDE = 65  # floor(x / y); 0 if y is 0
    UINT_DIVIDE = 66
    INT_REMAINDER = 67  # of the sign of y; 0 if y is 0
    UINT_REMAINDER = 68
    FLOAT_OF_INT = 69
    FLOAT_OF_UINT = 70
    INT_OF_FLOAT = 71  # towards 0; the least int32 for numbers outside, and NaN
    UINT_OF_FLOAT = 72  # the low bits of the number as int64, 0 for NaN and numbers outside of it
    # Below, a value is four bytes, each an element by itself; of truths, any byte but 0 is true.
    BYTES_BOTH = 73  # 1 where both are true, else 0, as the next ones
    BYTES_EITHER = 74
    BYTES_DIFFER = 75  # one is true
    BYTES_AGREE = 76
    BYTES_ZERO = 77  # 1 for each byte of 0
    BYTES_SAME = 78
    INT_BYTES_LESS = 79
    UINT_BYTES_LESS = 80
    BYTES_ADD = 81
    BYTES_SUB = 82
    INT_BYTES_MAXIMUM = 83
    INT_BYTES_MINIMUM = 84
    UINT_BYTES_MAXIMUM = 85
    UINT_BYTES_MINIMUM = 86
    # Below, a value is two shorts.
    SHORTS_ADD = 87
    SHORTS_SUB = 88
    SHORTS_MUL = 89
    INT_SHORTS_MAXIMUM = 90
    INT_SHORTS_MINIMUM = 91
    UINT_SHORTS_MAXIMUM = 92
    UINT_SHORTS_MINIMUM = 93
    # Below, a value is four truths, and sources are operands of four elements for each value: of 2
    # bytes (shorts), 4 (words, floats) or 8 (longs).
    SHORTS_SAME = 94
    INT_SHORTS_LESS = 95
    UINT_SHORTS_LESS = 96
    WORDS_SAME = 97
    INT_WORDS_LESS = 98
    UINT_WORDS_LESS = 99
    LONGS_SAME = 100
    INT_LONGS_LESS = 101
    UINT_LONGS_LESS = 102
    FLOATS_EQUAL = 103
    FLOATS_LESS = 104
    FLOATS_LESS_EQUAL = 105


#: The instructions of chains.
CHAINED: Final = frozenset(
    {
        Operation.ADD,
        Operation.SUB,
        Operation.MUL,
        Operation.DIV,
        Operation.MAXIMUM,
        Operation.MINIMUM,
        Operation.NEG,
        Operation.ABS,
        Operation.SQUARE,
        Operation.RELU,
        Operation.SCALE_BIAS,
        Operation.CLAMP,
        Operation.HARDSIGMOID,
        Operation.HARDSWISH,
        Operation.LEAKY_RELU,
    }
)
BINARY: Final = frozenset(
    {
        Operation.ADD,
        Operation.SUB,
        Operation.MUL,
        Operation.DIV,
        Operation.MAXIMUM,
        Operation.MINIMUM,
        Operation.RELU_BACK,
        Operation.COPYSIGN,
        Operation.EQUAL,
        Operation.LESS,
        Operation.LESS_EQUAL,
        Operation.SAME,
        Operation.INT_LESS,
        Operation.UINT_LESS,
        *range(Operation.AND, Operation.XOR + 1),
        *range(Operation.SHIFT_LEFT, Operation.UINT_MINIMUM + 1),
        *range(Operation.INT_DIVIDE, Operation.UINT_REMAINDER + 1),
        *range(Operation.BYTES_BOTH, Operation.BYTES_AGREE + 1),
        *range(Operation.BYTES_SAME, len(Operation)),
    }
)
TERNARY: Final = frozenset({Operation.WHERE})
#: Instructions on truth values and integers; the others are ops of the same name, on float32.
TYPED: Final = frozenset(Operation(number) for number in range(Operation.WHERE, len(Operation)))
IMMEDIATE_COUNTS: Final = {Operation.SCALE_BIAS: 2, Operation.CLAMP: 2, Operation.LEAKY_RELU: 1}
# Polynomials; the other operations take a few instructions per element.
TRANSCENDENTAL: Final = frozenset(
    {
        Operation.EXP,
        Operation.LOG,
        Operation.ERF,
        Operation.TANH,
        Operation.SIGMOID,
        Operation.GELU_ERF,
        Operation.GELU,
        Operation.GELU_QUICK,
        Operation.SILU,
        Operation.EXPM1,
        Operation.ELU,
        Operation.SOFTPLUS,
    }
)

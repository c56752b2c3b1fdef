"""Rules by family: how each ONNX op is expressed. Importing this registers all of them."""

from heliograph.onnx.ops import activations as activations
from heliograph.onnx.ops import casts as casts
from heliograph.onnx.ops import classical as classical
from heliograph.onnx.ops import control_flow as control_flow
from heliograph.onnx.ops import convolutions as convolutions
from heliograph.onnx.ops import elementwise as elementwise
from heliograph.onnx.ops import indexing as indexing
from heliograph.onnx.ops import normalization as normalization
from heliograph.onnx.ops import products as products
from heliograph.onnx.ops import quantization as quantization
from heliograph.onnx.ops import random_numbers as random_numbers
from heliograph.onnx.ops import recurrent as recurrent
from heliograph.onnx.ops import reductions as reductions
from heliograph.onnx.ops import resizing as resizing
from heliograph.onnx.ops import selections as selections
from heliograph.onnx.ops import shapes as shapes
from heliograph.onnx.ops import signals as signals

"""Rules of ai.onnx.ml: the models of scikit-learn, XGBoost and LightGBM, and of their features."""

from heliograph.onnx.ops.classical import features as features
from heliograph.onnx.ops.classical import models as models
from heliograph.onnx.ops.classical import trees as trees

"""A small convolutional network with weights from a safetensors file: 28x28 images to ten classes.

pip install 'heliograph[models]'
python cnn.py [URL] [FILE.safetensors]
"""

import sys
from pathlib import Path

import numpy as np
from weights import load_or_make

import heliograph as hg

SHAPES = {
    "conv1.weight": (8, 1, 3, 3),
    "conv1.bias": (8,),
    "conv2.weight": (16, 8, 3, 3),
    "conv2.bias": (16,),
    "fc.weight": (10, 16 * 7 * 7),
    "fc.bias": (10,),
}


def classifier(weights: dict[str, np.ndarray], batch: int) -> hg.Graph:
    """Return a graph from `image`, f32 [batch, 1, 28, 28], to `probability`, f32 [batch, 10]."""
    graph = hg.Graph()
    x = graph.input("image", (batch, 1, 28, 28), "f32")
    for name in ("conv1", "conv2"):
        with graph.scope(name):
            kernel = graph.weight(f"{name}.weight", weights[f"{name}.weight"])
            bias = graph.weight(f"{name}.bias", weights[f"{name}.bias"])
            x = hg.ops.conv_2d(kernel, x, padding=(1, 1)) + bias.reshape((1, -1, 1, 1))
            x = hg.ops.pool_2d(hg.relu(x), kernel=(2, 2), stride=(2, 2))
    x = x.reshape((batch, -1))
    scores = x @ graph.weight("fc.weight", weights["fc.weight"]).mT + graph.weight(
        "fc.bias", weights["fc.bias"]
    )
    graph.output("probability", hg.softmax(scores, axis=-1))
    return graph


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "local:"
    file = Path(sys.argv[2] if len(sys.argv) > 2 else "cnn.safetensors")
    weights = load_or_make(file, SHAPES)
    images = np.random.default_rng(1).standard_normal((4, 1, 28, 28)).astype(np.float32)
    with hg.connect(url) as session:
        plan = session.compile(classifier(weights, batch=4))
        probability = plan.run(image=images)["probability"]
    for row in probability:
        print(f"class {row.argmax()} with probability {row.max():.3f}")

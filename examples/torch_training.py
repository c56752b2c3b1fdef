"""Training a PyTorch module on a server: parameters and the optimizer's state stay there.

A small network learns whether a point lies inside of a circle.

    python torch_training.py [URL]
"""

import sys
from collections.abc import Iterator

import torch
from torch import nn

import heliograph as hg

STEPS, BATCH = 150, 128


def batches(count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Points of a square, and whether each is inside."""
    for _ in range(count):
        points = torch.rand(BATCH, 2) * 2 - 1
        yield points, (points.square().sum(1) < 0.6).long()


def main(url: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    with (
        hg.connect(url) as session,
        hg.torch.Trainer(module, nn.CrossEntropyLoss(), optimizer, session) as trainer,
    ):
        for number, loss in enumerate(trainer.steps(batches(STEPS))):
            if number % 50 == 0:
                print(f"step {number}: loss {float(loss):.3f}")
        ((points, inside),) = batches(1)
        right = (trainer.predict(points).argmax(1) == inside).float().mean()
        print(f"{float(right):.0%} of new points are right")
        trainer.sync()
    # The module here has learned it, too.
    print("the centre is", "inside" if module(torch.zeros(1, 2)).argmax() else "outside")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "local:")

"""A U-Net: what goes down is taken again on the way up, past all stages in between, which hand it on.

python unet.py
rpc-pipe run unet.py --workers 3
"""

import argparse
from functools import partial

import torch
from torch import Tensor, nn

from rpc_pipe import Pipeline, Training


class UNet(nn.Module):
    """Three steps down and three up, with a skip at each."""

    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Conv2d(1 if i == 0 else 8 * i, 8 * (i + 1), 3, padding=1) for i in range(3)])
        self.ups = nn.ModuleList([nn.Conv2d(2 * 8 * (i + 1), 8 * max(i, 1), 3, padding=1) for i in (2, 1, 0)])
        self.head = nn.Conv2d(8, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = down(x).relu()
            skips.append(x)
            x = nn.functional.max_pool2d(x, 2)
        for up, skip in zip(self.ups, reversed(skips), strict=True):
            x = nn.functional.interpolate(x, scale_factor=2)
            x = up(torch.cat([x, skip], 1)).relu()
        return self.head(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    training = Training(optimizer=partial(torch.optim.AdamW, lr=3e-3))
    pipe = Pipeline(UNet(), nn.functional.mse_loss, training=training, num_microbatches=4, num_workers=3)
    clean = torch.zeros(16, 1, 16, 16)
    clean[:, :, 4:12, 4:12] = 1
    for step in range(1, steps + 1):
        loss = pipe.step((clean + 0.3 * torch.randn_like(clean), clean))
        if step % 10 == 0 or step == steps:
            print(f"step {step}: loss {loss:.4f}")


if __name__ == "__main__":
    main()

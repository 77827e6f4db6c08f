"""`nn.TransformerEncoder` drops padding in evaluation; cut between its layers it gave 2.5 for 0 there."""

import pytest
import torch
from torch import nn

from rpc_pipe import Pipeline, Training

torch.manual_seed(0)
LENGTHS, PLACES = torch.tensor([2, 5, 3, 4])[:, None], torch.arange(5)[None]
AT_THE_END, AT_THE_BEGINNING = PLACES >= LENGTHS, PLACES < 5 - LENGTHS
ROWS = torch.randn(4, 5, 8)


class Net(nn.Module):
    def __init__(self, norm, **how):
        super().__init__()
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, norm, **how)

    def forward(self, x, mask):
        return self.encoder(x, src_key_padding_mask=mask)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("mask", "how"),
    [
        (AT_THE_END, {}),
        (AT_THE_BEGINNING, {}),
        (AT_THE_END, {"enable_nested_tensor": False}),
        (AT_THE_END, {"mask_check": False}),
    ],
)
def test_padding_counts_as_in_one_process(mask, how):
    norm = nn.LayerNorm(8)
    nn.init.ones_(norm.bias)
    model = Net(norm, **how).eval()
    with torch.no_grad():
        expected = model(ROWS, mask)
    model.train()
    training = {"training": Training(), "num_microbatches": 2, "num_workers": 2}
    with Pipeline(model, lambda output, batch: output.pow(2).mean(), **training) as pipe:
        assert torch.allclose(pipe.predict({"x": ROWS, "mask": mask}), expected, atol=1e-5)

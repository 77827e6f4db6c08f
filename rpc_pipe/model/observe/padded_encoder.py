"""`nn.TransformerEncoder` with a padding mask in evaluation, where it is cut between its layers.

One process drops padding there and puts 0 in its place. Stages keep padding and then put 0 there as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor, nn


def fill_padding(modules: Iterable[nn.Module]) -> None:
    """Let the encoders among modules put 0 in the place of padding where torch would, if they run in stages."""
    for module in modules:
        if isinstance(module, nn.TransformerEncoder) and "forward" not in vars(module):
            if type(module).forward is nn.TransformerEncoder.forward:
                vars(module)["forward"] = partial(_encode, module)


def _encode(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None = None,
    src_key_padding_mask: Tensor | None = None,
    is_causal: bool | None = None,
) -> Tensor:
    first, padding = encoder.layers[0], src_key_padding_mask
    if (
        padding is None
        or mask is not None
        or not torch.overrides.has_torch_function((src,))  # as where blocks run by themselves
        or not (encoder.use_nested_tensor and torch.backends.mha.get_fastpath_enabled())
        or first.training
        or src.dim() != 3
        or torch.is_autocast_enabled()
        or (torch.is_grad_enabled() and any(each.requires_grad for each in (src, *first.parameters())))
    ):
        return nn.TransformerEncoder.forward(encoder, src, mask, padding, is_causal)
    masked = padding if padding.dtype is torch.bool else padding != 0
    if encoder.mask_check:  # torch keeps padding that is not at the end
        masked = masked & (masked[:, 1:] | ~masked[:, :-1]).all()
    norm, encoder.norm = encoder.norm, None
    try:
        found = nn.TransformerEncoder.forward(encoder, src, mask, padding, is_causal)
    finally:
        encoder.norm = norm
    found = found.masked_fill(masked[:, :, None], 0.0)
    return found if norm is None else norm(found)

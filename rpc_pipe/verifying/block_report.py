"""The blocks of a user's model, and the payloads between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dependency import ConfigError
from ..launching import launcher_link as link
from ..model.observed_model import BlockCall, Crossing, ObservedModel, observe
from ..model.partition import LayerPartition
from ..model.user_model import UserModel
from ..system.sizes import format_bytes
from ..workers.compute.randomness import Randomness
from ..workers.compute.sequence import state_dropped
from ..workers.compute.slices import has_own_state
from ..workers.transport.payload import distinct_tensors
from .proof import seeded
from .verify_options import VerifyOptions


def list_blocks(options: VerifyOptions) -> None:
    """Report the calls of blocks with their parameters, and the payload of the cut after each."""
    made = seeded(options.model, options.seed)
    if made.is_layers:
        _list_layers(made, options)
        return
    args, kwargs = made.call(made.batch)
    observed = observe(made.model, args, kwargs, blocks=options.blocks, at_least=options.num_workers)  # type: ignore[arg-type]
    cuts = [_payload(observed, after) for after in range(1, observed.num_blocks)]
    title = f"{type(made.model).__name__}: {observed.num_blocks} calls of blocks; behind each, what a cut there passes"
    notes = [*observed.notes, *(f"{name} is on both sides of every cut" for name in _always_shared(observed))]
    _tell(options, title, observed.blocks, [*cuts, None], notes)


def _list_layers(made: UserModel, options: VerifyOptions) -> None:
    """Report the layers of a list, and the output of each: they run once, on the batch."""
    tree, _ = made.pair(made.batch)
    layers, blocks, cuts = LayerPartition(made.layers(), 1).build(0, Randomness(options.seed)), [], []
    for index, layer in layers:
        name = f"layer {index} ({type(layer).__name__})"
        try:
            with torch.no_grad():
                tree = (state_dropped(layer) if has_own_state(layer) else layer)(tree)
        except Exception as error:
            raise ConfigError(f"{name} raised {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        parameters = list(layer.parameters())
        count, size = sum(p.numel() for p in parameters), sum(p.nbytes for p in parameters)
        blocks.append(BlockCall(name, str(index), count, size))
        cuts.append([Crossing(name, tuple(t.shape), t.dtype, t.nbytes) for t in distinct_tensors(tree)])
    title = f"{len(layers)} layers; behind each, what a cut there passes"
    _tell(options, title, blocks, [*cuts[:-1], None], [])


def _tell(
    options: VerifyOptions,
    title: str,
    blocks: Sequence[BlockCall],
    cuts: Sequence[list[Crossing] | str | None],
    notes: Sequence[str],
) -> None:
    rows, lines = [], [title]
    for i, (block, payload) in enumerate(zip(blocks, cuts, strict=True)):
        more, said = _behind(payload)
        rows.append({"name": block.name, "parameters": block.num_parameters, "bytes": block.num_bytes, **more})
        held = format_bytes(block.num_bytes)
        lines.append(f"{i:3} {block.name}: {block.num_parameters:,} parameters, {held}{said}")
    text = "\n".join([*lines, *notes])
    link.tell(kind="result", text=text, json={"model": options.model, "blocks": rows}, exit_code=0)


def _behind(payload: list[Crossing] | str | None) -> tuple[dict[str, Any], str]:
    """Return the payload of the cut behind a block, or the reason against a cut, for JSON and as text."""
    if payload is None:
        return {}, ""
    if isinstance(payload, str):
        return {"refused": payload}, f"; no cut: {payload}"
    tensors = [
        {"made_by": t.made_by, "shape": list(t.shape), "dtype": str(t.dtype).removeprefix("torch."),
         "bytes": t.num_bytes}
        for t in payload
    ]  # fmt: skip
    size = sum(tensor.num_bytes for tensor in payload)
    named = ", ".join(f"{t['dtype']}{t['shape']} of {t['made_by']}" for t in tensors) or "nothing"
    return {"payload_bytes": size, "payload": tensors}, f" -> {format_bytes(size)}: {named}"


def _payload(observed: ObservedModel, after: int) -> list[Crossing] | str:
    """Return the payload of the cut behind a number of blocks, or the reason against a cut."""
    cut = [range(after), range(after, observed.num_blocks)]
    try:
        observed.check(cut)
    except ConfigError as error:
        return str(error)
    return observed.crossing(cut)[0]


def _always_shared(observed: ObservedModel) -> list[str]:
    """Return the parameters that every cut in two leaves on both sides."""
    count = observed.num_blocks
    found = [set(observed.shared([range(after), range(after, count)])) for after in range(1, count)]
    return sorted(set.intersection(*found)) if found else []

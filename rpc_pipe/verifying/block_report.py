"""The blocks of a user's model, and the payloads between them."""

from collections.abc import Sequence
from typing import Any

import torch

from ..dependency import ConfigError
from ..launching import launcher_link as link
from ..model.observed_model import BlockCall, Crossing, ObservedModel, observe
from ..model.user_model import UserModel
from ..system.sizes import format_bytes
from ..workers.transport.payload import distinct_tensors
from .proof import layers_of, seeded
from .verify_options import VerifyOptions


def list_blocks(options: VerifyOptions) -> None:
    """Report the calls of blocks with their parameters, and the payload of the cut after each."""
    made, payloads = seeded(options.model, options.seed), list[list[Crossing] | str]()
    if made.is_layers:
        blocks, outputs = _layers(made, options.seed)
        what, notes = f"{len(blocks)} layers", list[str]()
        payloads += outputs[:-1]
    else:
        args, kwargs = made.call(made.batch)
        observed = observe(made.model, args, kwargs, blocks=options.blocks, at_least=options.num_workers)  # type: ignore[arg-type]
        blocks, what = observed.blocks, f"{type(made.model).__name__}: {observed.num_blocks} calls of blocks"
        cuts = [[range(after), range(after, len(blocks))] for after in range(1, len(blocks))]
        payloads += [_payload(observed, cut) for cut in cuts]
        always = set.intersection(*(set(observed.shared(cut)) for cut in cuts)) if cuts else set()
        notes = [*observed.notes, *(f"{name} is on both sides of every cut" for name in sorted(always))]
    rows, lines = [], [f"{what}; behind each, what a cut there passes"]
    for i, (block, payload) in enumerate(zip(blocks, [*payloads, None], strict=True)):
        more, said = _behind(payload)
        rows.append({"name": block.name, "parameters": block.num_parameters, "bytes": block.num_bytes, **more})
        held = format_bytes(block.num_bytes)
        lines.append(f"{i:3} {block.name}: {block.num_parameters:,} parameters, {held}{said}")
    text = "\n".join([*lines, *notes])
    link.tell(kind="result", text=text, json={"model": options.model, "blocks": rows}, exit_code=0)


def _layers(made: UserModel, seed: int) -> tuple[Sequence[BlockCall], list[list[Crossing]]]:
    """Return the layers of a list, and the output of each: they run once, on the batch."""
    tree, _ = made.pair(made.batch)
    blocks, cuts = [], []
    for index, layer in enumerate(layers_of(made, seed)):
        name = f"layer {index} ({type(layer).__name__})"
        try:
            with torch.no_grad():
                tree = layer(tree)
        except Exception as error:
            raise ConfigError(f"{name} raised {type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
        sizes = [(parameter.numel(), parameter.nbytes) for parameter in layer.parameters()]
        blocks.append(BlockCall(name, str(index), *map(sum, zip(*sizes, (0, 0), strict=True))))
        cuts.append([Crossing(name, tuple(t.shape), t.dtype, t.nbytes) for t in distinct_tensors(tree)])
    return blocks, cuts


def _behind(payload: list[Crossing] | str | None) -> tuple[dict[str, Any], str]:
    """Return the payload of the cut behind a block, or the reason against a cut, for JSON and as text."""
    if payload is None:
        return {}, ""
    if isinstance(payload, str):
        return {"refused": payload}, f"; no cut: {payload}"
    tensors, named, size = [], [], sum(tensor.num_bytes for tensor in payload)
    for each in payload:
        kind, shape = str(each.dtype).removeprefix("torch."), list(each.shape)
        tensors.append({"made_by": each.made_by, "shape": shape, "dtype": kind, "bytes": each.num_bytes})
        named.append(f"{kind}{shape} of {each.made_by}")
    return {"payload_bytes": size, "payload": tensors}, f" -> {format_bytes(size)}: {', '.join(named) or 'nothing'}"


def _payload(observed: ObservedModel, cut: list[range]) -> list[Crossing] | str:
    """Return the payload of a cut in two, or the reason against it."""
    try:
        observed.check(cut)
    except ConfigError as error:
        return str(error)
    return observed.crossing(cut)[0]

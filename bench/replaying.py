"""The reference of `rpc-pipe verify` for lists of layers: what benchmarks and tests compare asynchronous runs with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rpc_pipe.dependency import Spec
from rpc_pipe.model.partition import LayerPartition
from rpc_pipe.verifying.reference import Reference, Replica
from rpc_pipe.workers.compute.shard import LossFn


def replay_of(
    spec: Spec, layers: Sequence[nn.Module], ranges: Sequence[range], loss_fn: LossFn, *more: Any, **options: Any
) -> Reference:
    """Return the reference for built layers, of which every route gets copies; `ranges` are those of the stages."""
    cut = LayerPartition(list(layers), len(ranges), [len(each) for each in ranges])
    replicas = [Replica(copy.deepcopy(nn.Sequential(*layers)), loss_fn) for _ in range(spec.num_routes)]
    return Reference(spec, replicas, cut, *more, **options)


@torch.no_grad()
def held_out(replay: Reference, inputs: Tensor, targets: Tensor) -> float:
    """Return the loss of one batch of tensors by the newest weights, or by what routes are pulled to."""
    replica = replay.replicas[0]
    modes = [(each, each.training) for each in replica.module.modules()]
    output = functional_call(replica.module.eval(), replay.state_dict(), (inputs,))
    for each, mode in modes:
        each.training = mode
    return float(replica.loss_fn(output, targets))

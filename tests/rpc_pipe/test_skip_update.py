"""Updates that are left out by the norm of all gradients: one decision for the whole model, on any cut."""

import copy
from functools import partial

import pytest
import torch
from refusals import refused
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from rpc_pipe import Pipeline, Training
from rpc_pipe.dependency import NotFinite

torch.manual_seed(0)
#: one norm is too large, and one is no number
BATCHES = [(torch.randn(16, 8) * scale, torch.randint(5, (16,))) for scale in (1, 1, 30, 1, float("nan"), 1, 1)]
LAYERS = [nn.Linear(8, 32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5)]
ADAM, STEPS = partial(torch.optim.AdamW, lr=0.01), partial(StepLR, step_size=2, gamma=0.5)


def is_large(norm):
    return not norm < 3.0


def trained(pipe, streamed=False):
    with pipe:
        list(pipe.train(BATCHES) if streamed else map(pipe.step, BATCHES))
        state = {name: tensor.clone() for name, tensor in pipe.weights.state_dict().items()}
        if pipe._session.shards and next(pipe._session.shards).updating.average is not None:
            with pipe.weights.averaged():
                state |= {f"average.{name}": tensor for name, tensor in pipe.weights.state_dict().items()}
        return state


def pipeline(skip_update=is_large, training=None, **options):
    options = {"num_workers": 2, "num_microbatches": 4} | options
    parts = Training(ADAM, STEPS, skip_update=skip_update, **(training or {}))
    return Pipeline(copy.deepcopy(nn.Sequential(*LAYERS)), nn.functional.cross_entropy, training=parts, **options)


def plainly(routes, max_grad_norm=float("inf"), accumulate=1, ema_decay=0.5, grad_scaler=None):
    model = copy.deepcopy(nn.Sequential(*LAYERS))
    optimizer, parameters = ADAM(model.parameters()), list(model.parameters())
    scheduler, average = STEPS(optimizer), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema_decay))
    for number, (x, y) in enumerate(BATCHES, 1):
        microbatches = list(zip(x.chunk(4), y.chunk(4), strict=True))
        for route in range(routes):
            held = [parameter.grad for parameter in parameters]
            if route:
                optimizer.zero_grad()
            for a, b in microbatches[route::routes]:
                (nn.functional.cross_entropy(model(a), b) / 4 / accumulate).backward()
            for parameter, grad in zip(parameters, held, strict=True) if route else ():
                parameter.grad = grad + parameter.grad
        if number % accumulate:
            continue
        if not is_large(float(nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm))):
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
        optimizer.zero_grad()
    return model.state_dict() | {f"average.{name}": tensor for name, tensor in average.module.state_dict().items()}


CASES = [
    ({}, {"num_workers": 1}),
    ({"max_grad_norm": 0.5}, {"num_workers": 3}),
    ({"ema_decay": 0.5}, {"num_workers": 4, "replicas": 2, "zero": 1}),
    ({"max_grad_norm": 0.5, "ema_decay": 0.5}, {"schedule": "zb-h1", "num_workers": 4, "replicas": 2}),
    ({"accumulate": 2}, {"schedule": "interleaved", "num_workers": 3}),
    ({"grad_scaler": torch.amp.GradScaler("cpu", init_scale=4.0)}, {"schedule": "chimera"}),
]


@pytest.mark.parametrize(("training", "options"), CASES, ids=lambda each: " ".join(map(str, each)))
def test_the_whole_model_skips_as_one_process_does(training, options):
    routes = options.get("replicas", 2 if "schedule" in options and options["schedule"] == "chimera" else 1)
    assert_same(trained(pipeline(training=training, **options)), plainly(routes, **training))


@pytest.mark.parametrize("training", [{}, {"max_grad_norm": 0.5, "ema_decay": 0.5}])
def test_an_early_update_is_taken_back(training):
    training = training | {"post_validation": True}
    found = trained(pipeline(training=training, schedule="zb-v"), streamed=True)
    del training["post_validation"]
    assert_same(found, plainly(1, **training))


def assert_same(found, expected):
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_versions_skip_alike_on_any_cut():
    one, two = (trained(pipeline(schedule="pipedream-2bw", num_workers=n), streamed=True) for n in (1, 2))
    assert all(tensor.isfinite().all() for tensor in one.values())
    assert one.keys() == two.keys()


def test_each_update_asks_once_with_the_same_norm():
    """A rule may count, and workers that are threads have one."""
    asked = {1: [], 3: []}
    for workers, norms in asked.items():
        trained(pipeline(lambda norm, norms=norms: norms.append(norm) or is_large(norm), num_workers=workers))
    assert len(asked[1]) == len(BATCHES) and repr(asked[1]) == repr(asked[3])


def test_a_loss_that_is_no_number_ends_a_run_that_does_not_skip_it():
    with pytest.raises(NotFinite):
        trained(pipeline(lambda norm: False))


@pytest.mark.parametrize(("rule", "schedule"), [(3.0, "1f1b"), (is_large, "pipedream")])
def test_a_rule_needs_a_norm_of_whole_steps(rule, schedule):
    with refused("skip_update"):
        pipeline(rule, schedule=schedule)


def test_a_decision_by_the_gradients_of_one_stage_is_told(caplog):
    """`on_gradients` sees one stage: a script that left out updates in it trained differently on each cut, unseen."""

    def leave_out(parameters):
        for parameter in parameters.values():
            parameter.grad = None

    for workers in 1, 2:
        with pipeline(None, num_workers=workers) as pipe:
            pipe.on_gradients(0, leave_out)
            pipe.step(BATCHES[0])
            pipe.step(BATCHES[1])
        assert len([record for record in caplog.records if record.name == "rpc_pipe.modifying"]) == workers - 1

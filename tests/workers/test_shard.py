"""A shard computes what its layers compute inside one model, or says in one sentence why not."""

import threading
from collections import UserList, deque

import pytest
import torch
from refusals import refused
from torch import nn

from rpc_pipe.verifying.keyed import holding
from rpc_pipe.workers.compute.backward_state import put_back
from rpc_pipe.workers.compute.modules import torch_internals
from rpc_pipe.workers.compute.modules.borders import ForwardArgs, InputGradients, without_views
from rpc_pipe.workers.compute.modules.module_state import KeptAttribute
from rpc_pipe.workers.compute.modules.randomness import Randomness, computing
from rpc_pipe.workers.compute.sequences.slices import Layers
from rpc_pipe.workers.compute.shard import Shard
from rpc_pipe.workers.compute.updating import Training
from rpc_pipe.workers.transport.payload import pack, unpack

ROWS = {"small": 4, "large": 400}


def shard(*layers, stage=1, **options):
    loss_fn = options.pop("loss_fn", None)
    training = Training(**options)
    return Shard(stage, Layers(list(enumerate(layers))), Randomness(0), loss_fn=loss_fn, training=training)


class Writing(nn.Module):
    """Notes where its input lies, and writes it."""

    def forward(self, x):
        self.address = x.data_ptr()
        return x.mul_(2)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_what_arrives_may_be_written_in_place(rows):
    """It was a leaf, which autograd lets nobody write, but for a first layer with an attribute `inplace`."""
    arrived = torch.randn(rows, 4)
    before, writing = arrived.clone(), Writing()
    stage = shard(nn.Identity(), writing)
    made = unpack(stage.output(stage.forward(ForwardArgs(0, 0, pack(arrived.requires_grad_())))[0]))
    assert torch.equal(made, before * 2)
    (grad,) = unpack(stage.backward(0, pack((torch.ones(rows, 4),))))
    assert torch.equal(grad, torch.full((rows, 4), 2.0))
    assert (writing.address == arrived.data_ptr()) == (rows == ROWS["large"]), "what is large is not copied"


class Turning(nn.Module):
    """Returns a view."""

    def forward(self, x):
        return x.T.contiguous().T


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("first", [Turning, nn.Identity])
def test_gradients_of_what_is_written_through_a_view_are_laid_out_as_inside_one_model(first, rows, split):
    """They came as they were given, and a bias was summed in another order."""
    x, grad, strides = torch.randn(rows, 4, requires_grad=True), torch.randn(rows, 4), []
    between = x * 1
    between.register_hook(lambda grad: strides.append(grad.stride()))
    Writing()(first()(between)).backward(grad)
    stages = shard(first(), stage=0), shard(Writing())
    payload = pack(between.detach().requires_grad_())
    for stage in stages:
        payload = stage.output(stage.forward(ForwardArgs(0, 0, payload, split=split))[0])
    grads = pack((grad,))
    for stage in reversed(stages):
        grads = (stage.backward_inputs if split else stage.backward)(0, grads)
    (found,) = unpack(grads)
    assert torch.equal(found, x.grad) and [found.stride()] == strides


def test_a_write_is_noticed_by_a_backward_that_needs_what_was_there():
    """With workers in one process, as with stages of one worker, the memory is that of the stage before."""
    x = torch.randn(ROWS["large"], 4, requires_grad=True)
    y = x.tanh()
    shard(Writing()).forward(ForwardArgs(0, 0, pack(y)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("recompute", [False, True])
def test_the_users_batch_is_left_alone(recompute):
    """Microbatches are views of one tensor: to write one changed the version of all, and backward complained."""
    x, y = torch.ones(2, 4), torch.ones(2, 4)
    stage = shard(Writing(), nn.Linear(4, 4), stage=0, loss_fn=lambda out, target: (out - target.add_(1)).sum())
    for m in (0, 1):
        inputs, target = pack(x[m : m + 1]), y[m : m + 1]
        stage.forward(ForwardArgs(0, m, inputs, target=target, share=0.5, recompute=recompute))
    for m in (0, 1):
        if recompute:
            stage.recompute(0, m)
        stage.backward(m, None)
    assert torch.equal(x, torch.ones(2, 4)) and torch.equal(y, torch.ones(2, 4))
    assert torch.equal(stage.parameters()[0].grad, torch.full((4, 4), 2.0))


def test_what_is_handed_on_and_lives_on_is_a_copy():
    """A counter that was handed on had been raised again when the next stage read it."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x, self.count, self.weight[:2]

    counting = Counting()
    inputs = pack(torch.ones(2, requires_grad=True) * 2)
    stage = shard(counting)
    first, second = (stage.output(stage.forward(ForwardArgs(0, m, inputs))[0]) for m in (0, 1))
    first, second = (without_views(unpack(payload)) for payload in (first, second))
    assert [float(made[1]) for made in (first, second)] == [1, 2]
    with torch.no_grad():
        counting.weight.zero_()
    assert torch.equal(second[2], torch.ones(2))


# --- recomputation


def recomputed(layer, rounds=3):
    """Run forwards, then recompute each and run backward."""
    stage = shard(layer)
    for m in range(rounds):
        stage.forward(ForwardArgs(0, m, pack(torch.randn(2, 4).requires_grad_()), recompute=True))
    for m in range(rounds):
        stage.recompute(0, m)
        stage.backward(m, pack((torch.ones(2, 4),)))
    stage.update()


class Depending(nn.Module):
    """Its output depends on something that it changes."""

    def __init__(self, big=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("table", torch.zeros(2**19 if big else 4))
        self.calls, self.change = [], lambda: None

    def forward(self, x):
        y = x * self.weight + self.frozen + self.table[:4] + len(self.calls)
        self.change()
        return y


def test_a_queue_that_grows_is_noticed():
    layer = Depending()
    layer.calls, layer.change = UserList(), lambda: layer.calls.append(1)
    with refused("layer"):
        recomputed(layer)


@pytest.mark.parametrize("what", [1, torch.ones(1)], ids=["numbers", "tensors"])
@pytest.mark.parametrize("box", [list, deque])
def test_a_list_that_grows_is_what_it_was(what, box):
    layer = Depending()
    layer.calls, layer.change = box(), lambda: layer.calls.append(what)
    recomputed(layer)
    assert len(layer.calls) == 3


@pytest.mark.parametrize("by", [1e-6, 0])
def test_a_frozen_parameter_that_is_written_is_noticed(by):
    """Also if the first forward writes what was there: a limit on weights that they keep at first."""
    layer = Depending()
    layer.change = lambda: layer.frozen.add_(by)
    with refused("layer"):
        recomputed(layer)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_scripted_layer_with_buffers_trains_and_is_computed_again():
    """A script has no dict of its buffers: its first forward failed."""
    layer = torch.jit.script(nn.BatchNorm1d(4))
    recomputed(layer)
    assert int(layer.num_batches_tracked) == 3


def test_a_buffer_is_copied_on_if_the_first_two_forwards_write_it():
    constant, written = Depending(big=True), Depending(big=True)
    written.change = lambda: written.table.add_(1)
    for layer, copies in ((constant, 2), (written, 3)):
        stage, copied = shard(layer), []
        table = layer.table
        for m in range(3):
            stage.forward(ForwardArgs(0, m, pack(torch.randn(2, 4).requires_grad_()), recompute=True))
            copied.append(table in stage._inputs[m][1][0]._copies)
        assert sum(copied) == copies
    recomputed(written)


# --- what trains nothing, or cannot be trained


def train_step(loss_fn, *layers, **options):
    stage = shard(*layers, stage=0, loss_fn=loss_fn, **options)
    stage.forward(ForwardArgs(0, 0, pack(torch.ones(2, 4)), target=torch.ones(2, 4), share=1.0))


mse = nn.functional.mse_loss


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (lambda output, target: mse(output, target).item(), "loss_fn"),
        (lambda output, target: output - target, "loss_fn"),
        (lambda output, target: (1, 2, 3), "loss_fn"),
        (lambda output, target: mse(output, target).detach(), "loss"),
    ],
)
def test_a_loss_that_cannot_be_trained_on(loss_fn, message):
    with refused(message):
        train_step(loss_fn, nn.Linear(4, 4))


def test_a_model_that_is_frozen_as_a_whole():
    with refused("loss"):
        train_step(mse, nn.Linear(4, 4).requires_grad_(False), optimizer=torch.optim.AdamW)


def test_a_loss_of_one_number_in_any_shape():
    train_step(lambda output, target: mse(output, target).reshape(1, 1), nn.Linear(4, 4))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"optimizer": torch.optim.LBFGS}, "optimizer"),
        (
            {"optimizer": torch.optim.AdamW, "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
            "lr_scheduler",
        ),
    ],
)
def test_optimizers_that_cannot_work(options, message):
    with refused(message):
        shard(nn.Linear(4, 4), **options)


def test_a_layer_that_is_in_evaluation_mode_stays_so():
    """A backbone whose owner had called `eval()` was put back into training mode by the first step."""
    backbone, head = nn.Sequential(nn.Linear(4, 4), nn.Dropout()).eval(), nn.Dropout()
    stage = shard(backbone, head)
    modes = []
    for mode in (True, False, False, True):
        stage.train(mode)
        modes.append((backbone.training, backbone[1].training, head.training))
    trained, evaluated = (False, False, True), (False, False, False)
    assert modes == [trained, evaluated, evaluated, trained]


def test_order_matters_where_forwards_write_buffers():
    assert shard(nn.BatchNorm1d(4)).stateful
    assert not shard(nn.Linear(4, 4), nn.LayerNorm(4)).stateful


def test_backward_gives_the_bits_of_torchs_own():
    weight, x = torch.randn(5, 3).requires_grad_(), torch.randn(2, 5)
    loss, others = (x @ weight).exp().mean(), [x @ weight, (x @ weight).to_sparse()]
    grads = [torch.randn(2, 3), torch.randn(2, 3).to_sparse()]
    torch.autograd.backward([loss, *others], [None, *grads], retain_graph=True)
    expected, weight.grad = weight.grad, None
    torch_internals.run_backward([loss, *others], [None, *grads])
    assert torch.equal(weight.grad, expected)


def test_backward_refuses_what_torch_refuses():
    weight = torch.randn(3).requires_grad_()
    with pytest.raises(RuntimeError, match="scalar"):
        torch_internals.run_backward([weight * 2], [None])
    with pytest.raises(RuntimeError, match="real scalar"):
        torch_internals.run_backward([(weight * 1j).sum()], [None])
    with pytest.raises(RuntimeError, match="shape"):
        torch_internals.run_backward([weight * 2], [torch.randn(4)])


def test_a_backward_gives_no_gradient_of_one_that_has_failed_before():
    """In threads mode a pipeline goes on after a failure; what the failed backward had brought must not count."""
    owed, first, second = InputGradients(), torch.zeros(2, 3).requires_grad_(), torch.zeros(2, 3).requires_grad_()
    owed.watch([first])
    owed.expect([first])
    first.T.backward(torch.ones(3, 2))  # a gradient that is laid out otherwise than its leaf; nobody comes to take it
    owed.watch([second])
    owed.expect([second])
    (2 * second).sum().backward()
    (found,) = owed.taken([second])
    assert torch.equal(found, torch.full((2, 3), 2.0))


def test_weights_that_change_behind_a_forward_that_failed_are_not_written_by_it():
    """An evaluation compared them with what they had been, and the next asynchronous step was refused."""
    made = shard(nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="in layer 0"):
        made.forward(ForwardArgs(0, 0, pack(torch.ones(2, 5))))
    with torch.no_grad():
        made.parameters()[0].mul_(2)
        made.forward(ForwardArgs(0, 0, pack(torch.ones(2, 4))))
    assert made.state.weights == []


@pytest.mark.parametrize("enters", [True, False])
def test_ctrl_c_while_weights_are_exchanged_leaves_nobody_waiting(enters):
    class Place(dict):
        interrupted = enters

        def __setitem__(self, key, weight):
            if self.interrupted:
                self.interrupted = False
                raise KeyboardInterrupt
            super().__setitem__(key, weight)

    place, free = Place(), []
    with pytest.raises(KeyboardInterrupt), holding([(place, "weight", 0)], [torch.ones(1)], [torch.zeros(1)]):
        place.interrupted = True
    thread = threading.Thread(target=lambda: free.append(computing.acquire(timeout=0.2)) or computing.release())
    thread.start()
    thread.join()
    assert free == [True]
    assert not enters or place == {"weight": torch.zeros(1)}


def test_an_attribute_that_a_later_forward_has_unset_is_unset_behind_a_backward():
    """The tensor of an earlier forward stayed, so that the next forward took it for its own."""
    module, kept = nn.Module(), torch.ones(1)
    module.kept = None
    with put_back([KeptAttribute((module, "kept"), kept)]):
        assert module.kept is kept
    assert module.kept is None

"""Weights that other processes train are not computed with by hand."""

import copy
import pickle
from functools import partial

import pytest
import torch
from refusals import failed, refused
from threads_as_processes import each_worker
from torch import nn
from torch.nn.functional import mse_loss

from rpc_pipe.dependency import ModelError, PipeError
from rpc_pipe.model.stale_weights import refuse_stale_weights
from rpc_pipe.pipeline import Pipeline, Training


class TestCallsByHand:
    """In a job a process has the trained weights of its own stages only."""

    x, y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.linspace(1, -1, 32).reshape(8, 4)

    @staticmethod
    def chain():
        torch.manual_seed(0)
        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])

    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

        def forward(self, x):
            for block in self.blocks:
                x = torch.tanh(block(x))
            return x

    @pytest.mark.parametrize("make", [Blocks, chain.__func__, lambda: list(TestCallsByHand.chain())])
    def test_weights_that_another_worker_trains_are_not_computed_with(self, monkeypatch, make):
        """A user called `model.generate` on worker 0 after training, and got what half a trained model says."""

        def work(worker):
            model = make()
            called = nn.Sequential(*model) if isinstance(model, list) else model
            pipe = Pipeline(model, mse_loss, training=Training(partial(torch.optim.SGD, lr=0.1)), num_microbatches=2)
            pipe.evaluate((self.x, self.y))
            untrained = mse_loss(called(self.x), self.y).item()
            pipe.step((self.x, self.y))
            with refused("model"):
                called(self.x)
            copied = copy.deepcopy(called)  # nobody trains it
            assert mse_loss(copied(self.x), self.y).item() != untrained
            trained, state = pipe.evaluate((self.x, self.y)), pipe.weights.state_dict()
            if worker == 0:
                called.load_state_dict(state)
                assert mse_loss(called(self.x), self.y).item() == pytest.approx(trained, rel=1e-6)
            pipe.step((self.x, self.y))
            with refused("model"):
                called(self.x)
            return pickle.loads(pickle.dumps(called))(self.x).shape

        assert each_worker(monkeypatch, work, 2) == [(8, 4), (8, 4)]

    @pytest.mark.parametrize("make", [Blocks, chain.__func__])
    def test_another_pipeline_with_the_same_stages_goes_on_from_what_was_trained(self, monkeypatch, make):
        def work(worker):
            model = make()
            first = Pipeline(model, mse_loss, training=Training(partial(torch.optim.SGD, lr=0.1)), num_microbatches=2)
            first.step((self.x, self.y))
            again = Pipeline(model, mse_loss, num_microbatches=2)
            assert again.evaluate((self.x, self.y)) == first.evaluate((self.x, self.y))
            with refused("model"):
                model(self.x)
            return first.step((self.x, self.y))

        assert len(set(each_worker(monkeypatch, work, 2))) == 1

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
    def test_a_scripted_layer_takes_no_hook_and_is_trained(self):
        """Any model with one failed in a job: "register_forward_pre_hook is not supported on ScriptModules"."""
        model = self.chain().append(torch.jit.script(nn.Linear(4, 4)))
        refuse_stale_weights(model, list(model[0].parameters()))
        model[0](self.x)
        with torch.no_grad():
            model[0].weight.add_(1)
        assert model[4](self.x).shape == self.x.shape
        with refused("model"):
            model(self.x)

    @pytest.mark.parametrize("read", [lambda w: w.detach().square().mean(), lambda w: float(w.data.norm())])
    def test_a_loss_that_reads_them_is_refused(self, monkeypatch, read):
        """A penalty on the first layer, by its detached weight, used the first numbers: 1.695863 for 1.697492."""

        def work(worker):
            model = self.chain()
            pipe = Pipeline(model, lambda output, y: mse_loss(output, y) + read(model[0].weight), num_microbatches=2)
            with failed(ModelError) if worker else pytest.raises(PipeError):  # of worker 0: its peer has gone
                pipe.step((self.x, self.y))

        each_worker(monkeypatch, work, 2)

    def test_a_loss_may_take_their_form_and_read_what_is_trained_here(self, monkeypatch):
        models = [self.chain() for _ in range(2)]  # here, as threads share a generator

        def work(worker):
            model = models[worker]

            def loss(output, y):
                zero = torch.zeros_like(model[0].weight).sum() * model[0].weight.numel()
                return mse_loss(output, y.to(model[0].weight)) + zero + model[3].weight.detach().square().mean()

            pipe = Pipeline(model, loss, training=Training(partial(torch.optim.SGD, lr=0.1)), num_microbatches=2)
            return pipe.step((self.x, self.y))

        model = self.chain()
        expected = mse_loss(model(self.x), self.y) + model[3].weight.square().mean()
        assert each_worker(monkeypatch, work, 2) == [pytest.approx(expected.item())] * 2

    def test_other_stages_are_refused_where_their_weights_are_from_before(self):
        model = self.chain()
        here = [*model[0].parameters(), *model[1].parameters()]
        refuse_stale_weights(model, here)
        refuse_stale_weights(model, [*here, *model[2].parameters()])  # nothing has been trained
        with torch.no_grad():
            here[0].add_(1)
        with refused("model"):
            refuse_stale_weights(model, [*here, *model[2].parameters()])

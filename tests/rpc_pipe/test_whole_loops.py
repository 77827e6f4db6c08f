"""What users' loops combine, on models as they are: every number is that of the same loop in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training_options import pipeline_with

from rpc_pipe import Pipeline

DECAY, NORM, MICROBATCHES = 0.7, 0.05, 2
warmed_up = partial(LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 3))


def groups(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """No weight decay for vectors and for the second half of an adapter."""
    plain = [p for name, p in named if p.dim() < 2 or "lora_B" in name]
    decayed = [p for name, p in named if not (p.dim() < 2 or "lora_B" in name)]
    options = [{"params": decayed, "weight_decay": 0.3}, {"params": plain, "weight_decay": 0.0}]
    return torch.optim.AdamW(options, lr=1e-2)


def pieces_of(batch: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    rows = len(next(iter(batch.values())))
    for i in range(MICROBATCHES):
        piece = {name: tensor.tensor_split(MICROBATCHES)[i] for name, tensor in batch.items()}
        yield len(next(iter(piece.values()))) / rows, piece


class Plain:
    """The loop as one writes it for one process: accumulation, clipping, groups, warm-up, an average of the weights."""

    def __init__(self, model: nn.Module, *, accumulate: int = 1, dtype: torch.dtype | None = None) -> None:
        self.model, self.accumulate, self.dtype = model, accumulate, dtype
        self.optimizer = groups([(name, p) for name, p in model.named_parameters() if p.requires_grad])
        self.scheduler = warmed_up(self.optimizer)
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
        self.norms: list[float] = []
        self._count = 0

    def step(self, batch: Any, loss_of: Callable[..., Tensor] = lambda output, batch: output.loss) -> float:
        total = 0.0
        for share, piece in batch if isinstance(batch, list) else pieces_of(batch):
            with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                inputs = {name: tensor for name, tensor in piece.items() if name != "wanted"}
                loss = loss_of(self.model(**inputs), piece)
            loss = loss * share
            total += loss.item()
            (loss / self.accumulate if self.accumulate > 1 else loss).backward()
        self._count += 1
        if self._count % self.accumulate == 0:
            trained = [p for p in self.model.parameters() if p.grad is not None]
            self.norms.append(nn.utils.clip_grad_norm_(trained, NORM).item())
            self.optimizer.step()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            self.optimizer.zero_grad()
        return total


def pipeline(model: Any, num_workers: int, schedule: str, loss_fn: Any = None, **options: Any) -> Pipeline:
    return pipeline_with(
        model,
        loss_fn,
        optimizer=groups,
        lr_scheduler=warmed_up,
        max_grad_norm=NORM,
        ema_decay=DECAY,
        schedule=schedule,
        num_workers=num_workers,
        num_microbatches=MICROBATCHES,
        **options,
    )


def different(state: dict[str, Tensor], model: nn.Module) -> list[str]:
    return [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, state[name])]


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def words(seed: int, *shape: int) -> Tensor:
    return torch.randint(3, 32, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.filterwarnings("ignore")
def test_an_adapted_encoder_and_decoder_moves_between_workers(tmp_path):
    """T5 with peft's LoRA in bfloat16: accumulated, clipped, averaged, saved by three workers, gone on with by two."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    config = transformers.T5Config(
        num_layers=2, d_model=16, d_kv=4, d_ff=32, num_heads=2, vocab_size=32, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip

    def made() -> nn.Module:
        torch.manual_seed(0)
        adapter = peft.LoraConfig(r=2, target_modules=["q", "v", "wi"], init_lora_weights=False)
        return peft.get_peft_model(transformers.T5ForConditionalGeneration(config), adapter)

    batches = [{"input_ids": words(i, 4, 7), "labels": words(-i, 4, 5)} for i in range(6)]
    plain = Plain(made(), accumulate=2, dtype=torch.bfloat16)
    expected = [plain.step(batch) for batch in batches]
    options = {"accumulate": 2, "example": batches[0]}
    pipe = pipeline(made(), 3, "1f1b", **options)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [pipe.step(batch) for batch in batches[:3]]  # one step after an update
    pipe.checkpoints.save(tmp_path)
    pipe = pipeline(made(), 2, "zb-h1", **options)
    pipe.checkpoints.load(tmp_path)
    with torch.autocast("cpu", torch.bfloat16):
        losses += [pipe.step(batch) for batch in batches[3:]]
    assert losses == expected
    assert pipe.grad_norm == plain.norms[-1]
    assert not different(pipe.weights.state_dict(), plain.model)
    with pipe.weights.averaged():
        assert not different(pipe.weights.state_dict(), plain.average.module)
    made().save_pretrained(tmp_path / "adapter", state_dict=pipe.weights.state_dict())
    torch.manual_seed(0)
    taken = peft.PeftModel.from_pretrained(transformers.T5ForConditionalGeneration(config), tmp_path / "adapter")
    assert not different(pipe.weights.state_dict(), taken)


@pytest.mark.filterwarnings("ignore")
def test_a_router_loss_past_the_blocks_with_lengths_that_differ():
    """A mixture of experts whose router loss bypasses the blocks; caches on; each microbatch of another length."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        num_hidden_layers=4, hidden_size=16, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True, router_aux_loss_coef=0.5,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    plain = Plain(copy.deepcopy(model))
    pipe = pipeline(model, 3, "zb-h1")
    for lengths in ((6, 4), (4, 6)):
        batch = []
        for length in lengths:
            ids, mask = words(length, 2, length), torch.ones(2, length, dtype=torch.long)
            mask[1, length // 2 :] = 0
            batch.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
        assert pipe.step(microbatches=batch) == plain.step([(0.5, piece) for piece in batch])
    assert not different(pipe.weights.state_dict(), plain.model)


class UNet(nn.Module):
    """Batch normalisation at every step, skips past the others, a stem that is frozen."""

    class Step(nn.Module):
        def __init__(self, before: int, after: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x)).relu()

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 1).requires_grad_(False)
        self.downs = nn.ModuleList([self.Step(4, 4), self.Step(4, 6)])
        self.ups = nn.ModuleList([self.Step(10, 4), self.Step(8, 4)])
        self.head = nn.Conv2d(4, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.stem(x)]
        for down in self.downs:
            skips.append(nn.functional.max_pool2d(down(skips[-1]), 2))
        x = skips.pop()
        for up in self.ups:
            x = up(torch.cat([nn.functional.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.head(x)


def squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(output, batch["wanted"])


def test_skips_with_running_statistics_a_frozen_stem_and_hooks(tmp_path):
    """A hook halves one gradient, on the stage where its parameter is, once a microbatch as in one process."""
    batches = [{"x": drawn(i, 5, 1, 8, 8), "wanted": drawn(-1 - i, 5, 1, 8, 8)} for i in range(4)]

    def made() -> nn.Module:
        torch.manual_seed(0)
        model = UNet()
        model.ups[0].conv.weight.register_hook(lambda grad: grad / 2)
        return model

    plain = Plain(made())
    expected = [plain.step(batch, squares) for batch in batches]
    pipe = pipeline(made(), 4, "1f1b", squares)
    losses = [pipe.step(batch) for batch in batches[:2]]
    pipe.checkpoints.save(tmp_path)
    for num_workers, schedule in ((3, "zb-h1"), (2, "gpipe-recompute"), (1, "1f1b")):
        pipe = pipeline(made(), num_workers, schedule, squares, example=batches[0])
        pipe.checkpoints.load(tmp_path)
        assert losses + [pipe.step(batch) for batch in batches[2:]] == expected
        assert not different(pipe.weights.state_dict(), plain.model)
    output = plain.model.eval()(batches[0]["x"])
    torch.testing.assert_close(pipe.predict({"x": batches[0]["x"]}), output)
    error = pipe.evaluate(batches[0], metric=lambda output, batch: (output - batch["wanted"]).abs().mean())
    assert error == pytest.approx((output - batches[0]["wanted"]).abs().mean().item(), rel=1e-6)

"""Generation of text by a causal model of transformers, cut into stages (`dependency/decoding.py` has the relation).

A stage runs its blocks for one token after the other, and keeps their keys and values. The last stage chooses.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, starmap
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .decoded_text import Text
from .dependency import ConfigError, F, Order, Spec
from .dependency.decoding import Decoding, decoding_part
from .dependency.order import routes
from .system.garbage import uncollected
from .workers.actor import WorkerActor
from .workers.compute.sequences.slice_check import CACHES
from .workers.compute.sequences.slices import Slice
from .workers.step import ActionContext, StepData, StepInput
from .workers.transport.call import Call
from .workers.transport.payload import Payload, Tree, pack, unpack

if TYPE_CHECKING:
    from .session import Session

#: (numbers of rows, their new tokens of shape (rows, 1)) -> None
OnTokens = Callable[[range, Tensor], None]
#: rounds of tokens until all workers look again whether all texts have ended
_ROUNDS = 64
#: of a payload with tokens alone, as of most rounds
_CHOSEN = pack((torch.empty(0, device="cpu"),)).skeleton
_REFUSED = {
    "streamer": "tokens come in groups of rows; pass on_tokens=lambda rows, tokens: streamer.put(tokens[:, 0].cpu())",
    "assistant_model": "assisted decoding needs a second model on one process; leave it out",
    "token_healing": "prompts are returned as they are; leave it out",
    "custom_generate": "the pipeline decodes in a loop of rounds; leave it out",
    **dict.fromkeys(CACHES, "keys and values stay with the stages; leave it out"),
}


@dataclass(eq=False)
class Decoder:
    """The texts on one worker.

    Args:
        placed: the schedule that places the stages.
        fields: the arguments of all sequences.
        groups: the same by group.
        options: further arguments of transformers' `generate`.
        seed: of all draws.
        stack: of contexts that last as long.
    """

    actor: WorkerActor
    placed: Spec
    fields: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    options: Mapping[str, Any]
    seed: int
    on_tokens: OnTokens | None
    stack: ExitStack

    def __post_init__(self) -> None:
        actor, load, self._last = self.actor, self.actor.backend.load, self.placed.last_stage
        said: dict[str, logging.LogRecord] = {}  # transformers prepares several texts, and would warn for each
        log = logging.getLogger("transformers.generation.utils")
        log.addFilter(is_new := lambda record: said.setdefault(record.getMessage(), record) is record)
        self.stack.callback(log.removeFilter, is_new)
        ends = [0, *accumulate(len(group["input_ids"]) for group in self.groups)]
        #: by stage and group
        self._texts: dict[tuple[int, int], Text] = {}
        #: by slice, its `DecodingForward`
        self._forwards: dict[Slice, Any] = {}
        of = routes(self.placed, forward_only=True)
        for stage, route in self.placed.hosted(actor.worker):
            slice: Any = actor.shards[stage, route].slice
            if slice not in self._forwards:
                self._forwards[slice] = self.stack.enter_context(slice.decoding().ready())
            self.whole = Text(slice.module, load(self.fields), self.options, range(ends[-1]))
            for number, rows in enumerate(starmap(range, pairwise(ends))):
                if of(number) == route:
                    text = self.whole.part(rows) or Text(slice.module, load(self.groups[number]), self.options, rows)
                    self._texts[stage, number] = text
        self.whole.refuse_lengths(pairwise(ends))

    def __call__(self, ctx: ActionContext) -> Payload | None:
        """Run a round of a group on a stage; an empty payload: its texts have ended."""
        (stage, _, index), spec = ctx.task.entry.action, ctx.step.batch.spec
        assert isinstance(spec, Decoding)
        text, (tokens, found) = self._texts[stage, index % spec.groups], self._arrived(ctx, index - spec.groups)
        if tokens is not None:
            if stage == 0 and self.on_tokens is not None:
                self.on_tokens(text.rows, tokens)
            if stage < self._last:  # the last one has chosen them
                text.new.append(tokens)
        text.ended |= found is True
        if text.ended or index >= spec.num_microbatches - spec.groups:
            return pack((None, True))
        with ctx.task.shard.randomness.lock:
            tokens = text.new[-1] if text.new else None
            output = self._forwards[ctx.task.shard.slice].run(found, text.inputs())
            text.seen()
            if stage < self._last:
                return pack((tokens, output))
            tokens = text.choose(output, self.seed)
            return pack((tokens, True)) if text.ended else Payload([tokens], _CHOSEN)

    def _arrived(self, ctx: ActionContext, before: int) -> tuple[Tensor | None, Tree]:
        """Return the newest tokens, and the result of the stage before; True: the texts have ended."""
        payload = ctx.source()
        if payload is None and (chosen := ctx.step.payloads.pop(F(self._last, before), None)) is not None:
            payload = chosen if ctx.worker.backend.in_step else ctx.worker.backend.ready(chosen)
        tokens, *rest = (None,) if payload is None else unpack(payload, lambda tensor, _: tensor)
        return tokens, rest[0] if rest else None

    def decoded(self, order: Order, call: Call, data: StepData, stops: bool) -> Tensor | None:
        """Return prompts with new tokens, and padding behind groups that end early.

        Args:
            stops: whether to stop if the user asks to, before all texts have ended; then return None.
        """
        actor, last, groups = self.actor, self._last, range(len(self.groups))
        new, ended, done, whole = [list[Tensor]() for _ in groups], [False for _ in groups], 0, self.whole
        texts = {group: text for (stage, group), text in self._texts.items() if stage == last}
        while not all(ended):
            rounds = min(_ROUNDS, max(1, whole.most - done))
            part = decoding_part(self.placed, actor.worker, len(groups), rounds)
            with uncollected():
                result = actor.run(StepInput(part, order, call, data, train=False))
            fresh = {group: text.new[done:] for group, text in texts.items()}
            chosen = {group: (torch.cat(each, 1), texts[group].ended) for group, each in fresh.items() if each}
            senders = sorted({part.spec.worker(F(last, group)) for group in groups})
            found = actor.hand("new tokens", chosen, senders, actor.carrier.workers)
            for group, (tokens, ended[group]) in chain.from_iterable(each.items() for each in found or []):
                new[group].append(tokens)
            done += rounds
            stop = stops and result.stop
            if actor.members is not None:  # each plane learns of a request by itself
                stop = any(actor.members.exchange(stop))
            if stop and not all(ended):
                return None
        rows = [row for tokens in new for row in torch.cat(tokens, 1)]
        return torch.cat([whole.ids.cpu(), pad_sequence(rows, True, whole.pad).cpu()], 1)


def generate(
    session: Session,
    inputs: Tree,
    max_new_tokens: int | None,
    *,
    stops: bool,
    seed: int | None = None,
    on_tokens: OnTokens | None = None,
    **options: Any,
) -> Tensor:
    """Return prompts with new tokens, of shape (rows, length), on the host.

    Args:
        stops: whether to stop if the user asks to.
        seed: of all draws; None: the pipeline's.
        on_tokens: called on the worker of the first stage with each round of tokens.
        options: of transformers' `generate`.

    Raises:
        ConfigError: the pipeline, or an option, cannot be combined with generation.
        KeyboardInterrupt: the user has asked to stop before all texts have ended.
    """
    given = dict(inputs) if isinstance(inputs, Mapping) else {"input_ids": inputs}
    fields = {**given, **{name: value for name, value in options.items() if getattr(value, "ndim", 0) > 1}}
    options = {name: value for name, value in options.items() if name not in fields}
    _refuse(session, fields, options, on_tokens)
    cut = session.cut(fields, pair=session.partition.only_inputs, whole=True)
    if session.recovery is not None:
        raise ConfigError("generate: elastic: keys and values stay with one process, to the end; leave elastic out")
    _settle(options, max_new_tokens)
    seed = session.seed if seed is None else seed
    order: Order = "ready" if session.is_alone else "fixed"

    def generated(actor: WorkerActor) -> Tensor | None:
        groups, tells = [kwargs for _, kwargs in cut.inputs], on_tokens if session.is_first else None
        with ExitStack() as stack:
            decoder = Decoder(actor, session.spec.unsliced(), fields, groups, options, seed, tells, stack)
            told = {"seed": seed, **options, "max_new_tokens": decoder.whole.most}  # objects have other names elsewhere
            name = "generate " + " ".join(f"{n}={v}" for n, v in told.items() if isinstance(v, (int, float, str)))
            call = Call(actor.worker, name, session.described, *cut.described)
            return decoder.decoded(order, call, StepData(cut.inputs, None, cut.shares, cut.rows, decode=decoder), stops)

    found = session.each(generated)[0]
    cut.finished()
    if found is None:
        raise KeyboardInterrupt("generate: the user asked to stop before all texts had ended")
    return found


def _settle(options: dict[str, Any], most: int | None) -> None:
    """Put the number of new tokens, and criteria of strings, into the options of transformers.

    Args:
        most: new tokens; None: as options or configurations have it.

    Raises:
        ConfigError: stop strings are given without their tokenizer.
    """
    config: Any = copy.deepcopy(options.get("generation_config"))
    settings: dict[str, Any] = {"use_cache": True}
    if most is not None:
        settings |= {"max_new_tokens": most, "max_length": None}
    if strings := options.pop("stop_strings", None) or getattr(config, "stop_strings", None):
        from transformers import StopStringCriteria

        if (tokenizer := options.pop("tokenizer", None)) is None:
            raise ConfigError("generate: stop_strings needs tokenizer=, the one of the prompts")
        criteria = StopStringCriteria(tokenizer, strings)
        options["stopping_criteria"] = [*options.get("stopping_criteria", ()), criteria]
        settings["stop_strings"] = None
    getattr(config, "update", options.update)(**settings)  # transformers warns of settings beside a configuration
    options["generation_config"] = config


def _refuse(session: Session, fields: Mapping[str, Any], options: Mapping[str, Any], on_tokens: object) -> None:
    """Refuse a pipeline, or an option, that cannot be combined with generation.

    Raises:
        ConfigError: there is one.
    """
    if not callable(on_tokens or print):
        raise ConfigError(f"generate: on_tokens={on_tokens!r}: must be a function of row numbers and tokens")
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise ConfigError(f"generate: {name}: {why}")
    ids, mask = fields.get("input_ids"), fields.get("attention_mask")
    if not getattr(session.partition.config, "generates", False) or not isinstance(ids, Tensor):
        raise ConfigError("generate: needs a causal model of transformers, no encoder, and input_ids, a tensor")
    if ids.dim() != 2 or not ids.numel() or ids.dtype not in (torch.int64, torch.int32):
        found = f"{str(ids.dtype).removeprefix('torch.')}{list(ids.shape)}"
        raise ConfigError(f"generate: input_ids {found}: must be int64 of (rows, tokens), one or more")
    if mask is not None and mask.shape != ids.shape:
        raise ConfigError(f"generate: attention_mask {list(mask.shape)}: must be of the shape of input_ids")

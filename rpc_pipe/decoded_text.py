"""A group of sequences on one stage, while it is generated.

On every stage transformers prepares each group: cache, masks, logits processors, stopping criteria.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from .dependency import ConfigError
from .dependency.errors import first_sentence
from .workers.compute.sequences.slice_check import CACHES

#: the only values of these options that stages can follow
_USUAL = {"return_dict_in_generate": False, "guidance_scale": 1, "prefill_chunk_size": 0}
#: of attributes of processors that do not depend on rows, and have no state
_NUMBERS = {bool, int, float, type(None)}


class Text:
    """A group of sequences on one stage.

    Args:
        fields: the group's arguments of the model's `generate`.
        options: its further arguments.
        rows: numbers of the group's sequences among all.
    """

    def __init__(self, model: Any, fields: Mapping[str, Any], options: Mapping[str, Any], rows: range) -> None:
        self.new: list[Tensor] = []
        self.ended = False
        #: arguments of a round, and those that grow, for the whole text; None: transformers prepares each round
        self._round: dict[str, Any] = {}
        self._whole: dict[str, Tensor] | None = None
        #: layers of the cache that stand for those of other stages, where this one has none of their kind
        self._elsewhere: list[Any] = []

        def prepared(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **given: Any) -> Any:
            self.model, self._ids, self._config = model, input_ids, given.pop("generation_config")
            self._processors, self._criteria, self._inputs = logits_processor, stopping_criteria, given
            during.update(_attributes(asked))
            return input_ids

        if allowed := options.get("prefix_allowed_tokens_fn"):  # called with the number of a row among all
            options = {**options, "prefix_allowed_tokens_fn": lambda row, ids: allowed(self.rows[row], ids)}
        asked, during = model, dict[Any, Any]()
        try:
            model.generate(**fields, **options, custom_generate=prepared)
        except (AttributeError, ImportError, TypeError, ValueError) as error:
            raise ConfigError(f"generate: {first_sentence(error)}") from error
        if not hasattr(self, "_ids"):
            raise ConfigError(f"generate: {type(model).__name__} has a generate of its own; let it call transformers'")
        if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
            raise ConfigError("generate: an adapter that learns prompts is not done in stages; take another")
        if during != _attributes(model):
            raise ConfigError(
                f"generate: {type(model).__name__}.generate changes the model meanwhile; change it before"
            )
        self._prompt = self._ids.shape[1]
        self._refuse()
        #: number of new tokens
        self.most = self._criteria.max_length - self._prompt
        #: the token behind a text that has ended
        self.pad = 0 if (pad := self._config._pad_token_tensor) is None else int(pad)
        self._ends = type(self._criteria)(each for each in self._criteria if not hasattr(each, "max_length"))
        self._each = len(self.ids) // len(rows)
        self.rows: range = range(rows.start * self._each, rows.stop * self._each)
        self._going = torch.ones(len(self.ids), dtype=torch.bool, device=self.ids.device)

    def part(self, rows: range) -> Text | None:
        """Return the text of some rows of all; None: transformers prepares them otherwise than all together."""
        tensors = {name: value for name, value in self._inputs.items() if isinstance(value, Tensor)}
        held = [value for each in self._processors for value in getattr(each, "__dict__", {"": each}).values()]
        if any(value.shape != self.ids.shape for value in tensors.values()) or not {*map(type, held)} <= _NUMBERS:
            return None
        part, cache = copy.copy(self), copy.copy(self._cache)
        part.rows, part.new = range(rows.start * self._each, rows.stop * self._each), []
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        part._inputs = {name: cache if value is self._cache else value for name, value in self._inputs.items()}
        at = slice(part.rows.start, part.rows.stop)
        part._inputs |= {name: value[at] for name, value in tensors.items()}
        part._ids, part._going = self.ids[at], self._going[at]
        return part

    def _refuse(self) -> None:
        """Refuse a kind of decoding, or a state, that rounds of tokens do not have.

        Raises:
            ConfigError: there is one.
        """
        config, cache = self._config, self._cache
        if (mode := config.get_generation_mode().value) not in ("greedy_search", "sample"):
            raise ConfigError(f"generate: {mode} is not done in stages; use greedy decoding or do_sample=True")
        for name, usual in _USUAL.items():
            if (value := getattr(config, name, None)) not in (None, usual):
                raise ConfigError(f"generate: {name}={value} is not done in stages; leave it out")
        layers = {type(layer).__name__ for layer in getattr(cache, "layers", [cache])}
        if not layers <= {"DynamicLayer", "DynamicSlidingWindowLayer"} or getattr(cache, "offloading", False):
            raise ConfigError(
                f"generate: cache of {', '.join(layers)}: stages keep keys and values alone, in dynamic layers; "
                "leave cache_implementation out, or take a model whose layers all have their own"
            )
        if any(not hasattr(each, "max_length") for each in self._criteria) and config._pad_token_tensor is None:
            raise ConfigError("generate: pad_token_id is needed, to fill rows behind texts that end early")
        if type(self._criteria.max_length) is not int:
            raise ConfigError("generate: max_new_tokens: must be a whole number")
        known = len(self.model.get_input_embeddings().weight)
        if (beyond := self.ids[(self.ids < 0) | (self.ids >= known)]).numel():
            raise ConfigError(f"generate: input_ids: token {int(beyond[0])} is none of the model's, 0 to {known - 1}")
        most, length = getattr(self.model.config, "max_position_embeddings", None), self._criteria.max_length
        if most is not None and length > most:
            raise ConfigError(f"generate: {length} tokens with the prompt: there are {most} positions; take fewer")

    def refuse_lengths(self, groups: Iterable[tuple[int, int]]) -> None:
        """Refuse groups whose longest rows differ, where all positions depend on the longest row of a batch.

        Args:
            groups: the first row of each, and the one behind its last.

        Raises:
            ConfigError: they do.
        """
        rope = getattr(self.model.config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope" or (mask := self._inputs.get("attention_mask")) is None:
            return
        lengths = mask.sum(1).tolist()
        longest = {max(lengths[begin * self._each : end * self._each]) for begin, end in groups}
        if len(longest) > 1 and self._criteria.max_length > rope["original_max_position_embeddings"]:
            raise ConfigError(f"generate: longrope scales by longest rows, {longest} by group; take num_microbatches=1")

    @property
    def _cache(self) -> Any:
        return next((self._inputs[name] for name in CACHES if name in self._inputs), None)

    @property
    def ids(self) -> Tensor:
        """The prompts and the new tokens; most rounds need the newest alone."""
        if missing := self._length - self._ids.shape[1]:
            self._ids = torch.cat([self._ids, *self.new[-missing:]], 1)
        return self._ids

    @property
    def _length(self) -> int:
        return self._prompt + len(self.new)

    def inputs(self) -> Mapping[str, Any]:
        """Return the model's arguments for the tokens that it has not seen."""
        if self._whole is None or not self._round:
            told = {"next_sequence_length": 1 if self.new else None, "is_first_iteration": not self.new}
            found = {**self.model.prepare_inputs_for_generation(self.ids, **told, **self._inputs), "return_dict": True}
            if not self.new:  # some leave out an empty one, as Phi-3 for long prompts
                found |= {name: self._inputs[name] for name in CACHES if name in self._inputs}
            self._round = found if self.new else {}
            return found
        length = self._length
        begins = {"attention_mask": 0, "position_ids": length - 1}
        grown = {name: whole[..., begins[name] : length] for name, whole in self._whole.items()}
        return {**self._round, **grown, "input_ids": self.new[-1]}

    def seen(self) -> None:
        """Note that the model has seen all tokens, also in layers of other stages: masks are made by any layer."""
        if not self.new:
            self._begin_rounds()
        elif self._whole is None:
            self._inputs = self.model._update_model_kwargs_for_generation({}, self._inputs)
        for layer in self._elsewhere:
            missing = self._length - layer.get_seq_length()
            stand_in = torch.zeros(1, 1, missing, 1, dtype=torch.uint8, device=self._ids.device)
            layer.update(stand_in, stand_in)

    def _begin_rounds(self) -> None:
        """Prepare what all rounds behind the prompts have in common."""
        from transformers import GenerationMixin

        layers, kinds = self._cache.layers, dict[Any, Any]()
        for number in sorted(range(len(layers)), key=lambda number: not layers[number].get_seq_length()):
            layer = layers[number]
            known = kinds.setdefault((type(layer), getattr(layer, "sliding_window", None)), layer)
            if not layer.get_seq_length():
                layers[number] = known
        self._elsewhere = [layer for layer in kinds.values() if not layer.get_seq_length()]
        usual = all(
            getattr(getattr(self.model, name), "__func__", None) is getattr(GenerationMixin, name)
            for name in ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
        )
        names = {name for name, value in self._inputs.items() if isinstance(value, Tensor)}
        whole = usual and names <= {"attention_mask", "position_ids"}
        added, length = self.most if whole else 1, self._length
        self._inputs = self.model._update_model_kwargs_for_generation({}, self._inputs, num_new_tokens=added)
        if whole:
            self._whole = {name: self._inputs[name] for name in names}
            self._inputs |= {name: tensor[..., : length + 1] for name, tensor in self._whole.items()}

    def choose(self, logits: Tensor, seed: int) -> Tensor:
        """Append the next token of each sequence and return them, of shape (rows, 1)."""
        scores = logits[:, -1]
        if self._processors or self._config.do_sample:  # they may write into it
            scores = self._processors(self.ids, scores.to(copy=True, dtype=torch.float32))
        tokens = self._drawn(scores.softmax(-1), seed) if self._config.do_sample else scores.argmax(-1)
        if self._ends:
            tokens = torch.where(self._going, tokens, self._config._pad_token_tensor)
        self.new.append(tokens[:, None])
        self.ended = len(self.new) == self.most
        if self._ends:
            self._going &= ~self._ends(self.ids, None)
            self.ended |= not self._going.any()
        return self.new[-1]

    def _drawn(self, chances: Tensor, seed: int) -> Tensor:
        """Draw a token for each sequence, by a key of the sequence and the token's number."""
        generator, found = torch.Generator(chances.device), []
        for row, own in zip(self.rows, chances, strict=True):
            key = hashlib.blake2b(f"{seed} {row} {len(self.new)}".encode(), digest_size=8).digest()
            generator.manual_seed(int.from_bytes(key, "little") >> 1)
            found.append(torch.multinomial(own, 1, generator=generator))
        return torch.cat(found)


def _attributes(model: Any) -> dict[Any, Any]:
    """Return the hooks and attributes of the modules of a model that has a `generate` of its own, to compare them."""
    from transformers import GenerationMixin

    if type(model).generate is GenerationMixin.generate:
        return {}
    return {
        (module, name): tuple(value) if isinstance(value, dict) else id(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if name != "prepare_inputs_for_generation"  # peft exchanges it for one that does the same
    }

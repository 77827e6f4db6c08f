"""Small models of many families of transformers, with random weights, through `rpc-pipe verify`: a table of verdicts.

    python -m bench.model_zoo [--only REGEX] [--tasks causal,masked,...] [--workers 2,3,4] [--every 1] [--limit-s 100]
                               [--json FILE]

Configurations are made small by the names that numbers have in them, whatever the family; a family whose own forward
does not run with such a configuration is skipped. Each is also a model for the command line:

    rpc-pipe verify bench/model_zoo.py:causal_gpt2 --workers 4 --transport local
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

ROWS, LENGTH = 4, 12

#: name of a number in a configuration -> what it becomes; the first that matches counts
SIZES: list[tuple[str, int]] = [
    (r"(pad|bos|eos|sep|cls|mask|unk)_token_id", 1),
    (r"(decoder_start|forced_\w+)_token_id", 1),
    (r"\w*_token_(id|index)", 3),
    (r"(entity_|type_)?vocab_size\w*|n_vocab|vocab_size_per_layer_input", 99),
    (r"type_vocab_size", 2),
    (r"num_labels|num_classes", 3),
    (r"kv_lora_rank|q_lora_rank|\w*lora_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim|v_head_dim|head_dim|d_kv|attention_head_dim|\w*_head_dim|kv_channels", 8),
    (r"n_group|topk_group|n_shared_experts", 1),
    (r"num_experts_per_tok|num_experts_per_token|moe_topk|moe_k|top_k|num_selected_experts|experts_per_token", 2),
    (r"num_\w*experts|n_routed_experts|num_local_experts|num_experts|moe_num_experts", 4),
    (r"moe_intermediate_size|shared_expert_intermediate_size|moe_\w*intermediate_size|expert_dim", 32),
    (r"num_(key_value|kv)_heads|n_head_kv|num_global_key_value_heads|multi_query_group_num", 2),
    (r"\w*(num_attention_heads|attention_heads|num_heads|n_heads?|num_mem_heads)", 4),
    (r"num_hidden_layers|n_layers?|num_layers|\w*encoder_layers|\w*decoder_layers|num_decoder_layers|num_encoder_layers"
     r"|depth|num_conv_pos_layers|vision_layers", 4),
    (r"embedding_size|hidden_size|d_model|n_embd|dim|embed_dim|model_dim|hidden_dim|d_embed|\w*hidden_size"
     r"|projection_dim|emb_dim|rotary_dim_total|encoder_dim|decoder_hidden|bottleneck_dim", 32),
    (r"rotary_dim", 4),
    (r"intermediate_size|\w*ffn_dim|d_ff|n_inner|d_inner|dim_ff|ffn_hidden_size|inner_dim|\w*intermediate_size"
     r"|\w*_ffn_size|feed_forward_dim|block_ff_dim|ff_expansion_dim", 64),
    (r"max_position_embeddings|n_positions|n_ctx|max_source_positions|max_target_positions|max_seq_len|context_length"
     r"|max_sequence_length|original_max_position_embeddings|seq_length|max_2d_position_embeddings|max_length", 64),
    (r"image_size|img_size", 32),
    (r"patch_size", 8),
    (r"num_mel_bins|num_mel|feature_size", 16),
    (r"sliding_window|attention_window|local_attention|window_size|attention_window_size", 8),
    (r"chunk_size|attention_chunk_size|block_size", 4),
    (r"state_size|d_state|ssm_state_size|mamba_d_state|time_step_rank|mamba_dt_rank", 8),
    (r"layer_norm_num_groups|num_groups|n_groups|mamba_n_groups", 2),
]  # fmt: skip

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "classify": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "speech": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "answers": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "segment": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "hidden": "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
    "pairs": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "letters": "MODEL_FOR_CTC_MAPPING_NAMES",
    "heard": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}


def families(task: str) -> dict[str, str]:
    """Return the classes of models for a task, by the type of their configuration."""
    from transformers.models.auto import modeling_auto

    found = getattr(modeling_auto, TASKS[task])
    return {kind: name if isinstance(name, str) else name[0] for kind, name in found.items()}


def small(config_class: type) -> Any:
    """Return a configuration of a class with the numbers of `SIZES`."""
    return config_class(**_shrunk(config_class().to_dict()))


def _shrunk(said: dict[str, Any]) -> dict[str, Any]:
    number = next((said[n] for n in ("num_hidden_layers", "n_layer", "num_layers") if isinstance(said.get(n), int)), 0)
    found: dict[str, Any] = {}
    for name, value in said.items():
        if name in ("model_type", "transformers_version", "architectures", "dtype", "_name_or_path"):
            continue
        if isinstance(value, int) and not isinstance(value, bool):
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if size is not None:
                found[name] = min(size, value) if value > 0 else value
        elif isinstance(value, dict) and name.endswith("config") and value:
            found[name] = {**value, **_shrunk(value)}
        elif isinstance(value, list) and number and len(value) == number:
            found[name] = _few(value)
    return found


def _few(layers: list[Any]) -> list[Any]:
    """Return four layers, of every kind if there are several."""
    if not all(isinstance(each, (str, int)) for each in layers):
        return layers[:4]
    kinds = list(dict.fromkeys(layers))[:4]
    return (kinds + layers)[:4]


def made(task: str, kind: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a small model of a family with a batch for its task."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = small(CONFIG_MAPPING[kind])
    config.use_cache = False
    if task in ("seq2seq", "heard") and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    if task in ("classify", "image", "speech", "tokens", "segment"):
        config.num_labels = 3
    model = getattr(transformers, families(task)[kind])(config)
    return model, _BATCHES[task](model, config)


def _ids() -> torch.Tensor:
    return torch.randint(4, 90, (ROWS, LENGTH))


def _text(labels: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], dict[str, Any]]:
    def batch(model: Any, config: Any) -> dict[str, Any]:
        ids = _ids()
        return {"input_ids": ids, "labels": labels(ids)}

    return batch


def _answers(model: Any, config: Any) -> dict[str, Any]:
    ends = {name: torch.randint(LENGTH, (ROWS,)) for name in ("start_positions", "end_positions")}
    return {"input_ids": _ids(), **ends}


def _pixels(config: Any) -> torch.Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None) or 32
    size = size if isinstance(size, int) else 32
    return torch.randn(ROWS, getattr(config, "num_channels", 3), size, size)


def _images(model: Any, config: Any) -> dict[str, Any]:
    return {"pixel_values": _pixels(config), "labels": torch.randint(3, (ROWS,))}


def _segments(model: Any, config: Any) -> dict[str, Any]:
    pixels = _pixels(config)
    return {"pixel_values": pixels, "labels": torch.randint(3, (ROWS, *pixels.shape[2:]))}


def _hidden_patches(model: Any, config: Any) -> dict[str, Any]:
    count = (config.image_size // config.patch_size) ** 2
    return {"pixel_values": _pixels(config), "bool_masked_pos": torch.rand(ROWS, count) < 0.5}


def _pairs(model: Any, config: Any) -> dict[str, Any]:
    return {"input_ids": _ids(), "pixel_values": _pixels(config), "return_loss": True}


def _sound(model: Any) -> dict[str, torch.Tensor]:
    name = model.main_input_name
    return {name: torch.randn(ROWS, 4000) if name == "input_values" else torch.randn(ROWS, 32, 16)}


def _heard(model: Any, config: Any) -> dict[str, Any]:
    name = model.main_input_name
    # Whisper hears frames in the last dimension.
    first = torch.randn(ROWS, 16, 128) if getattr(config, "model_type", "") == "whisper" else _sound(model)[name]
    return {name: first, "labels": _ids()}


_LETTERS = _text(lambda ids: ids.clone())
_BATCHES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "causal": _LETTERS,
    "masked": _LETTERS,
    "seq2seq": _LETTERS,
    "classify": _text(lambda ids: torch.randint(3, (ROWS,))),
    "tokens": _text(lambda ids: torch.randint(3, ids.shape)),
    "answers": _answers,
    "image": _images,
    "segment": _segments,
    "hidden": _hidden_patches,
    "pairs": _pairs,
    "speech": lambda model, config: {**_sound(model), "labels": torch.randint(3, (ROWS,))},
    "letters": lambda model, config: {**_sound(model), "labels": torch.randint(4, 30, (ROWS, 3))},
    "heard": _heard,
}


def __getattr__(name: str) -> Callable[[], Any]:
    task, _, kind = name.partition("_")
    if task not in TASKS:
        raise AttributeError(name)
    kinds = {each.replace("-", "_"): each for each in families(task)}
    if kind not in kinds:
        raise AttributeError(name)
    return lambda: made(task, kinds[kind])


def quiet() -> None:
    """Let families keep their warnings to themselves."""
    warnings.simplefilter("ignore")
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    logging.disable(logging.WARNING)


def runs(task: str, kind: str) -> str:
    """Return why a model's own forward and backward do not run, or an empty text."""
    try:
        model, batch = made(task, kind)
        output = model(**batch)
        loss = output.loss if hasattr(output, "loss") else output[0]
        if loss is None:
            return "gives no loss"
        loss.backward()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    return ""


def verdict(task: str, kind: str, workers: int) -> dict[str, Any]:
    """Verify one model; return what to tell of it."""
    from rpc_pipe.commands.main import main

    name = f"{task}_{kind.replace('-', '_')}"
    typed = ["verify", f"{Path(__file__)}:{name}", "--workers", str(workers), "--microbatches", "2", "--steps", "2"]
    out, err = io.StringIO(), io.StringIO()
    begin = time.perf_counter()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code: Any = main([*typed, "--transport", "local", "--json"])
        except Exception as error:
            code = f"{type(error).__name__}: {error}"
    took = time.perf_counter() - begin
    found: dict[str, Any] = {"task": task, "model": kind, "workers": workers, "took_s": round(took, 1)}
    text = " ".join(err.getvalue().split())
    if code == 2:
        return {**found, "verdict": "refused", "text": text}
    told = json.loads(out.getvalue()) if out.getvalue() else {"verdict": f"failed ({code})"}
    numbers = {
        key: told.get(key) for key in ("cut_s", "cut_cpu_s", "blocks", "split", "max_rel_error", "because", "worst")
    }
    wrong = told["verdict"] not in ("identical", "rounding")
    return {**found, "verdict": told["verdict"], **numbers, "text": text[-600:] if wrong else ""}


def main() -> None:
    """Go over the families and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--workers", default="2,3,4")
    parser.add_argument("--every", type=int, default=1, help="of each task's families the first of so many")
    parser.add_argument("--limit-s", type=float, default=100)
    parser.add_argument("--json", help="take up and keep results here")
    options = parser.parse_args()
    quiet()
    torch.set_num_threads(1)
    path = Path(options.json) if options.json else None
    results: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []
    known = {(each["task"], each["model"]) for each in results}
    begin = time.perf_counter()
    for number, (task, kind) in enumerate(_wanted(options.tasks, options.only, options.every)):
        if (task, kind) in known:
            continue
        if time.perf_counter() - begin > options.limit_s:
            print("more is left: call again with the same --json")
            break
        why = runs(task, kind)
        workers = [int(each) for each in options.workers.split(",")]
        found = (
            {"task": task, "model": kind, "verdict": "skipped", "text": why}
            if why
            else verdict(task, kind, workers[number % len(workers)])
        )
        results.append(found)
        print(_line(found), flush=True)
        if path:
            path.write_text(json.dumps(results, indent=1))
    _summary(results)


def _wanted(tasks: str, only: str, every: int) -> Iterator[tuple[str, str]]:
    for task in tasks.split(","):
        for kind in list(families(task))[::every]:
            if re.search(only, f"{task}_{kind}"):
                yield task, kind


def _line(found: dict[str, Any]) -> str:
    text = found["text"] or found.get("because") or ""
    cut = f"{found['cut_cpu_s']:.2f} s" if found.get("cut_cpu_s") is not None else ""
    workers = found.get("workers", "")
    return f"{found['task']:8} {found['model']:24} {workers!s:2} {found['verdict']:10} {cut:7} {text[:400]}"


def _summary(results: list[dict[str, Any]]) -> None:
    counted = [each for each in results if each["verdict"] != "skipped"]
    verdicts = Counter(each["verdict"] for each in counted)
    good = verdicts["identical"] + verdicts["rounding"]
    cuts = sorted(each["cut_cpu_s"] for each in counted if each.get("cut_cpu_s") is not None)
    print(f"\n{len(counted)} models: {dict(verdicts)}; {100 * good / max(1, len(counted)):.1f} % identical or rounding")
    if cuts:
        slow = sum(each > 1 for each in cuts)
        middle, most = cuts[len(cuts) // 2], cuts[-1]
        print(f"cut, stages built: {middle:.2f} s of CPU time (median), {most:.2f} s at most, {slow} over 1 s")


if __name__ == "__main__":
    main()

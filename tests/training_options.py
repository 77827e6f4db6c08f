"""A pipeline for tests that vary one option, of the training or of the pipeline."""

from dataclasses import fields
from typing import Any

from rpc_pipe.pipeline import Pipeline, Training

_PARTS = {field.name for field in fields(Training)}


def pipeline_with(*model_and_loss: Any, **options: Any) -> Pipeline:
    """Return a pipeline; options that a `Training` has become its `training`."""
    parts = {name: options.pop(name) for name in _PARTS & options.keys()}
    if parts or "training" not in options:
        options["training"] = Training(**parts)
    return Pipeline(*model_and_loss, **options)

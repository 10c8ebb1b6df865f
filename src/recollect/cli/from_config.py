"""``transformers:LlamaConfig``: a model from its config, on the meta device, without weights."""

from __future__ import annotations

import ast
from argparse import Namespace
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from recollect.cli.parser import closest
from recollect.cli.screen import UsageError
from recollect.cli.target import Target

_PREFIX = "transformers:"
#: The classes that make a model with a loss from a config, the first that can.
_MAKERS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")


def is_config(text: str) -> bool:
    """Whether ``text`` names a config of transformers."""
    return text.startswith(_PREFIX)


def load_config_target(arguments: Namespace) -> Target:
    """The model of a config, a batch of token ids with labels, and an optimizer if one is named."""
    if arguments.batch is None:
        raise UsageError("--batch: sequences and their length are missing, such as --batch 8x2048")
    transformers = _transformers()
    name = arguments.target.removeprefix(_PREFIX)
    config = _config(transformers, name, dict(map(_setting, arguments.set)))
    dtype = _of_torch(torch, arguments.dtype, torch.dtype, "--dtype")
    with torch.device("meta"):
        model = _model(transformers, config, dtype)
        ids = torch.randint(config.get_text_config().vocab_size, arguments.batch)
        optimizer = make_optimizer(arguments.optimizer, model)
    return Target(model.train(), {"input_ids": ids, "labels": ids}, optimizer=optimizer)


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError as error:
        raise UsageError(
            "transformers is not installed: pip install 'recollect[transformers]'"
        ) from error


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals and value):
        raise UsageError(f"--set: {text!r} should be NAME=VALUE, such as hidden_size=2048")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a word, such as hidden_act=gelu


def _config(transformers: Any, name: str, settings: dict[str, Any]) -> Any:
    try:
        kind = getattr(transformers, name)
    except AttributeError as error:
        there = [each for each in dir(transformers) if each.endswith("Config")]
        raise UsageError(f"MODULE: transformers has no {name}.{closest(name, there)}") from error
    known = kind()
    for setting in settings:
        if not hasattr(known, setting):
            hint = closest(setting, [*known.to_dict()])
            raise UsageError(f"--set: {name} has no {setting}.{hint}")
    try:
        return kind(**{"use_cache": False, **settings})
    except Exception as error:  # whatever a config checks its values by
        raise UsageError(f"--set: {name} refuses its values: {error}") from error


def _model(transformers: Any, config: Any, dtype: torch.dtype | None) -> nn.Module:
    makers = [getattr(transformers, name) for name in _MAKERS]
    maker = next((each for each in makers if type(config) in each._model_mapping), None)  # noqa: SLF001 -- there is no public name for it
    if maker is None:
        raise UsageError(
            f"MODULE: {type(config).__name__} is not the config of a language model. Write "
            "a function that makes the model and a batch:  def build(): return model, batch"
        )
    made: nn.Module = maker.from_config(config, **({} if dtype is None else {"dtype": dtype}))
    return made


def make_optimizer(name: str | None, model: nn.Module) -> Optimizer | None:
    """The optimizer that ``--optimizer`` names, with its defaults; None if it names none."""
    kind = _of_torch(torch.optim, name, type, "--optimizer")
    return None if kind is None else kind(model.parameters())


def _of_torch(module: Any, name: str | None, kind: type, option: str) -> Any:
    """What ``name`` stands for in a module of torch; None if no name is given."""
    if name is None:
        return None
    found = getattr(module, name, None)
    if not isinstance(found, kind):
        there = [each for each in dir(module) if isinstance(getattr(module, each), kind)]
        raise UsageError(f"{option}: {module.__name__} has no {name}.{closest(name, there)}")
    return found

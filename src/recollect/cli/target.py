"""What a command is about: ``MODULE:FUNCTION``, or a config of transformers.

The function is found and called, and what it returns is checked. A model that is made from a config
is on the meta device, without weights.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from recollect.cli.parser import closest
from recollect.cli.screen import UsageError

#: How many names are listed for somebody who has mistyped one.
_NAMES = 8
_PREFIX = "transformers:"
#: The classes that make a model with a loss from a config, the first that can.
_MAKERS = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")


def _returns(second: str) -> str:
    """The return statement of a function, for errors."""
    return (
        f"return model, {second}  or  "
        f"return dict(model=model, {second}={second}, loss=..., optimizer=...)"
    )


class Target(NamedTuple):
    """The parts of a training step."""

    model: nn.Module
    batch: Any  #: or a function that makes one of a given size
    loss: Callable[..., Any] | None = None
    optimizer: Optimizer | None = None


def load_target(text: str, second: str = "batch") -> Target:
    """Call the function that ``text`` names. Errors that it raises are left as they are.

    ``second``: the name of its second result, ``batch`` or ``make_batch``.
    """
    module_name, colon, name = text.rpartition(":")
    if not (module_name and colon and name):
        raise UsageError(
            f"MODULE:FUNCTION: {text!r} should name a module and a function in it, "
            "such as train.py:build or package.train:build"
            + (
                ". For a model of transformers, name its config: transformers:LlamaConfig --batch "
                "8x2048"
                if text.count("/") == 1 and not text.endswith(".py")
                else ""
            )
        )
    function = _function(_module(module_name), module_name, name, second)
    try:
        return _checked(_target(function(), second), second)
    except UsageError as error:
        what = f"FUNCTION: {name} in {module_name} returns {error}"
        raise UsageError(f"{what}. Have it  {_returns(second)}") from error


def _target(returned: Any, second: str) -> Target:
    names = ["model", second, *Target._fields[2:]]
    if isinstance(returned, Mapping):
        if missing := [name for name in names[:2] if name not in returned]:
            raise UsageError(f"a dict without {missing[0]!r}")
        if unknown := [key for key in returned if key not in names]:
            raise UsageError(f"a dict with the unknown key {unknown[0]!r}")
        parts: dict[str, Any] = {Target._fields[names.index(k)]: v for k, v in returned.items()}
        return Target(**parts)
    if isinstance(returned, tuple) and len(returned) == 2:
        return Target(*returned)
    length = f" of length {len(returned)}" if isinstance(returned, (tuple, list)) else ""
    raise UsageError(f"a value of type {type(returned).__name__}{length}")


def _checked(target: Target, second: str) -> Target:
    model, batch, loss, optimizer = target
    is_optimizer = optimizer is None or isinstance(optimizer, Optimizer)
    is_batch = second == "batch" or callable(batch)
    for is_fine, what, value in (
        (isinstance(model, nn.Module), "model, which should be an nn.Module", model),
        (is_batch, "make_batch, which should be a function from a size to a batch", batch),
        (loss is None or callable(loss), "loss, which should be a function of the output", loss),
        (is_optimizer, "optimizer, which should be a torch.optim.Optimizer", optimizer),
    ):
        if not is_fine:
            raise UsageError(f"a {type(value).__name__} as {what}")
    return target


# --- modules --------------------------------------------------------------------------------------


def _module(name: str) -> ModuleType:
    if name.endswith(".py") or "/" in name:
        return _from_file(Path(name))
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Of a module that is found and imports another one that is not, the traceback is due.
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"MODULE: there is no module {error.name!r}, neither in {Path.cwd()} nor installed. "
            f"To name a file, give its path, such as {name.replace('.', '/')}.py:FUNCTION"
        ) from error


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(
            f"MODULE: there is no file {path} in {Path.cwd()}. Check the path, "
            "or give the dotted name of a module"
        )
    path = path.resolve()
    _make_importable(path.parent)
    name = path.stem
    if name in sys.modules:
        name = f"{name} ({path})"  # which no import names: the other module stays
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"MODULE: {path} is not a Python file: its name should end in .py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _function(module: ModuleType, module_name: str, name: str, second: str) -> Callable[[], Any]:
    function: Callable[..., Any] | None = getattr(module, name, None)
    if function is None:
        there = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        listed = f"It has {', '.join(there[:_NAMES])}"
        if not there:
            listed = (
                "It has no function: write one that returns the model and a batch, "
                "def build(): return model, batch"
            )
        raise UsageError(
            f"FUNCTION: there is no {name} in {module_name}.{closest(name, there)} {listed}"
        )
    if not callable(function) or isinstance(function, nn.Module):
        raise UsageError(
            f"FUNCTION: {name} in {module_name} should be a function, but is of type "
            f"{type(function).__name__}. "
            f"Write one that makes the model:  def build(): {_returns(second)}"
        )
    needed = [
        parameter.name
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise UsageError(
            f"FUNCTION: {name} is called without arguments, but needs {', '.join(needed)}. "
            f"Give them defaults, or name a function that calls it"
        )
    return function


# --- a model of transformers from its config ------------------------------------------------------


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

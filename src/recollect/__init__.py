"""recollect: train a PyTorch model within a memory budget.

Start with ``fit``, which keeps the peak of every training step within the budget::

    model = recollect.fit(model, budget="22GiB")

``plan`` and ``frontier`` show the trade-off of memory for time before you train, ``largest_batch``
finds the largest batch that fits, and ``explain`` shows which tensors a forward keeps, and why.

To checkpoint by hand, use ``checkpoint`` for a call and ``checkpointed`` for a module, with a
``policy`` for the results to keep. ``install()`` replaces ``torch.utils.checkpoint`` in every
library that uses it.
"""

import importlib
import importlib.util
import typing

from recollect._version import __version__ as __version__

if typing.TYPE_CHECKING:
    from recollect._exports import *  # noqa: F403 -- what `__getattr__` gives
    from recollect._exports import __all__ as __all__


def __getattr__(name: str) -> typing.Any:
    """Load the interface when something of it is used: ``recollect --help`` needs no torch."""
    if name.startswith("__") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name.isidentifier() and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f"{__name__}.{name}")
    exports = importlib.import_module("recollect._exports")
    found = {each: getattr(exports, each) for each in exports.__all__}
    globals().update({"__all__": exports.__all__} | found | globals())  # a user's patch stays
    if name not in globals():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[name]


def __dir__() -> list[str]:
    names = __getattr__("__all__")
    return [*names, "compat", *(name for name in globals() if name.startswith("__"))]

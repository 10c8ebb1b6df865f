"""The size arguments of ops, translated to tensors of other shapes.

Most ops have none. Of those that have, some determine them from their tensors; for the others
`sizes` says what they may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from recollect._torch.ops import argument_names, op_name
from recollect.planning.sizes import Dims, Shape, dense_strides, is_dense
from recollect.planning.trace import TensorLayout

__all__ = ["OpCall", "has_sizes", "translations"]

#: For one op: so many translations.
_MOST = 64


@dataclass(slots=True)
class OpCall:
    """An op and its arguments, with a `TensorLayout` for each tensor."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def get(self, name: str) -> Any:
        """The argument of that name; None if there is none."""
        if name in self.kwargs:
            return self.kwargs[name]
        names = _known_of(self.op)[1]
        place = names.index(name) if name in names else len(names)
        return self.args[place] if place < len(self.args) else None

    def shape(self, name: str) -> Shape:
        """The shape of a tensor."""
        value = self.get(name)
        assert type(value) is TensorLayout
        return value.size

    def put(self, values: dict[str, Any]) -> OpCall:
        """The same call with other values."""
        names = _known_of(self.op)[1]
        args, kwargs = list(self.args), dict(self.kwargs)
        for name, value in values.items():
            place = names.index(name)
            if name in kwargs or place >= len(args):
                kwargs[name] = value
            else:
                args[place] = value
        return replace(self, args=args, kwargs=kwargs)


@dataclass(frozen=True, slots=True)
class _Case:
    """A call to be translated: with its new tensors, as it was, and the results that it made."""

    now: OpCall
    before: OpCall
    outs: Sequence[TensorLayout | None]
    dims: Dims

    def shapes(self, name: str = "self") -> tuple[Shape, Shape]:
        """The shapes of a tensor, before and now."""
        return self.before.shape(name), self.now.shape(name)

    @property
    def made(self) -> Shape:
        """The shape of its result."""
        out = self.outs[0]
        assert out is not None
        return out.size


#: Gives the sizes to try, the likeliest first, as arguments by name.
_Rule = Callable[[_Case], Iterator[dict[str, Any]]]


def translations(
    now: OpCall, before: OpCall, outs: Sequence[TensorLayout | None], dims: Dims
) -> Iterator[OpCall]:
    """The calls that may stand for ``before``, with the tensors of ``now``, the likeliest first."""
    rule = _known_of(now.op)[0]
    if rule is None:
        yield now
        return
    for values in islice(rule(_Case(now, before, outs, dims)), _MOST):
        yield now.put(values)


def has_sizes(op: Any) -> bool:
    """Whether ``op`` has size arguments, which may change where its tensors do not."""
    return _known_of(op)[0] is not None


# --- the rules ------------------------------------------------------------------------------------


def _view(case: _Case) -> Iterator[dict[str, Any]]:
    old, new = case.shapes()
    for found in case.dims.of_view(old, new, case.made):
        yield {"size": list(found)}


def _reshape_alias(case: _Case) -> Iterator[dict[str, Any]]:
    for found in _view(case):
        size, stride = case.made, tuple(case.before.get("stride"))
        yield {**found, "stride": list(dense_strides(tuple(found["size"]), size, stride))}


def _expand(case: _Case) -> Iterator[dict[str, Any]]:
    old, new = case.shapes()
    for found in case.dims.of_expanded(old, new, case.made):
        yield {"size": list(found)}


def _as_strided(case: _Case) -> Iterator[dict[str, Any]]:
    old, new = case.shapes()
    size, stride = tuple(case.before.get("size")), tuple(case.before.get("stride"))
    if old == new:
        yield {}
    elif is_dense(size, stride) and math.prod(size) == math.prod(old):
        for found in case.dims.of_shape(size):
            if math.prod(found) == math.prod(new):
                yield {"size": list(found), "stride": list(dense_strides(found, size, stride))}


def _strided(case: _Case) -> Iterator[dict[str, Any]]:
    size, stride = tuple(case.before.get("size")), tuple(case.before.get("stride"))
    if is_dense(size, stride):
        for found in case.dims.of_shape(size):
            yield {"size": list(found), "stride": list(dense_strides(found, size, stride))}


def _slice(case: _Case) -> Iterator[dict[str, Any]]:
    yield from _ends(case, *case.shapes())


def _ends(case: _Case, old: Shape, new: Shape) -> Iterator[dict[str, Any]]:
    """Start and end of a slice."""
    dim = case.now.get("dim") or 0
    before, now, dims = old[dim], new[dim], case.dims
    given = [case.now.get("start"), case.now.get("end")]
    starts, ends = (dims.of_index(before, now, each, of_table=old == new) for each in given)
    found: list[tuple[Any, Any]] = [*product(starts, ends)]
    inner = [index for index in given if type(index) is int and 0 < index < before]
    if now != before and len(inner) == 2:
        # One of several parts in a row: its length may be known, where its end is not.
        lengths = dims.of(inner[1] - inner[0])
        found += [(start, (start or 0) + length) for start, length in product(starts, lengths)]
    for both in dict.fromkeys(found):
        for index, other in zip(given, both, strict=True):
            if index in inner and other != index:
                dims.note((index,), (other,))
        yield {"start": both[0], "end": both[1]}


def _slice_backward(case: _Case) -> Iterator[dict[str, Any]]:
    old = tuple(case.before.get("input_sizes"))
    for found in case.dims.of_shape(old):
        for ends in _ends(case, old, found):
            yield {"input_sizes": list(found), **ends}


def _split(case: _Case) -> Iterator[dict[str, Any]]:
    dim = case.now.get("dim") or 0
    old, new = (shape[dim] for shape in case.shapes())
    size, count = case.now.get("split_size"), len(case.outs)
    found = [size] if old == new else [*case.dims.of(size), -(-new // count)]
    for each in dict.fromkeys(found):
        if each > 0 and -(-new // each) == count:
            yield {"split_size": each}


def _split_with_sizes(case: _Case) -> Iterator[dict[str, Any]]:
    dim = case.now.get("dim") or 0
    old, new = (shape[dim] for shape in case.shapes())
    for found in case.dims.of_parts(old, new, tuple(case.now.get("split_sizes"))):
        yield {"split_sizes": list(found)}


def _repeat(case: _Case) -> Iterator[dict[str, Any]]:
    repeats = case.now.get("repeats")
    each = [[n] if n == 1 and place else case.dims.of(n) for place, n in enumerate(repeats)]
    for found in product(*each):
        yield {"repeats": list(found)}


def _arange(case: _Case) -> Iterator[dict[str, Any]]:
    start, end, step = (case.now.get(name) for name in ("start", "end", "step"))
    dims = case.dims

    def of(value: Any) -> list[Any]:
        is_size = isinstance(value, (int, float)) and value == int(value) and value > 1
        return [type(value)(each) for each in dims.of(int(value))] if is_size else [value]

    # The step is hardly ever a size, and the start only if the end is one too.
    steps = list(dict.fromkeys([step, *of(step)]))
    found = [{"end": each, "step": by} for by in steps for each in of(end)]
    if type(start) is int and type(end) is int and start > 0:
        ways = product(of(start), of(end - start))
        found += [{"start": begin, "end": begin + length} for begin, length in ways]
    for values in found:
        yield {name: value for name, value in values.items() if value is not None}


def _group_norm(case: _Case) -> Iterator[dict[str, Any]]:
    shape = case.now.shape("input")
    yield {"N": shape[0], "C": shape[1], "HxW": math.prod(shape[2:])}


def _layer_norm(case: _Case) -> Iterator[dict[str, Any]]:
    count = len(case.now.get("normalized_shape"))
    yield {"normalized_shape": list(case.now.shape("input")[-count:])}


def _pad(case: _Case) -> Iterator[dict[str, Any]]:
    yield {}
    # Or the result is to be as long as it was.
    old, new = case.shapes()
    pad = list(case.now.get("pad"))
    for place in range(0, len(pad), 2):
        dim = len(old) - 1 - place // 2
        for side in (place + 1, place):
            rest = pad[side] - (new[dim] - old[dim])
            if new[dim] != old[dim] and rest >= 0:
                yield {"pad": [*pad[:side], rest, *pad[side + 1 :]]}


def _upsample(case: _Case) -> Iterator[dict[str, Any]]:
    old, new = (shape[2:] for shape in case.shapes())
    sizes = tuple(case.now.get("output_size"))
    yield {
        "output_size": [
            size if a == b else size * b // a for size, a, b in zip(sizes, old, new, strict=True)
        ]
    }
    for found in case.dims.of_shape(sizes):
        yield {"output_size": list(found)}


def _upsample_backward(case: _Case) -> Iterator[dict[str, Any]]:
    output = list(case.now.shape("grad_output")[2:])
    for found in case.dims.of_shape(tuple(case.now.get("input_size"))):
        yield {"output_size": output, "input_size": list(found)}


def _shapes(*names: str) -> _Rule:
    """Lists of sizes that nothing determines."""

    def rule(case: _Case) -> Iterator[dict[str, Any]]:
        lists = [tuple(case.now.get(name)) for name in names]
        for found in product(*(list(case.dims.of_shape(sizes)) for sizes in lists)):
            yield {name: list(sizes) for name, sizes in zip(names, found, strict=True)}

    return rule


def _numbers(*names: str) -> _Rule:
    """Single sizes."""

    def rule(case: _Case) -> Iterator[dict[str, Any]]:
        values = {name: case.now.get(name) for name in names}
        given = {name: case.dims.of(size) for name, size in values.items() if type(size) is int}
        for found in product(*given.values()):
            yield dict(zip(given, found, strict=True))

    return rule


_RULES: dict[str, _Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "view_copy"), _view),
    **dict.fromkeys(("_reshape_alias", "_reshape_alias_copy"), _reshape_alias),
    **dict.fromkeys(("expand", "expand_copy"), _expand),
    **dict.fromkeys(("as_strided", "as_strided_", "as_strided_copy"), _as_strided),
    **dict.fromkeys(("empty_strided", "new_empty_strided"), _strided),
    **dict.fromkeys(("slice", "slice_copy", "slice_scatter"), _slice),
    "slice_backward": _slice_backward,
    **dict.fromkeys(("split", "unsafe_split", "split_copy"), _split),
    **dict.fromkeys(
        ("split_with_sizes", "unsafe_split_with_sizes", "split_with_sizes_copy"), _split_with_sizes
    ),
    "repeat": _repeat,
    "arange": _arange,
    **dict.fromkeys(("native_group_norm", "native_group_norm_backward"), _group_norm),
    **dict.fromkeys(
        (
            *("native_layer_norm", "native_layer_norm_backward"),
            *("_fused_rms_norm", "_fused_rms_norm_backward"),
        ),
        _layer_norm,
    ),
    "constant_pad_nd": _pad,
    **dict.fromkeys(("eye",), _numbers("n", "m")),
    **dict.fromkeys(("tril_indices", "triu_indices"), _numbers("row", "col")),
    "randperm": _numbers("n"),
    **dict.fromkeys(("linspace", "logspace"), _numbers("steps")),
    "_fft_c2r": _numbers("last_dim_size"),
    "repeat_interleave": _numbers("output_size"),
}

#: Names of arguments that are lists of sizes, of ops without a rule of their own.
_LISTS = ("size", "sizes", "input_sizes", "self_sizes", "output_size", "input_size")


#: By id of an op, since ops live for good and hash slowly: its rule, the names of its arguments.
_known: dict[int, tuple[_Rule | None, list[str]]] = {}


def _known_of(op: Any) -> tuple[_Rule | None, list[str]]:
    known = _known.get(id(op))
    if known is None:
        names = argument_names(op)
        known = _known[id(op)] = _find_rule(op, names), names
    return known


def _find_rule(op: Any, names: list[str]) -> _Rule | None:
    name = op_name(op).removeprefix("aten::")
    if name in _RULES:
        rule = _RULES[name]
        is_view = rule in (_view, _expand, _reshape_alias)
        return None if is_view and "size" not in names else rule  # a view as another dtype
    if name.startswith(("upsample_", "_upsample_")):
        return _upsample_backward if "input_size" in names else _upsample
    if "adaptive" in name or "fractional" in name:
        return None  # their sizes belong to a layer
    lists = [each for each in _LISTS if each in argument_names(op, lists=True)]
    return _shapes(*lists) if lists else None

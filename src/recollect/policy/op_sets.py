"""Which ops are of which sort: dear to run, not to be run twice, writers of new memory.

By name, since the ops of other libraries appear when those are imported, and a name can be compared
before. Names are those of the dispatcher: ``aten::mm``.
"""

from __future__ import annotations

from typing import Any

from recollect._torch.ops import is_pointwise, is_random, op_name

__all__ = ["ATTENTION", "MATMULS", "allocates", "is_function", "not_to_be_repeated"]

#: Products of matrices.
MATMULS = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::addbmm",
        "aten::mv",
        "aten::addmv",
        "aten::linear",
        "aten::mkldnn_linear",
        "aten::_addmm_activation",
        "aten::_grouped_mm",
        "aten::_int_mm",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_mm",
    }
)

#: Attention in one kernel: torch's, and those of libraries that register theirs.
ATTENTION = frozenset(
    {
        "aten::_efficient_attention_forward",
        "aten::_flash_attention_forward",
        "aten::_scaled_dot_product_attention_math_for_mps",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::fwd",
        "torch_attn::_varlen_attn",
        "xformers::efficient_attention_forward_cutlass",
        "xformers_flash::flash_fwd",
        "flex_attention",
    }
)

#: A choice that may come out otherwise from inputs that differ in the last bit, and then everything
#: after it is another computation: which expert gets which token.
_DISCRETE = frozenset(
    {
        "aten::argmax",
        "aten::argmin",
        "aten::argsort",
        "aten::bincount",
        "aten::bucketize",
        "aten::cummax",
        "aten::cummin",
        "aten::histc",
        "aten::kthvalue",
        "aten::mode",
        "aten::multinomial",
        "aten::nonzero",
        "aten::nonzero_static",
        "aten::searchsorted",
        "aten::sort",
        "aten::topk",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "aten::_unique",
        "aten::_unique2",
    }
)

#: Likewise, but not in their other forms.
_DISCRETE_OVERLOADS = frozenset(
    {"aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim"}
)

_COLLECTIVES = ("_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::")
_OF_TORCH = ("aten::", "prims::", "prim::", "rngprims::")


def not_to_be_repeated(op: Any) -> str | None:
    """Why the result of ``op`` is kept unless somebody insists; None for most ops."""
    name = op_name(op)
    if name in _DISCRETE or str(op) in _DISCRETE_OVERLOADS:
        return "discrete"
    if name.startswith(_COLLECTIVES):
        return "collective"
    if is_random(op) and not name.startswith(_OF_TORCH):
        return "random, by another library"
    return None


#: Whose ops give the same from the same arguments, or say by a tag if they draw: those of torch, of
#: its own libraries, and of bitsandbytes, which dequantizes weights at every use (QLoRA): to keep
#: those would take more memory than they take in full precision.
_FUNCTIONS = (
    *_OF_TORCH,
    *("mkl::", "mkldnn::", "mkldnn_prepacked::", "onednn::", "quantized::", "_quantized::"),
    *("torch_attn::", "torchvision::", "bitsandbytes::"),
)


def is_function(op: Any) -> bool:
    """Whether ``op`` is known to depend on its arguments alone, but for draws that a tag tells.

    An op of anybody may have a state of its own, or draw random numbers without a word.
    """
    name = op_name(op)
    return name.startswith(_FUNCTIONS) or name in ATTENTION or is_pointwise(op)


def allocates(op: Any) -> bool:
    """Whether ``op`` makes memory for somebody else to fill, as far as its name tells."""
    name = op_name(op)
    return name.startswith(("aten::empty", "aten::new_", "aten::zeros", "aten::ones", "aten::full"))

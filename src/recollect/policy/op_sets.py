"""Sets of ops, by the dispatcher's names: ``aten::mm``.

By name, since the ops of other libraries appear when those are imported, and a name can be compared
before.
"""

from __future__ import annotations

__all__ = ["ATTENTION", "COLLECTIVES", "DISCRETE", "DISCRETE_OVERLOADS", "MATMULS"]


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


#: Products of matrices.
MATMULS = _aten(
    "mm addmm bmm baddbmm addbmm mv addmv linear mkldnn_linear "
    "_addmm_activation _grouped_mm _int_mm _scaled_grouped_mm _scaled_mm"
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
DISCRETE = _aten(
    "argmax argmin argsort bincount bucketize cummax cummin histc kthvalue mode multinomial "
    "nonzero nonzero_static searchsorted sort topk unique_consecutive unique_dim _unique _unique2"
)

#: Likewise, but not in their other overloads.
DISCRETE_OVERLOADS = frozenset(
    {"aten.max.dim", "aten.min.dim", "aten.median.dim", "aten.nanmedian.dim"}
)

#: Namespaces of communication between processes.
COLLECTIVES = ("_c10d_functional::", "_c10d_functional_autograd::", "_dtensor::")

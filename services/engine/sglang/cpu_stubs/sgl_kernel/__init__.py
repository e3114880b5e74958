"""`sgl_kernel` where it is not installed; see absent_module.

Its operators for CPUs that SGLang names while it imports models (others it asks for first, or calls only where AMX is)
fail when they are called, by name, as everything of an absent package does.
"""

import torch
from absent_module import AbsentName, become_absent

_NAMED_AT_IMPORT = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)

for _name in _NAMED_AT_IMPORT:
    setattr(torch.ops.sgl_kernel, _name, AbsentName(f"sgl_kernel.{_name}"))
become_absent(__name__)

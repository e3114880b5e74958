"""Attention of SGLang's torch-native backend on a machine without GPU, over new rows only.

Upstream's torch-native extend attention computes the cached rows of a prompt again and throws them away: one new token
after 4,000 cached ones costs as much as the whole prompt, so a cache hit saves nothing. `extend_attention` computes the
new rows only, with the causal mask shifted by the cached length. Same function, same signature, same result.
"""

import functools
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention


@functools.lru_cache(maxsize=16)
def _shifted_causal_mask(new: int, cached: int) -> torch.Tensor:
    """True where row i of the new tokens may see column j: j <= cached + i. Shape [new, cached + new]."""
    return torch.ones(new, cached + new, dtype=torch.bool).tril(diagonal=cached)


def extend_attention(
    original: Any,
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    encoder_lens: torch.Tensor | None = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> torch.Tensor:
    """Attention of [tokens, heads, dim] queries over paged KV, written to `output`; anything but plain causal
    self-attention goes to upstream's own function."""
    windowed = sliding_window_size is not None and sliding_window_size > -1
    if encoder_lens is not None or is_cross_attn or windowed or not causal:
        result: torch.Tensor = original(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens,
            extend_seq_lens, encoder_lens, scaling=scaling, enable_gqa=enable_gqa, causal=causal,
            is_cross_attn=is_cross_attn, sliding_window_size=sliding_window_size,
        )  # fmt: skip
        return result
    heads_first = query.movedim(0, 1)
    start = 0
    lengths = zip(seq_lens.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, (total, cached, new) in zip(req_pool_indices.tolist(), lengths, strict=True):
        places = req_to_token[row, :total]
        keys = k_cache[places].movedim(0, 1).to(query.dtype)
        values = v_cache[places].movedim(0, 1).to(query.dtype)
        part = scaled_dot_product_attention(
            heads_first[None, :, start : start + new],
            keys[None],
            values[None],
            attn_mask=_shifted_causal_mask(new, cached) if cached else None,
            enable_gqa=enable_gqa,
            scale=scaling,
            is_causal=not cached,
        )
        output[start : start + new] = part[0].movedim(1, 0)
        start += new
    return output

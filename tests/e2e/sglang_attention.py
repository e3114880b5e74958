"""Run in a process of its own, where SGLang may be imported: our attention against upstream's on random tensors.

Prints one JSON object: the largest difference of each case, and whether upstream's own code ran where it should.
"""

import json
import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402

from services.engine.sglang.cpu import extend_attention  # noqa: E402

HEADS, KV_HEADS, DIM, SLOTS, ROWS = 6, 2, 32, 2048, 512
_UPSTREAM = TorchNativeAttnBackend._run_sdpa_forward_extend


class Case:
    """A batch of requests given as (cached, new) token counts, on random pages."""

    def __init__(self, lengths: list[tuple[int, int]], seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        total = sum(new for _, new in lengths)
        self.query = torch.randn(total, HEADS, DIM, generator=source)
        self.keys = torch.randn(SLOTS, KV_HEADS, DIM, generator=source)
        self.values = torch.randn(SLOTS, KV_HEADS, DIM, generator=source)
        places = torch.randperm(SLOTS, generator=source)
        self.req_to_token = torch.stack([places.roll(97 * row)[:ROWS] for row in range(len(lengths))])
        self.pool = torch.arange(len(lengths))
        self.cached = torch.tensor([cached for cached, _ in lengths])
        self.new = torch.tensor([new for _, new in lengths])

    def run(self, function: object, **options: object) -> torch.Tensor:
        output = torch.empty_like(self.query)
        backend = object.__new__(TorchNativeAttnBackend)
        arguments = (
            *(self.query, output, self.keys, self.values, self.req_to_token, self.pool),
            *(self.cached + self.new, self.cached, self.new),
        )
        options = {"scaling": DIM**-0.5, "enable_gqa": True, "causal": True} | options
        if function is extend_attention:
            return extend_attention(_UPSTREAM, backend, *arguments, **options)
        return _UPSTREAM(backend, *arguments, **options)


def difference(lengths: list[tuple[int, int]], **options: object) -> float:
    case = Case(lengths, seed=len(lengths))
    return float((case.run(extend_attention, **options) - case.run(_UPSTREAM, **options)).abs().max())


sys.stdout.write(
    json.dumps(
        {
            "cold": difference([(0, 40)]),
            "one_new_token": difference([(300, 1)]),
            "chunk_after_cache": difference([(256, 200)]),
            "mixed_batch": difference([(0, 17), (33, 64), (128, 1), (5, 250)]),
            "window": difference([(64, 64)], sliding_window_size=32),
            "not_causal": difference([(32, 32)], causal=False),
        }
    )
)

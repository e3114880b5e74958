"""Run in a process of its own, where SGLang may be imported: what we put beside upstream's code, against that code.

Prints one JSON object: the largest difference of our attention from upstream's in several cases, whether a block
survives the way through host memory, what is said about a KV pool that blocks cannot hold, and what names.py misses.
"""

import json
import sys
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402

from services.engine.sglang import names  # noqa: E402
from services.engine.sglang.blocks import BlockLayout, UnsupportedPool  # noqa: E402
from services.engine.sglang.cpu import extend_attention  # noqa: E402

HEADS, KV_HEADS, DIM, SLOTS, ROWS, PAGE = 6, 2, 32, 2048, 512, 16
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


def kv_pool(kind: type = MHATokenToKVPool) -> MHATokenToKVPool:
    pool = kind(
        size=SLOTS, page_size=PAGE, dtype=torch.float32, head_num=KV_HEADS, head_dim=DIM, layer_num=3, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    for tensor in (*pool.k_buffer, *pool.v_buffer):
        tensor.normal_()
    return pool


def block_survives(rank: int, ranks: int) -> bool:
    """Pages of one pool through host memory into other pages of another pool, and nowhere else."""
    source, target = kv_pool(), kv_pool()
    untouched = [tensor.clone() for tensor in (*target.k_buffer, *target.v_buffer)]
    layouts = [BlockLayout([pool], PAGE, rank, ranks) for pool in (source, target)]
    pages = [(torch.tensor(numbers)[:, None] * PAGE + torch.arange(PAGE)).reshape(-1) for numbers in ([5, 2], [7, 90])]
    staging = layouts[0].staging(4)
    layouts[0].gather(pages[0], staging)
    layouts[1].scatter(staging, pages[1])
    tensors = zip((*source.k_buffer, *source.v_buffer), (*target.k_buffer, *target.v_buffer), untouched, strict=True)
    kept = torch.ones(len(untouched[0]), dtype=torch.bool)
    kept[pages[1]] = False
    size = 3 * 2 * PAGE * KV_HEADS * DIM * 4
    right_size = layouts[0].block_bytes == ranks * size and layouts[0].offset == rank * size
    return right_size and all(
        torch.equal(there[pages[1]], here[pages[0]]) and torch.equal(there[kept], before[kept])
        for here, there, before in tensors
    )


def refusal() -> str:
    class WindowedPool(MHATokenToKVPool):
        pass

    try:
        BlockLayout([kv_pool(WindowedPool)], PAGE)
    except UnsupportedPool as error:
        return str(error)
    return ""


def missing_names() -> str:
    try:
        names.check_version()
        names.check_members()
    except names.IncompatibleSglang as error:
        return str(error)
    return ""


sys.stdout.write(
    json.dumps(
        {
            "attention": {
                "cold": difference([(0, 40)]),
                "one_new_token": difference([(300, 1)]),
                "chunk_after_cache": difference([(256, 200)]),
                "mixed_batch": difference([(0, 17), (33, 64), (128, 1), (5, 250)]),
                "window": difference([(64, 64)], sliding_window_size=32),
                "not_causal": difference([(32, 32)], causal=False),
            },
            "block_survives": [block_survives(0, 1), block_survives(2, 4)],
            "refusal": refusal(),
            "missing_names": missing_names(),
        }
    )
)

"""What a simulated node is made of: model times and sizes, memory, links. Profiles by name, with their sources."""

import math
from dataclasses import dataclass, replace

from services.engine.core.timing import MEGA, PRESETS, Coefficients, DecodeTerms, PrefillTerms

FREE_LOADS = "/free-loads"


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node (one tensor-parallel group) for one model. Tokens, bytes per second, seconds.

    `times`: both iteration models; t_acc `accepted_tokens`. `l2_tokens`: host memory at one copy per token.
    `device_link`: device to device between nodes, `host_link`: host to host, `restore`: host to device; each way.
    """

    name: str
    times: Coefficients
    accepted_tokens: float
    kv_bytes_per_token: int
    l1_tokens: int
    l2_tokens: int
    device_link: float
    host_link: float
    restore: float
    latency_s: float = 0.002
    batch_tokens: int = 16_384
    max_running: int = 256

    def without_speculation(self) -> "Hardware":
        """The same node when multi-token prediction is off: an iteration feeds and gives one token."""
        return replace(self, accepted_tokens=1.0, times=replace(self.times, fed_tokens=1.0))

    def with_free_loads(self) -> "Hardware":
        """The same node when loading to the device takes nothing: the most that any loading ahead can gain."""
        return replace(self, name=self.name + FREE_LOADS, restore=math.inf, times=replace(self.times, c3=0.0))

    def transfer_s(self, tokens: int) -> float:
        """Device to device, without latency."""
        return tokens * self.kv_bytes_per_token / self.device_link

    def fetch_s(self, tokens: int) -> float:
        """Host to host, without latency."""
        return tokens * self.kv_bytes_per_token / self.host_link

    def restore_s(self, tokens: int) -> float:
        """Host to device."""
        return tokens * self.kv_bytes_per_token / self.restore


@dataclass(frozen=True, slots=True)
class MockerTimes(Coefficients):
    """The iteration times of Dynamo's mocker, its default polynomial (aisimulate `perf_model.rs`, Dynamo 1.6.1).

    Milliseconds: prefill 4.209989e-7 n^2 + 1.518344e-2 n + 16.50142 of n uncached tokens in the iteration; decode
    max(1, -25.74 p^2 + 54.01 p + 5.74), p the running requests' context over `capacity_tokens`, at most 1. What the
    fields of `Coefficients` say (c0, c1, d0, d3) is its tangent at nothing, for whoever starts from coefficients.
    """

    capacity_tokens: int = 1

    def prefill_s(self, terms: PrefillTerms) -> float:
        tokens = terms.uncached_tokens
        return (4.209989e-7 * tokens * tokens + 1.518344e-2 * tokens + 16.50142) / 1e3

    def decode_s(self, terms: DecodeTerms) -> float:
        used = min(1.0, terms.context_tokens / self.capacity_tokens)
        return max(1.0, -25.74 * used * used + 54.01 * used + 5.74) / 1e3


def mocker_times(capacity_tokens: int) -> MockerTimes:
    """Of a worker with so many tokens of device memory."""
    d3 = 54.01e-3 * MEGA / capacity_tokens
    return MockerTimes(c0=16.50142e-3, c1=1.518344e-5, d0=5.74e-3, d3=d3, capacity_tokens=capacity_tokens)


def _of(name: str, preset: str, l2_tokens: int) -> Hardware:
    known = PRESETS[preset]
    return Hardware(
        name=name,
        times=known.times,
        accepted_tokens=known.accepted_tokens,
        kv_bytes_per_token=known.kv_bytes_per_token,
        l1_tokens=known.l1_tokens,
        l2_tokens=l2_tokens,
        device_link=known.link_bytes_per_s,
        host_link=1e11,
        restore=4.5e11,
    )


_GLM = _of("glm-5.2/gb300", "glm-5.2", 20_000_000)
_KIMI = _of("kimi-k2.6/gb300", "kimi-k2.6", 28_000_000)
_MOCKER_TOKENS = 16_384 * 64
_MOCKER = Hardware(
    name="dynamo-mocker",
    times=mocker_times(_MOCKER_TOKENS),
    accepted_tokens=1.0,
    kv_bytes_per_token=48_408,
    l1_tokens=_MOCKER_TOKENS,
    l2_tokens=4 * _MOCKER_TOKENS,
    device_link=1e15,
    host_link=5e10,
    restore=6.4e10,
    latency_s=0.0,
    batch_tokens=8192,
)
_PCIE = replace(_GLM, restore=6.4e10, host_link=5e10, device_link=5e10)

PROFILES: dict[str, Hardware] = {
    "glm-5.2/gb300": _GLM,
    "kimi-k2.6/gb300": _KIMI,
    "glm-5.2/h200": replace(
        _PCIE,
        name="glm-5.2/h200",
        times=replace(_GLM.times.faster(0.45), c3=48_408 / 6.4e10),
        l1_tokens=1_100_000,
    ),
    "glm-4.6-gqa/h200": replace(
        _PCIE,
        name="glm-4.6-gqa/h200",
        times=replace(_GLM.times.faster(0.45), c3=188_416 / 6.4e10),
        kv_bytes_per_token=188_416,
        l1_tokens=900_000,
        l2_tokens=5_300_000,
    ),
    "dynamo-mocker": _MOCKER,
}
PROFILES |= {free.name: free for free in [known.with_free_loads() for known in PROFILES.values()]}
"""`*/gb300`: coefficients of the timing presets (research: iteration times of NVIDIA's GB300 tables rescaled to the
reference's request times), 1 TB of host memory a node, one 100 GB/s rail between nodes, C2C to the device. `*/h200`:
PCIe 5 (64 GB/s) to the device, 50 GB/s between nodes, 8 devices of 141 GB a node; its iteration times are GB300's over
0.45 (memory bandwidth 4.8 against 8 TB/s and less compute): an assumption, not measured. `glm-4.6-gqa`: 188,416 bytes
of KV a token (GQA), 1 TB of host memory. `dynamo-mocker`: a worker of Dynamo's mocker as it comes (times, 16,384 blocks
of 64 tokens, batches of 8,192 tokens, KV that reaches its decode worker at once), with four times as much host memory
and GLM's KV bytes over PCIe 5; only for comparing the simulator with Dynamo's own (`bench.peer_dynamo`).
Each `/free-loads`: the same where loading to the device takes nothing."""

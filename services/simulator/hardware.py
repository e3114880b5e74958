"""What a simulated node is made of: model times and sizes, memory, links. Profiles by name, with their sources."""

from dataclasses import dataclass, replace

from services.engine.core.timing import PRESETS, Coefficients


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

    def transfer_s(self, tokens: int) -> float:
        """Device to device, without latency."""
        return tokens * self.kv_bytes_per_token / self.device_link

    def fetch_s(self, tokens: int) -> float:
        """Host to host, without latency."""
        return tokens * self.kv_bytes_per_token / self.host_link

    def restore_s(self, tokens: int) -> float:
        """Host to device."""
        return tokens * self.kv_bytes_per_token / self.restore


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
}
"""`*/gb300`: coefficients of the timing presets (research: iteration times of NVIDIA's GB300 tables rescaled to the
reference's request times), 1 TB of host memory a node, one 100 GB/s rail between nodes, C2C to the device. `*/h200`:
PCIe 5 (64 GB/s) to the device, 50 GB/s between nodes, 8 devices of 141 GB a node; its iteration times are GB300's over
0.45 (memory bandwidth 4.8 against 8 TB/s and less compute): an assumption, not measured. `glm-4.6-gqa`: 188,416 bytes
of KV a token (GQA), 1 TB of host memory."""

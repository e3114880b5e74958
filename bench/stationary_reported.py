"""What the reference reported for stationary runs and static splits: printed beside the simulated figures.

Requests per second; for whole systems also mean E2E and lost reuse. Never an input of a run.
"""

from typing import NamedTuple


class Reported(NamedTuple):
    """Figures of one row; None where none was given."""

    throughput_rps: float
    e2e_mean_s: float | None = None
    lost_reuse_pct: float | None = None
    ttft_p95_s: float | None = None


SYSTEMS: dict[tuple[str, int, str], Reported] = {
    ("putnam", 224, "dynamo-1.5.1"): Reported(7.72, 19.1, 2.47),
    ("putnam", 224, "reference"): Reported(8.81, 15.5, 0.48),
    ("putnam", 256, "dynamo-1.5.1"): Reported(8.37, 20.4, 2.48),
    ("putnam", 256, "reference"): Reported(9.20, 17.8, 0.17),
    ("putnam", 288, "dynamo-1.5.1"): Reported(9.12, 21.7, 2.63),
    ("putnam", 288, "reference"): Reported(10.15, 18.6, 0.46),
    ("claude-code", 90, "dynamo-1.5.1"): Reported(2.48, 32.2, 5.13, 142.0),
    ("claude-code", 90, "reference"): Reported(5.40, 7.9, 0.32, 10.2),
    ("claude-code", 108, "dynamo-1.5.1"): Reported(2.48, 37.7, 4.89),
    ("claude-code", 108, "reference"): Reported(5.78, 9.9, 0.48),
    ("claude-code", 126, "dynamo-1.5.1"): Reported(2.14, 54.4, 7.78, 228.0),
    ("claude-code", 126, "reference"): Reported(5.85, 13.2, 1.01, 21.4),
    ("osworld", 128, "dynamo-1.5.1"): Reported(1.93, 57.4, 4.00),
    ("osworld", 128, "reference"): Reported(4.30, 24.5, 0.21),
    ("osworld", 144, "dynamo-1.5.1"): Reported(1.98, 66.3, 1.85),
    ("osworld", 144, "reference"): Reported(4.33, 28.1, 0.19),
    ("osworld", 160, "dynamo-1.5.1"): Reported(1.68, 84.4, 3.24),
    ("osworld", 160, "reference"): Reported(4.38, 31.4, 0.17),
}

KNOWN_SPLITS: dict[tuple[str, int, str, str], Reported] = {
    ("claude-code", 126, "static-own", "4P5D"): Reported(6.27, 11.2, 0.7, 14.0),
    ("claude-code", 126, "static", "4P5D"): Reported(4.57, 19.7, 2.4, 60.3),
    ("claude-code", 90, "static-own", "3P6D"): Reported(5.44, 7.8, None, 9.7),
    ("claude-code", 90, "static", "4P5D"): Reported(4.97, 9.2, None, 19.5),
    ("putnam", 224, "static-own", "2P7D"): Reported(9.20, 14.0, None, 1.2),
    ("putnam", 224, "static", "2P7D"): Reported(9.00, 14.6, None, 2.5),
    ("osworld", 128, "static-own", "8P1D"): Reported(4.33, 24.2, None, 35.6),
    ("osworld", 128, "static", "6P3D"): Reported(3.12, 35.8, None, 50.8),
}
"""Runs at a split that the reference named; what the simulator is held against before anything is compared."""

AGENTS: dict[str, tuple[int, ...]] = {
    "putnam": (224, 256, 288),
    "claude-code": (90, 108, 126),
    "osworld": (128, 144, 160),
}
START_OF_SEARCH = {"putnam": "2P7D", "claude-code": "4P5D", "osworld": "8P1D"}
AGREES = 0.15
"""Where a simulated baseline is further from what was reported than this share, no ratio over it is claimed."""

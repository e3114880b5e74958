"""A run as pictures: split, queues, TTFT, hit and throughput over time, switches marked. Needs `[plots]`."""

from pathlib import Path
from typing import Any

from services.simulator.scenario import Run

PANELS = (
    ("split", (("prefill_nodes", "prefill nodes"), ("decode_nodes", "decode nodes")), "nodes"),
    ("queues", (("waiting", "prefills waiting"), ("decoding", "in decode")), "requests"),
    ("ttft", (("ttft_mean_s", "mean"), ("ttft_p95_s", "P95")), "TTFT, s"),
    ("hit", (("hit_pct", "KV hit"),), "%"),
    ("throughput", (("throughput_rps", "answered"),), "requests/s"),
)


class PlotsMissing(Exception):
    """matplotlib is not installed; the text says how to get it."""


def draw(run: Run, folder: Path) -> list[Path]:
    """Write one PNG per panel into `folder`; the files written. PlotsMissing without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotsMissing("plots need matplotlib: pip install 'evolving-infra[plots]'") from error
    mpl.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    minutes = [float(row["at_s"]) / 60 for row in run.timeline]
    written: list[Path] = []
    for name, lines, unit in PANELS:
        figure = Figure(figsize=(9, 3.2), layout="constrained")
        axes = figure.add_subplot()
        for key, label in lines:
            axes.plot(minutes, [float(row[key]) for row in run.timeline], label=label, linewidth=1.2)
        _switches(axes, run.switches)
        axes.set_xlabel("simulated minutes")
        axes.set_ylabel(unit)
        axes.set_title(f"{run.row['workload']}, {run.row['agents']} agents, {run.row['system']}: {name} (simulated)")
        axes.legend(loc="best")
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        written.append(path)
    return written


def _switches(axes: Any, switches: list[dict[str, Any]]) -> None:
    """A line where each switch began, a band until it ended."""
    for switch in switches:
        start = float(switch["at_s"]) / 60
        axes.axvline(start, color="grey", linewidth=0.8, linestyle=":")
        if switch["ended_s"] is not None:
            axes.axvspan(start, float(switch["ended_s"]) / 60, color="grey", alpha=0.12)

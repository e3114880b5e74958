"""Lost reuse over capacity, a panel per trace."""

from pathlib import Path
from typing import Any


def plot(rows: list[dict[str, Any]], policies: list[str], path: Path) -> None:
    """Write the figure; SystemExit says how to install what is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit("the plot needs matplotlib: pip install 'evolving-infra[plots]'") from error
    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure = Figure(figsize=(6 * len(traces), 4.5), layout="constrained")
    lines: dict[str, Any] = {}
    for panel, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        for number, policy in enumerate(policies):
            points = [(r["capacity"], r["lost"]) for r in rows if (r["trace"], r["policy"]) == (trace, policy)]
            if points:
                lines[policy] = panel.plot(*zip(*sorted(points), strict=True), f"C{number}o-")[0]
        panel.set(title=trace, xlabel="capacity / peak demand of active branches", ylabel="lost reuse", ylim=(0, None))
        panel.grid(alpha=0.3)
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4)
    figure.savefig(path)

"""A run as a trace file in the Trace Event Format: Perfetto (ui.perfetto.dev) opens it."""

import gzip
import json
from pathlib import Path

from services.simulator.record import Recorder


def write_trace(recorder: Recorder, path: Path) -> int:
    """Write every iteration and request; how many events. `.gz` is compressed. Processes are nodes and `requests`."""
    pids: dict[object, int] = {}
    tids: dict[tuple[object, object], int] = {}
    events: list[dict[str, object]] = []
    for event in recorder.events:
        pid = pids.setdefault(event["pid"], len(pids) + 1)
        tid = tids.setdefault((event["pid"], event["tid"]), len(tids) + 1)
        events.append(event | {"pid": pid, "tid": tid})
    for name, pid in pids.items():
        events.append({"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": str(name)}})
    for (process, row), tid in tids.items():
        events.append({"name": "thread_name", "ph": "M", "pid": pids[process], "tid": tid, "args": {"name": str(row)}})
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return len(events)

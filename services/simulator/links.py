"""A node's ports: what is sent through one takes its turn there, first come, first served."""

from dataclasses import dataclass


@dataclass(slots=True)
class Port:
    """One direction of one kind of link of one node. `free_at`: when what was promised so far is through."""

    bytes_per_s: float
    free_at: float = 0.0
    busy_s: float = 0.0

    def send(self, size: float, now: float) -> float:
        """When `size` bytes that want to go at `now` are through."""
        seconds = size / self.bytes_per_s
        self.free_at = max(now, self.free_at) + seconds
        self.busy_s += seconds
        return self.free_at


def send_between(source: Port, sink: Port, size: float, now: float) -> float:
    """When `size` bytes are through both ports; they leave when both are free, at the slower one's pace."""
    start = max(now, source.free_at, sink.free_at)
    seconds = size / min(source.bytes_per_s, sink.bytes_per_s)
    for port in (source, sink):
        port.free_at = start + seconds
        port.busy_s += seconds
    return start + seconds

"""For harnesses written in Python: say what a branch does. Needs the standard library and nats-py alone.

with Harness("nats://127.0.0.1:4222") as harness, harness.branch("task-42") as branch:
    client.chat.completions.create(..., extra_headers=branch.headers)
"""

from .branch import Branch, Harness
from .publisher import Publisher

__all__ = ["Branch", "Harness", "Publisher"]

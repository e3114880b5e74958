"""A running decode moves to another node: its KV travels while it goes on, then it stops there and goes on here."""

from services.simulator.call import Call
from services.simulator.clock import Agenda
from services.simulator.links import send_between
from services.simulator.node import Node


def migrate(agenda: Agenda, call: Call, source: Node, sink: Node, now: float) -> None:
    """Begin to move a running decode; nothing happens where `sink` has no room for it."""
    blocks = source.decode_blocks(call)
    if blocks is None or blocks > sink.memory.room() or source is sink:
        return
    sink.memory.promise(blocks)
    size = call.prompt_tokens * source.world.hardware.kv_bytes_per_token

    def arrived(at: float) -> None:
        if call.ended_at is not None or call.decode_node != source.name:
            sink.memory.promised -= blocks
            return

        def stopped(left: int, when: float) -> None:
            source.let_go(call, when)
            sink.take_over(call, blocks, left, when)

        source.engine.leave(call, stopped, at)

    agenda.at(send_between(source.sends, sink.receives, size, now), arrived)

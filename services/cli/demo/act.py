"""The demo's acts: agents on a cluster, one switch each way while they work, and what that cost."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from schemas.phase import PlannerQuery, PlannerReply
from services.btrace import Play
from services.bus import BusError
from services.cli.connection import CommandError, Target
from services.cli.demo.talk import QUESTIONS, Talk, Turn
from services.cli.orders import order
from services.cli.replay.agent import Stage
from services.cli.replay.player import play
from services.cli.replay.records import RequestRecord
from services.cli.replay.tokens import Tokens

SWITCHES = ((0.35, "1P2D"), (0.65, "2P1D"))
"""After which share of the requests which split is ordered."""


@dataclass(slots=True)
class Played:
    """One request that was answered, to be asked again elsewhere."""

    name: str
    prompt: Tokens | list[int]
    answer: Tokens | list[int]


@dataclass(slots=True)
class Act:
    """Everything that happened: requests with their tokens, turns of the conversation, switches."""

    played: list[Played] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    switches: list[PlannerReply] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    took_s: float = 0.0


class Performance:
    """All agents and the conversation on one cluster, with the switches on the way; `act` grows while it runs."""

    def __init__(self, target: Target, plays: list[Play], stage: Stage, talk: Talk, say: Callable[[str], None]) -> None:
        self._target, self._plays, self._stage, self._talk, self._say = target, plays, stage, talk, say
        self._total = sum(len(one.rows) for one in plays)
        self._moved = asyncio.Event()
        self._over = False
        self.act = Act()
        stage.observer = self._keep

    async def run(self) -> Act:
        """Until every request and every switch is over."""
        begun = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._switch())
            tasks.create_task(self._converse())
            await play(self._plays, self._stage)
            self._over = True
            self._moved.set()
        self.act.took_s = time.monotonic() - begun
        return self.act

    def _keep(self, record: RequestRecord, prompt: Tokens, answer: Tokens) -> None:
        if record.error:
            self.act.problems.append(f"request {record.trace_request}: {record.error}")
        else:
            self.act.played.append(Played(record.trace_request, prompt, answer))
        self._moved.set()

    async def _converse(self) -> None:
        for question in QUESTIONS:
            turn = await self._talk.ask(question, last=question == QUESTIONS[-1])
            self._say(_spoken(turn))
            self.act.turns.append(turn)
            if turn.error:
                self.act.problems.append(f"conversation: {turn.error}")
            else:
                self.act.played.append(Played(f"conversation: {question}", turn.prompt, turn.answer))

    async def _switch(self) -> None:
        """Order each switch when its share of the requests is answered."""
        for share, split in SWITCHES:
            while len(self._stage.records) < share * self._total and not self._over:
                await self._moved.wait()
                self._moved.clear()
            self._say(f"[cyan]order: split {split}[/cyan]")
            query = PlannerQuery(split=split, reason="demo")
            try:
                reply = await order(self._target, "split", query, lambda line: self._say(f"  {line}"))
            except (CommandError, BusError) as error:
                self.act.problems.append(f"split {split}: {error}")
                continue
            self.act.switches.append(reply)
            took_s = reply.took_s or 0.0
            self._say(
                f"[cyan]split {reply.split_now} after {took_s:.2f} s, {reply.moved} waiting requests moved[/cyan]"
            )


def _spoken(turn: Turn) -> str:
    if turn.error:
        return f"[red]conversation: {turn.error}[/red]"
    reused = f"{turn.cached_tokens} of {len(turn.prompt)} tokens reused"
    return f"[bold]{turn.question}[/bold] {turn.text.strip()} [dim]({turn.nodes}, {reused}, {turn.took_s:.1f} s)[/dim]"

"""One run of one recorded agent: requests wait for those they depend on, then for their recorded delay."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from services.btrace import Operation, Play, Row
from services.cli.replay.client import Answer, Branch, CompletionClient
from services.cli.replay.contexts import PlayContexts, Scale, TokenSource
from services.cli.replay.ideal import IdealCache
from services.cli.replay.records import Outcome, RequestRecord
from services.cli.replay.tokens import Tokens

Observer = Callable[[RequestRecord, Tokens, Tokens], None]


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """`agents` at a time, or `rate_per_min` agents started a minute. Recorded waits are divided by `speed`.

    With `duration_s` agents are started anew until then; without, each recorded agent is played once. Requests sent in
    the first `warmup_s` are not scored. `max_pause_s` caps recorded waits before they are divided.
    """

    agents: int = 1
    rate_per_min: float | None = None
    speed: float = 1.0
    duration_s: float | None = None
    warmup_s: float = 0.0
    max_pause_s: float | None = None

    def wait_s(self, delay_ms: float) -> float:
        """How long a recorded wait takes here."""
        delay_s = delay_ms / 1000
        return (delay_s if self.max_pause_s is None else min(delay_s, self.max_pause_s)) / self.speed


@dataclass(slots=True)
class Stage:
    """What all agents of one replay share. `observer` is told every record with its prompt and answer tokens."""

    client: CompletionClient
    pace: Pace
    scale: Scale
    source: TokenSource
    ideal: IdealCache
    run_id: str
    observer: Observer | None = None
    records: list[RequestRecord] = field(default_factory=list)
    agents_started: int = 0
    agents_ended_s: list[float] = field(default_factory=list)
    started_at: float = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def over(self) -> bool:
        """The duration is reached: nothing new is sent."""
        return self.pace.duration_s is not None and self.elapsed_s >= self.pace.duration_s

    def keep(self, record: RequestRecord, prompt: Tokens, answer: Tokens) -> None:
        self.records.append(record)
        if self.observer is not None:
            self.observer(record, prompt, answer)


class AgentRun:
    """`run` plays `play` once; `instance` is its name, unique in the replay."""

    def __init__(self, stage: Stage, play: Play, instance: str) -> None:
        self._stage, self._play, self._instance = stage, play, instance
        self._contexts = PlayContexts(play.rows, instance, stage.scale, stage.source)
        loop = asyncio.get_running_loop()
        self._ended: dict[str, asyncio.Future[float | None]] = {r.request_id: loop.create_future() for r in play.rows}
        self._answered_at: dict[str, float] = {}
        self._open_branches: set[str] = set()

    async def run(self) -> None:
        """Until every request was answered, or skipped because one before it failed or the time is over."""
        self._stage.agents_started += 1
        first = min((row.not_before_ms for row in self._play.rows), default=0.0)
        await asyncio.sleep(self._stage.pace.wait_s(first))
        async with asyncio.TaskGroup() as tasks:
            for row in self._play.rows:
                tasks.create_task(self._request(row))
        for branch in sorted(self._open_branches):
            await self._stage.client.end_branch(branch)
        self._stage.agents_ended_s.append(self._stage.elapsed_s)

    async def _request(self, row: Row) -> None:
        """Play one row; its future tells when it was answered, None when there is nothing to continue from.

        A replay that is cut short has cancelled the future through a row that waits for it.
        """
        answered_at: float | None = None
        try:
            start_at = await self._start_at(row)
            if start_at is not None:
                await asyncio.sleep(start_at - time.monotonic())
                if not self._stage.over:
                    answered_at = await self._send(row)
        finally:
            ended = self._ended[row.request_id]
            if not ended.done():
                ended.set_result(answered_at)

    async def _start_at(self, row: Row) -> float | None:
        start_at = time.monotonic()
        for dependency in row.starts_after:
            before = await self._ended[dependency.request_id]
            if before is None:
                return None
            start_at = max(start_at, before + self._stage.pace.wait_s(dependency.delay_ms))
        return start_at

    async def _send(self, row: Row) -> float | None:
        stage = self._stage
        prompt = self._contexts.prompt(row)
        ideal = stage.ideal.open(prompt)
        branch = self._branch(row)
        self._open_branches.add(branch.id)
        length = stage.scale.output(row.output_length)
        answer = await stage.client.complete(prompt, length, branch, ideal.generated)
        record = self._record(row, branch, prompt, answer)
        record.ideal_tokens = ideal.ideal_tokens
        stage.keep(record, prompt, answer.tokens)
        if answer.error:
            return None
        if branch.end:
            self._open_branches.discard(branch.id)
        self._contexts.answered(row, answer.tokens)
        self._answered_at[row.session_id] = answer.ended_at
        return answer.ended_at

    def _branch(self, row: Row) -> Branch:
        kind = row.op.value if row.op in (Operation.FORK, Operation.SUBAGENT) else None
        parent = self._branch_id(row.parent_session_id) if kind and row.parent_session_id else None
        return Branch(self._branch_id(row.session_id), row.version, parent, kind, row.end)

    def _branch_id(self, session_id: str) -> str:
        return f"{self._instance}/{session_id.removeprefix(f'{self._play.id}/')}"

    def _record(self, row: Row, branch: Branch, prompt: Tokens, answer: Answer) -> RequestRecord:
        began, ended = self._stage.started_at, self._answered_at.get(row.session_id)
        ttft_s = None if answer.first_at is None else answer.first_at - answer.sent_at
        tpot_s = None
        if answer.first_at is not None and len(answer.tokens) > 1 and not answer.error:
            tpot_s = (answer.ended_at - answer.first_at) / (len(answer.tokens) - 1)
        return RequestRecord(
            request=answer.request_id,
            trace_request=row.request_id,
            agent=self._instance,
            branch=branch.id,
            operation=row.kind or row.op.value,
            version=row.version,
            outcome=Outcome.FAILED if answer.error else Outcome.ANSWERED,
            sent_s=answer.sent_at - began,
            error=answer.error,
            prompt_tokens=len(prompt),
            cached_tokens=answer.cached_tokens,
            output_tokens=len(answer.tokens),
            ttft_s=ttft_s,
            tpot_s=tpot_s,
            e2e_s=None if answer.error else answer.ended_at - answer.sent_at,
            pause_s=None if ended is None else answer.sent_at - ended,
            turned_away=answer.turned_away,
            prefill_node=answer.prefill_node,
            decode_node=answer.decode_node,
            scored=answer.sent_at - began >= self._stage.pace.warmup_s,
        )

"""`ei replay` against a small server that caches without limit: what is sent, when, and what is reported."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from rich.console import Console

from schemas.block_key import block_digests
from schemas.codec import encode
from schemas.phase import Decision, Phase, PhaseState, SwitchState
from schemas.subjects import Subjects
from schemas.telemetry import RequestTelemetry
from services.btrace import TraceError, read_trace
from services.bus import NatsBus
from services.cli.connection import CommandError, Target
from services.cli.replay.agent import Pace
from services.cli.replay.command import ReplayOptions, ReplayReport, replay
from services.cli.replay.contexts import Scale
from services.cli.replay.plan import Limits, cut

BLOCK = 4
HEADER = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 4, "source": {}, "btrace": 1}


class Server:
    """A completion server with one unlimited cache; `turn_away` and `fail` are branch suffixes met with 429 and 500."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], dict[str, str]]] = []
        self.deleted: list[str] = []
        self.known: set[bytes] = set()
        self.turn_away: list[str] = []
        self.fail: list[str] = []
        self.busy = self.most_busy = 0
        self.app = web.Application()
        self.app.add_routes(
            [
                web.get("/v1/models", _serve({"data": [{"id": "model"}]})),
                web.get("/v1/cluster", _serve({"split": "2P1D", "nodes": [{"block_size": BLOCK}]})),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/completions", self._complete),
                web.delete("/v1/branches/{branch:.+}", self._delete),
            ]
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        text = (await request.json())["prompt"]
        return web.json_response({"tokens": [1000 + ord(letter) for letter in text]})

    async def _delete(self, request: web.Request) -> web.Response:
        self.deleted.append(request.match_info["branch"])
        return web.json_response({})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        branch = request.headers["x-ei-branch-id"]
        if any(branch.endswith(suffix) for suffix in self.turn_away):
            self.turn_away.clear()
            return web.json_response({}, status=429, headers={"retry-after": "0.1"})
        if any(branch.endswith(suffix) for suffix in self.fail):
            return web.json_response({"error": {"message": "no"}}, status=500)
        self.requests.append((body, dict(request.headers)))
        prompt: list[int] = body["prompt"]
        digests = block_digests(b"".join(t.to_bytes(4, "little") for t in prompt), BLOCK)
        cached = 0
        while cached < min(len(digests), (len(prompt) - 1) // BLOCK) and digests[cached] in self.known:
            cached += 1
        answer = [(sum(prompt) + index) % 977 for index in range(body["max_tokens"])]
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        response = web.StreamResponse(
            headers={
                "content-type": "text/event-stream",
                "x-request-id": f"q{len(self.requests)}",
                "x-ei-prefill-node": "node-0",
                "x-ei-decode-node": "node-1",
            }
        )
        await response.prepare(request)
        for token in answer:
            await asyncio.sleep(0.001)
            await response.write(_event({"choices": [{"token_ids": [token], "finish_reason": None}]}))
        made = prompt + answer[:-1]
        self.known.update(block_digests(b"".join(t.to_bytes(4, "little") for t in made), BLOCK))
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": cached * BLOCK}}
        await response.write(_event({"choices": [{"token_ids": [], "finish_reason": "length"}]}))
        await response.write(_event({"choices": [], "usage": usage}))
        await response.write(b"data: [DONE]\n\n")
        self.busy -= 1
        return response


def _event(chunk: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(chunk)}\n\n".encode()


def _serve(content: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(content)

    return answer


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, str]]:
    one = Server()
    runner = web.AppRunner(one.app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    yield one, f"http://{host}:{port}"
    await runner.cleanup()


def row(
    name: str, branch: str, length: int, keep: int, add: list[list[int]], after: str | None = None, **more: Any
) -> dict[str, Any]:
    dependencies = [{"request_id": after, "trigger": "completion", "delay_ms": 60, "relation": "sequence"}]
    return {
        "request_id": name,
        "play_id": "a",
        "session_id": f"a/{branch}",
        "model": "main",
        "input_length": length,
        "output_length": 6,
        "not_before_ms": 0,
        "dependencies": dependencies if after else [],
        "ctx": {"keep": keep, "add": add},
        "op": "append",
        "version": 0,
        **more,
    }


AGENT = [
    row("r0", "0", 20, 0, [[1, 5]], op="root"),
    row("r1", "0", 34, 5, [[6, 3]], after="r0"),
    row("s0", "s1", 12, 0, [[90, 3]], after="r0", op="subagent", parent_session_id="a/0", end=True),
    row("r2", "0", 18, 2, [[50, 2]], after="r1", op="compact", kind="summary", version=1, end=True),
]


def write(path: Path, rows: list[dict[str, Any]], agents: int = 1) -> Path:
    lines = [json.dumps(HEADER)]
    for agent in range(agents):
        name = f"agent{agent}"
        lines += [json.dumps(one).replace('"a"', f'"{name}"').replace('"a/', f'"{name}/') for one in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


async def run(url: str, nats_url: str, trace: Path, **options: Any) -> ReplayReport:
    target = Target(url=url, nats_url=nats_url, nkey="", partition="p0")
    chosen = {"pace": Pace(), "limits": Limits(), **options}
    return await replay(target, ReplayOptions(trace=trace, **chosen), Console(quiet=True))


async def test_requests_carry_branches_and_the_answers_really_given(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    one, url = server
    report = await run(url, nats_url, write(tmp_path / "t.jsonl.gz", AGENT))
    sent = {len(body["prompt"]): (body, headers) for body, headers in one.requests}
    first, second = sent[20][0]["prompt"], sent[34][0]["prompt"]
    answer = [(sum(first) + index) % 977 for index in range(6)]
    assert second[:26] == first + answer
    compacted, headers = sent[18]
    assert compacted["prompt"][:8] == first[:8]
    assert (headers["x-ei-branch-version"], headers["x-ei-branch-end"]) == ("1", "true")
    spawned = sent[12][1]
    assert spawned["x-ei-branch-kind"] == "subagent"
    assert spawned["x-ei-branch-parent"] == sent[20][1]["x-ei-branch-id"]
    assert spawned["x-ei-branch-id"].endswith("/s1")
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["max_tokens"] == 6 for body, _ in one.requests)
    assert one.deleted == []
    assert (report.summary.requests, report.summary.failed) == (4, 0)


async def test_an_unlimited_cache_reaches_exactly_the_ideal_hit(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    _, url = server
    report = await run(url, nats_url, write(tmp_path / "t.jsonl.gz", AGENT, agents=3), pace=Pace(agents=3))
    assert report.summary.ideal_hit_pct > 20
    assert report.summary.hit_pct == report.summary.ideal_hit_pct
    assert report.summary.lost_tokens == 0
    assert all(record.cached_tokens == record.ideal_tokens for record in report.requests)


async def test_waits_are_those_recorded_divided_by_the_speed(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    _, url = server
    trace = write(tmp_path / "t.jsonl.gz", AGENT)
    slow = await run(url, nats_url, trace, pace=Pace(speed=0.3))
    pauses = [record.pause_s for record in slow.requests if record.pause_s is not None]
    assert len(pauses) == 2
    assert all(0.2 <= pause < 1.0 for pause in pauses)
    capped = await run(url, nats_url, trace, pace=Pace(speed=0.3, max_pause_s=0.0))
    assert all(record.pause_s < 0.2 for record in capped.requests if record.pause_s is not None)


async def test_closed_loop_keeps_so_many_agents_and_replaces_those_that_end(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    one, url = server
    trace = write(tmp_path / "t.jsonl.gz", [row("r0", "0", 20, 0, [[1, 5]], op="root", output_length=30)], agents=7)
    report = await run(url, nats_url, trace, pace=Pace(agents=2))
    assert one.most_busy == 2
    assert (report.summary.agents, report.summary.sessions_ended) == (7, 7)


async def test_open_loop_starts_agents_at_its_rate_whatever_happens(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    _, url = server
    trace = write(tmp_path / "t.jsonl.gz", [row("r0", "0", 20, 0, [[1, 5]], op="root", output_length=400)], agents=4)
    report = await run(url, nats_url, trace, pace=Pace(rate_per_min=600))
    starts = sorted(record.sent_s for record in report.requests)
    assert [round(start, 1) for start in starts] == [0.0, 0.1, 0.2, 0.3]


async def test_a_duration_starts_agents_anew_with_other_contexts(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    one, url = server
    trace = write(tmp_path / "t.jsonl.gz", [row("r0", "0", 20, 0, [[1, 5]], op="root")])
    report = await run(url, nats_url, trace, pace=Pace(agents=1, duration_s=0.5))
    prompts = {tuple(body["prompt"]) for body, _ in one.requests}
    assert len(prompts) == len(report.requests) > 2


async def test_a_request_turned_away_is_sent_again(server: tuple[Server, str], nats_url: str, tmp_path: Path) -> None:
    one, url = server
    one.turn_away.append("/s1")
    report = await run(url, nats_url, write(tmp_path / "t.jsonl.gz", AGENT))
    assert (report.summary.requests, report.summary.failed, report.summary.turned_away) == (4, 0, 1)


async def test_what_depends_on_a_failed_request_is_not_played_and_its_branch_is_ended(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    one, url = server
    one.fail.append("agent0/0")
    report = await run(url, nats_url, write(tmp_path / "t.jsonl.gz", AGENT))
    assert [(record.trace_request, record.outcome) for record in report.requests] == [("r0", "failed")]
    assert "HTTP 500" in report.requests[0].error
    assert [branch.split(".")[-1] for branch in one.deleted] == ["agent0/0"]


async def test_a_replay_cut_short_ends_without_an_error_of_its_own(
    server: tuple[Server, str], nats_url: str, tmp_path: Path
) -> None:
    one, url = server
    playing = asyncio.ensure_future(run(url, nats_url, write(tmp_path / "t.jsonl.gz", AGENT)))
    async with asyncio.timeout(10):
        while not one.requests:
            await asyncio.sleep(0.001)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_the_cluster_s_telemetry_is_joined(server: tuple[Server, str], nats_url: str, tmp_path: Path) -> None:
    _, url = server
    subjects = Subjects()
    bus = await NatsBus.connect(nats_url, name="cluster", timeout_s=5)
    trace = write(tmp_path / "t.jsonl.gz", [row("r0", "0", 20, 0, [[1, 5]], op="root", output_length=300)])
    running = asyncio.create_task(run(url, nats_url, trace))
    try:
        await asyncio.sleep(0.3)
        told = RequestTelemetry(
            id="t",
            t=0.0,
            request="q1",
            branch=None,
            version=None,
            outcome="ok",
            t_arrive=10.0,
            t_placed=10.0,
            t_prefill_start=10.5,
            t_end=11.0,
            restored_tokens=8,
            ttft_predicted_s=0.1,
        )
        decision = Decision(id="d", t=0.0, split_now="2P1D", split_new="1P2D", applied=True, why="")
        state = PhaseState(
            id="s",
            t=0.0,
            node="node-0",
            phase=Phase.DECODE,
            epoch=1,
            state=SwitchState.SWITCHED,
            took_s=0.25,
            decision_id="d",
        )
        await bus.publish(subjects.telemetry_request("node-0"), encode(told))
        await bus.publish(subjects.phase_state("node-0"), encode(state))
        await bus.publish(subjects.planner_decision(), encode(decision))
        report = await running
    finally:
        await bus.close()
    assert report.requests[0].queue_s == 0.5
    assert report.summary.restored_tokens_per_request == 8
    assert report.summary.most_loaded_over_average == 1.0
    assert [(switch.split, switch.took_s) for switch in report.summary.switches] == [("1P2D", 0.25)]
    assert report.summary.split == "1P2D"


async def test_a_cluster_that_does_not_serve_is_named(nats_url: str, tmp_path: Path) -> None:
    trace = write(tmp_path / "t.jsonl.gz", AGENT)
    with pytest.raises(CommandError, match=r"http://127\.0\.0\.1:1 does not serve"):
        await run("http://127.0.0.1:1", nats_url, trace)


def test_limits_cut_an_agent_with_all_that_depends_on_it(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.jsonl.gz", AGENT))
    scale = Scale(4, 4)
    kept = cut(trace.plays[0], scale, Limits(context_tokens=30))
    assert [(one.request_id, one.end) for one in kept.rows] == [("r0", True), ("s0", True)]
    assert [one.request_id for one in cut(trace.plays[0], scale, Limits(requests_per_agent=2)).rows] == ["r0", "r1"]


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        ([{"schema": "other", "version": 2, "block_size": 4}], "header is other v2, expected dynamo"),
        ([HEADER, {"request_id": "x"}], "line 2: Object missing required field"),
        ([HEADER, row("r1", "0", 5, 0, [], after="r0")], "r1 refers to r0, which is no earlier request"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, lines: list[dict[str, Any]], text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    with pytest.raises(TraceError, match=text):
        read_trace(path)


def test_the_shipped_trace_can_be_read() -> None:
    trace = read_trace(Path("data/traces/cc_smoke.btrace.jsonl.gz"))
    assert (len(trace.plays), sum(len(play.rows) for play in trace.plays)) == (10, 1693)

"""Router CPU of long agent prompts, beside Dynamo's frontend: `python -m bench.tokens [--quick] [--json FILE]`.

16 conversations of 100,000 tokens grow by 2,000 tokens a turn; each turn is one chat request over the whole history,
asked of both sides in turns: our router over two timed engines that take no time, Dynamo's frontend over its mocker.
Same tokenizer, chat template, bodies and block size. `cpu_ratio`: CPU per request of the router process over that of
the frontend process. `req_ratio`: requests per second of 4 clients, everything on the same cores. The first turn of
every conversation, which nobody has seen before, is told apart. `mismatches`: requests whose tokens differ from those
of the whole text, tokenised by the library in one go.

The peer runs as it comes, with its cache of token prefixes, which needs some turns to hold a conversation;
`settled_...` are the ratios of the last third of the turns. `few_...` are the ratios with 4 conversations, asked before
all others, and `full_...` those over the peer with its cache switched off (both left out by --quick).
"""

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from bench.tokens_load import BASE_TOKENS, TURN_TOKENS, Turn, ask_all, conversation
from bench.tokens_peer import HOST, MODEL, NEEDS, PYTHON, dynamo, write_model
from schemas.block_key import token_list
from services.cli.cluster.local import local_cluster
from services.engine.sglang.model import ModelMissing, prepare
from services.router.text.tokenizer import load_tokenizer

PORT, PEER_PORT, FULL_PORT = 18_620, 18_621, 18_622
BLOCK_SIZE, CONTEXT_TOKENS, CLIENTS = 64, 262_144, 4
AGENTS, FEW_AGENTS, FEW_TURNS = 16, 4, 8
READY_S = 90.0
RESULTS = Path(__file__).parent / "results" / "tokens.json"


@dataclass
class Side:
    """One way in, and what was measured on it: per round CPU milliseconds and seconds of one request."""

    name: str
    port: int
    pid: int
    first_cpu_ms: float = 0.0
    cpu_ms: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    rss_mb: float = 0.0

    async def ask(self, bodies: Sequence[bytes]) -> tuple[float, float, list[int]]:
        """CPU ms and seconds of a request, and what each answer counted."""
        before = self._cpu_s()
        took_s, counted = await ask_all(HOST, self.port, bodies, CLIENTS)
        return (self._cpu_s() - before) * 1e3 / len(bodies), took_s / len(bodies), counted

    def _cpu_s(self) -> float:
        process = psutil.Process(self.pid)
        self.rss_mb = process.memory_info().rss / 1e6
        return sum(process.cpu_times()[:2])


def options(model: Path) -> list[str]:
    """The arguments of our cluster."""
    timed = {"preset": "zero", "block_size": BLOCK_SIZE, "max_context_tokens": CONTEXT_TOKENS, "l1_tokens": 1 << 22}
    given = ["--engine", "timed", "--nodes", "2", "--model", str(model), "--set", "engine.phase=both"]
    for key, value in timed.items():
        given += ["--set", f"engine.timed.{key}={value}"]
    return [*given, "--set", "engine.pool_socket=", "--set", f"router.model_name={MODEL}"]


async def measure(
    sides: Sequence[Side], conversations: Sequence[Sequence[Turn]], expected: Sequence[Sequence[int]] | None
) -> int:
    """Ask every turn of every side; how many answers counted other prompt tokens than the library."""
    wrong = 0
    for number in range(len(conversations[0])):
        bodies = [turns[number].body for turns in conversations]
        for side in sides:
            cpu_ms, seconds, counted = await side.ask(bodies)
            if number == 0:
                side.first_cpu_ms = cpu_ms
            else:
                side.cpu_ms.append(cpu_ms)
                side.seconds.append(seconds)
            if side is sides[0] and expected is not None:
                wrong += sum(found != turns[number] for found, turns in zip(counted, expected, strict=True))
    return wrong


async def mismatches(model: Path, conversations: Sequence[Sequence[Turn]]) -> tuple[int, list[list[int]]]:
    """Requests whose tokens by segment are not those of the whole text; and the number of tokens of each."""
    tokenizer, wrong, counts = load_tokenizer(str(model)), 0, list[list[int]]()
    for turns in conversations:
        counts.append([])
        for turn in turns:
            found = token_list((await tokenizer.encode_chat(turn.messages)).packed)
            text = tokenizer.template.render(turn.messages)
            wrong += found != tokenizer.library.encode(text, add_special_tokens=False).ids
            counts[-1].append(len(found))
    return wrong, counts


async def run(python: Path, work: Path, *, quick: bool) -> dict[str, Any]:
    try:
        model = write_model(prepare(), work / "model", CONTEXT_TOKENS)
    except ModelMissing as error:
        raise SystemExit(str(error)) from error
    library = Tokenizer.from_file(str(model / "tokenizer.json"))
    agents, turns = AGENTS, 2 if quick else 6
    conversations = [conversation(library, MODEL, turns, seed) for seed in range(agents)]
    wrong, counts = await mismatches(model, conversations)
    async with (
        local_cluster(PORT, options(model), work / "cluster.log", READY_S) as cluster,
        dynamo(python, model, PEER_PORT, work, BLOCK_SIZE) as peer_pid,
        contextlib.AsyncExitStack() as stack,
    ):
        ours = Side("ours", PORT, cluster.state.processes["router"].pid)
        sides = [ours, Side("dynamo-1.6.1", PEER_PORT, peer_pid)]
        if not quick:
            peer = dynamo(python, model, FULL_PORT, work, BLOCK_SIZE, cache=False)
            sides.append(Side("dynamo-1.6.1 without its cache", FULL_PORT, await stack.enter_async_context(peer)))
        little = {} if quick else await few(sides[:2], library)
        wrong += await measure(sides, conversations, counts)
        found = figures(ours, sides[1], wrong, counts) | {"quick": quick, "agents": agents, "turns": turns}
        found |= {f"full_{key}": value for side in sides[2:] for key, value in ratios(ours, side).items()}
    return found | {f"few_{key}": value for key, value in little.items()}


async def few(sides: Sequence[Side], library: Tokenizer) -> dict[str, float]:
    """The ratios with so few conversations that both sides hold all of them."""
    fresh = [Side(side.name, side.port, side.pid) for side in sides]
    conversations = [conversation(library, MODEL, FEW_TURNS, seed) for seed in range(1000, 1000 + FEW_AGENTS)]
    await measure(fresh, conversations, None)
    ours, theirs = fresh
    return ratios(ours, theirs) | {"cpu_ms_per_request": mean(ours.cpu_ms), "agents": FEW_AGENTS, "turns": FEW_TURNS}


def ratios(ours: Side, theirs: Side) -> dict[str, float]:
    """Ours over theirs."""
    return {
        "cpu_ratio": mean(ours.cpu_ms) / mean(theirs.cpu_ms),
        "req_ratio": mean(theirs.seconds) / mean(ours.seconds),
        "peer_cpu_ms_per_request": mean(theirs.cpu_ms),
        "peer_req_per_s": 1 / mean(theirs.seconds),
    }


def settled(ours: Side, theirs: Side) -> dict[str, float]:
    """The ratios of the last third of the turns."""
    last = -max(1, len(ours.cpu_ms) // 3)
    parts = [Side(s.name, s.port, s.pid, cpu_ms=s.cpu_ms[last:], seconds=s.seconds[last:]) for s in (ours, theirs)]
    found = ratios(*parts)
    return {"settled_cpu_ratio": found["cpu_ratio"], "settled_req_ratio": found["req_ratio"]}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def figures(ours: Side, theirs: Side, wrong: int, counts: Sequence[Sequence[int]]) -> dict[str, Any]:
    return {
        "bench": "tokens",
        **ratios(ours, theirs),
        **settled(ours, theirs),
        "mismatches": wrong,
        "cpu_ms_per_request": mean(ours.cpu_ms),
        "first_cpu_ms_per_request": ours.first_cpu_ms,
        "req_per_s": 1 / mean(ours.seconds),
        "rss_mb": ours.rss_mb,
        "peer": theirs.name,
        "peer_first_cpu_ms_per_request": theirs.first_cpu_ms,
        "cpu_ms_by_round": [round(value, 1) for value in ours.cpu_ms],
        "peer_cpu_ms_by_round": [round(value, 1) for value in theirs.cpu_ms],
        "prompt_tokens": mean([count for turns in counts for count in turns]),
        "base_tokens": BASE_TOKENS,
        "turn_tokens": TURN_TOKENS,
        "clients": CLIENTS,
        "block_size": BLOCK_SIZE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.tokens", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="2 turns, one peer")
    parser.add_argument("--dynamo", type=Path, default=PYTHON, metavar="PYTHON", help="interpreter that has Dynamo")
    parser.add_argument("--json", type=Path, metavar="FILE")
    chosen = parser.parse_args(argv)
    if not chosen.dynamo.exists():
        raise SystemExit(NEEDS)
    with tempfile.TemporaryDirectory() as work:
        line = asyncio.run(run(chosen.dynamo.absolute(), Path(work), quick=chosen.quick))
    for key, value in line.items():
        print(f"{key:30} {value:.3f}" if isinstance(value, float) else f"{key:30} {value}")
    for target in [chosen.json] if chosen.json else [] if chosen.quick else [RESULTS]:
        target.parent.mkdir(exist_ok=True)
        target.write_text(json.dumps(line) + "\n")
    print(json.dumps(line))
    return 0


if __name__ == "__main__":
    sys.exit(main())

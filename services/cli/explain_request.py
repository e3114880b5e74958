"""`ei explain REQUEST|BRANCH`: where each prompt token came from, and why those were computed that were."""

from typing import Any
from urllib.parse import quote

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table

from schemas.telemetry import RequestTelemetry
from services.cli.connection import CommandError, Target

_TIMEOUT_S = 10.0
_NOT_FOUND = 404
MEANINGS = {
    "new": "nobody produced this before",
    "diverged": "the prompt left its branch's context",
    "never_stored": "produced, but no pool ever reported it",
    "evicted": "evicted while no active branch needed it",
    "evicted_referenced": "evicted although an active branch needed it: host memory is too small",
    "node_lost": "its node was lost",
    "unreachable": "copies lie beyond a gap in the prefix",
    "not_fetched": "it lay in the cluster and did not come in time",
    "tail": "less than a block, or the last token: always computed",
}


class Found(msgspec.Struct):
    """What a router says of a key: one request, or the last ones of a branch and where its prompts break."""

    requests: list[RequestTelemetry]
    breaks: list[dict[str, Any]] = []


async def find(target: Target, key: str) -> Found | None:
    """Ask the router for a request or a branch of this name; None when it knows neither, CommandError without one."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            request = await _get(session, f"{target.url}/v1/requests/{quote(key, safe='')}")
            if request is not None:
                return Found([msgspec.convert(request, RequestTelemetry)])
            listed = await _get(session, f"{target.url}/v1/requests?branch={quote(key, safe='')}")
            found = msgspec.convert(listed["requests"], list[RequestTelemetry]) if listed else []
            if not found:
                return None
            broken = await _get(session, f"{target.url}/v1/prompt_breaks")
            return Found(found, [each for each in (broken or {"breaks": []})["breaks"] if each["branch"] == key])
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
        raise CommandError(f"no router at {target.url}: {error or type(error).__name__}") from error


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        if response.status == _NOT_FOUND:
            return None
        response.raise_for_status()
        return await response.json()


def show(found: Found, *, as_json: bool) -> None:
    """Print it."""
    console = Console()
    if as_json:
        console.print_json(msgspec.json.encode(found).decode())
        return
    for broken in found.breaks:
        console.print(
            f"your prompt changes at token {broken['position']} on every call: {broken['before']!r} became "
            f"{broken['now']!r}",
            style="bold",
        )
    if len(found.requests) > 1:
        console.print(_overview(found.requests))
    console.print(*_lines(found.requests[0]), sep="\n")


def _lines(request: RequestTelemetry) -> list[str]:
    """One request in words."""
    said = [
        f"request {request.request}: {request.outcome}, branch {request.branch or '-'} version {request.version}, "
        f"{request.lineage or 'lineage unknown'}",
        f"prefill {request.prefill_node or '-'}, decode {request.decode_node or '-'}, attempts {request.attempts}",
        f"prompt {request.prompt_tokens} tokens: {request.cached_tokens} cached "
        f"({request.restored_tokens} from host memory), {request.uncached_tokens} computed",
    ]
    if request.differs_at is not None:
        said.append(f"it leaves its branch's context at token {request.differs_at}")
    said += [f"  {tokens:>9} {MEANINGS.get(cause, cause)}" for cause, tokens in _by_size(request)]
    if request.ttft_s is not None and request.ttft_predicted_s is not None:
        said.append(f"first token after {request.ttft_s:.3f} s, predicted {request.ttft_predicted_s:.3f} s")
    for candidate in request.candidates:
        fetched = f", fetched from {', '.join(candidate.fetched_from)}" if candidate.fetched_from else ""
        said.append(
            f"  {candidate.node}: {candidate.ttft_s:.3f} s = wait {candidate.wait_s:.3f} + compute "
            f"{candidate.service_s:.3f}, fetch {candidate.fetch_s:.3f}, displaced {candidate.duplicate_s:.3f}; "
            f"{candidate.cached_tokens} cached{fetched}"
        )
    return said


def _overview(requests: list[RequestTelemetry]) -> Table:
    table = Table()
    for name in ("request", "prompt", "cached", "computed", "most because", "leaves at"):
        table.add_column(name, justify="left" if name in ("request", "most because") else "right")
    for request in requests:
        largest = next(iter(_by_size(request)), ("-", 0))[0]
        leaves = "" if request.differs_at is None else f"token {request.differs_at}"
        counts = (request.prompt_tokens, request.cached_tokens, request.uncached_tokens)
        table.add_row(request.request, *map(str, counts), largest, leaves)
    return table


def _by_size(request: RequestTelemetry) -> list[tuple[str, int]]:
    return sorted(request.misses.items(), key=lambda cause: -cause[1])

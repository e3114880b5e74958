"""`ei status`: nodes, split, last decision and the tree of branches, as the router sees them."""

from collections import defaultdict
from typing import Any

import aiohttp
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from schemas.branch import BranchInfo
from services.cli.connection import CommandError, Target

_TIMEOUT_S = 10.0


class TierView(msgspec.Struct):
    used: int = 0
    total: int = 0
    referenced: int = 0

    def __str__(self) -> str:
        return f"{_short(self.used)} of {_short(self.total)}"


def _short(tokens: int) -> str:
    """A count in at most four characters and a letter."""
    for limit, letter, unit in ((10_000_000, "M", 1_000_000), (10_000, "k", 1000)):
        if tokens >= limit:
            return f"{tokens / unit:.0f}{letter}"
    return str(tokens)


class KvView(msgspec.Struct):
    l1: TierView
    l2: TierView


class NodeView(msgspec.Struct):
    node: str
    alive: bool = True
    phase: str = ""
    epoch: int = 0
    ready: bool = True
    refused: str | None = None
    waiting: int = 0
    running: int = 0
    kv: KvView | None = None

    @property
    def state(self) -> str:
        if self.refused:
            return f"refused: {self.refused}"
        return "silent" if not self.alive else "ready" if self.ready else "starting"


class DecisionView(msgspec.Struct):
    split_now: str
    why: str
    applied: bool
    split_new: str | None = None
    id: str = ""
    mode: str = ""


class ClusterView(msgspec.Struct):
    """`GET /v1/cluster`, as far as it is shown here."""

    split: str
    nodes: list[NodeView]
    models: list[str] = []
    open_requests: int = 0
    decision: DecisionView | None = None


class BranchesView(msgspec.Struct):
    branches: list[BranchInfo]


class BreakView(msgspec.Struct):
    branch: str | None
    position: int
    before: str
    now: str

    def __str__(self) -> str:
        who = f"prompts of {self.branch}" if self.branch else "prompts without an id"
        return f"{who} break at token {self.position}: {self.before!r}, then {self.now!r}"


class BreaksView(msgspec.Struct):
    breaks: list[BreakView] = []


async def show_status(target: Target, *, branches: bool, as_json: bool) -> None:
    """Print the status; CommandError when the router does not answer."""
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        cluster = await _get(session, f"{target.url}/v1/cluster")
        listed = await _get(session, f"{target.url}/v1/branches") if branches else None
        broken = await _get(session, f"{target.url}/v1/prompt_breaks") if branches else None
    console = Console()
    if as_json:
        both: dict[str, Any] = {"cluster": msgspec.json.decode(cluster)}
        if listed is not None:
            both |= msgspec.json.decode(listed)
        if broken is not None:
            both |= {"prompt_breaks": msgspec.json.decode(broken)["breaks"]}
        console.print_json(data=both)
        return
    try:
        console.print(cluster_table(msgspec.json.decode(cluster, type=ClusterView), target.url))
        if listed is not None:
            console.print(branch_tree(msgspec.json.decode(listed, type=BranchesView).branches))
        for each in msgspec.json.decode(broken, type=BreaksView).breaks if broken is not None else ():
            console.print(Text(str(each), style="yellow"))
    except msgspec.MsgspecError as error:
        raise CommandError(f"{target.url} answers in words this version does not know: {error}") from error


async def _get(session: aiohttp.ClientSession, url: str) -> bytes:
    try:
        async with session.get(url) as response:
            body = await response.read()
            if response.status != 200:
                raise CommandError(f"{url} answered {response.status}: {body[:300].decode(errors='replace')}")
            return body
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise CommandError(f"no router at {url}: {error or type(error).__name__} (is `ei up` running?)") from error


def cluster_table(cluster: ClusterView, url: str) -> Table:
    """One row per node; split and last decision around it."""
    decision = cluster.decision
    last = "none yet"
    if decision is not None:
        change = f" -> {decision.split_new}" if decision.split_new else ""
        mode = f"; planner {decision.mode}, see `ei explain {decision.id}`" if decision.mode else ""
        last = f"{decision.split_now}{change} ({decision.why}{'' if decision.applied else ', not applied'}){mode}"
    table = Table(
        title=f"{url}: split {cluster.split}, {cluster.open_requests} open requests, {', '.join(cluster.models)}",
        caption=f"last decision: {last}",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("node", "phase", "state"):
        table.add_column(name)
    for name in ("epoch", "wait", "run", "device KV", "host KV", "referenced"):
        table.add_column(name, justify="right")
    for node in cluster.nodes:
        kv = ("-", "-", "-") if node.kv is None else (str(node.kv.l1), str(node.kv.l2), _short(node.kv.l2.referenced))
        counts = (str(node.epoch), str(node.waiting), str(node.running))
        table.add_row(node.node, node.phase, node.state, *counts, *kv)
    return table


def branch_tree(branches: list[BranchInfo]) -> Tree:
    """Branches under their parents; one whose parent is not listed stands at the root."""
    known = {branch.id for branch in branches}
    children: dict[str | None, list[BranchInfo]] = defaultdict(list)
    for branch in branches:
        children[branch.parent if branch.parent in known else None].append(branch)
    tree = Tree(f"{len(branches)} branches")
    stack = [(tree, branch) for branch in reversed(children[None])]
    seen: set[str] = set()
    while stack:
        above, branch = stack.pop()
        if branch.id in seen:
            continue
        seen.add(branch.id)
        inferred = ", inferred" if branch.inferred else ""
        text = f"{branch.id} [{branch.kind}{inferred}] v{branch.version} {branch.state}: {branch.tokens:,} tokens"
        here = above.add(Text(text))
        stack += [(here, child) for child in reversed(children[branch.id])]
    return tree

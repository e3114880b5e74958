"""Whatever integers messages bring, the directory answers, can be kept on disk, and is the same when put back."""

import base64
import json
from typing import Any

from directory_model import pack
from hypothesis import example, given, settings
from hypothesis import strategies as st

from schemas.branch import BRANCH_EVENT, LARGEST_LIFE, LARGEST_VERSION
from schemas.codec import RejectedMessage, encode
from schemas.directory import BRANCH_REPLY, MATCH_QUERY, MATCH_REPLY, STATS_REPLY, BranchQuery, BranchReply
from schemas.kv import KV_LOCATION, NODE_HELLO
from schemas.phase import PHASE_COMMAND
from services.directory.core.directory import Directory, DirectoryConfig
from tests.directory_checkpoint import put_back, taken

BRANCHES = st.sampled_from(["a", "b"])
number = st.sampled_from(
    [0, 1, 2, 3, 2**20, 2**31 - 2, 2**31 - 1, 2**31, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30, -1]
)
maybe = st.none() | number
keys = st.integers(0, 4).map(lambda length: [7, 14, 21, 28][:length])
EVENT = {"t": 1.0, "source": "router"}


def mapping(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


events = st.tuples(
    st.just("event"),
    st.fixed_dictionaries(
        {"branch": BRANCHES, "type": st.sampled_from(["open", "fork", "compact", "end", "keepalive", "context"])},
        optional={
            "version": maybe,
            "life": maybe,
            "blocks": number | st.integers(0, 4),
            "base_blocks": number | st.integers(0, 4),
            "prompt_blocks": number | st.integers(0, 4),
            "tip": maybe | st.sampled_from([7, 14]),
            "base": maybe | st.sampled_from([7, 14]),
            "keys": keys,
            "parent": BRANCHES,
            "compaction": st.sampled_from(["summary", "done"]),
            "kind": st.sampled_from(["fork", "subagent", "transient"]),
        },
    ),
)
others = (
    st.tuples(st.just("match"), mapping(branch=BRANCHES, version=maybe, hashes=keys, prompt_tokens=number))
    | st.tuples(st.just("location"), mapping(seq=number, incarnation=number, hashes=keys, parent=maybe))
    | st.tuples(st.just("hello"), mapping(block_size=number, incarnation=number, ranks=number))
    | st.tuples(st.just("phase"), mapping(epoch=number))
    | st.tuples(st.just("tick"), st.just({}))
)
HELLO = {"engine_incarnation": 1, "model": "m", "key_version": "k", "engine": "timed", "dtype": "d", "transfer": ""}
HELLO |= {"node": "n", "incarnation": 1, "block_size": 16, "ranks": 1, "capacities": {"l1_tokens": 1, "l2_tokens": 1}}


class Heard:
    """A directory that hears maps as they come over the wire; MessagePack where JSON cannot carry bytes."""

    def __init__(self) -> None:
        self.core = Directory(DirectoryConfig(branch_lease_s=30.0), incarnation=1)
        self.now, self.said = 0.0, 0

    def hear(self, what: str, given: dict[str, Any]) -> None:
        self.now, self.said = self.now + 1.0, self.said + 1
        try:
            self._hear(what, given)
        except RejectedMessage:
            return
        while self.core.has_work:
            self.core.work(10)

    def _hear(self, what: str, given: dict[str, Any]) -> None:
        core, now = self.core, self.now
        if what == "event":
            core.on_branch_event(BRANCH_EVENT.decode_json(wire(EVENT | {"id": f"e{self.said}"} | given)), now)
        elif what == "match":
            reply = core.match(MATCH_QUERY.decode_json(wire({"request": f"r{self.said}"} | given)), now)
            assert MATCH_REPLY.decode(encode(reply)) == reply
        elif what == "location":
            change = {"type": "stored", "tier": "l2", "hashes": given.get("hashes", []), "parent": given.get("parent")}
            message = {"node": "n", "seq": 1, "incarnation": 1} | given | {"changes": [packed(change)]}
            core.on_location(KV_LOCATION.decode_json(wire(message | {"hashes": []})), now)
        elif what == "hello":
            core.on_hello(NODE_HELLO.decode_json(wire(HELLO | given)), now)
        elif what == "phase":
            command = {"id": "c", "t": 1.0, "node": "n", "phase": "prefill", "reason": "", "decision_id": ""}
            core.on_phase(PHASE_COMMAND.decode_json(wire(command | {"epoch": 1} | given)))
        else:
            self.now += 20.0
            core.tick(self.now)


def packed(fields: dict[str, Any]) -> dict[str, Any]:
    words = {key: base64.b64encode(pack(fields[key])).decode() for key in ("keys", "hashes") if key in fields}
    return fields | words


def wire(fields: dict[str, Any]) -> bytes:
    return json.dumps(packed(fields)).encode()


def listed(core: Directory, now: float) -> BranchReply:
    return BranchReply(branches=core.listed(BranchQuery(), now, 0.0))


def said(kind: str, **fields: Any) -> tuple[str, dict[str, Any]]:
    return "event", {"branch": "a", "type": kind} | fields


CONTEXT = {"tip": 14, "blocks": 2, "keys": [7, 14], "base": 21}


@given(st.lists(events | others, max_size=12))
@settings(deadline=None, max_examples=300)
@example([said("open", version=10**30)])
@example([said("open", version=2**31 - 1), said("compact")])
@example([said("compact", version=2**31 - 1), said("compact", version=2**31)])
@example([said("context", life=2**31 - 1), said("end")])
@example([said("context", version=2**31 - 1, **CONTEXT), said("context", compaction="done", **CONTEXT)])
@example(
    [("hello", {"block_size": 2**20}), said("context", **CONTEXT | {"blocks": 2**31 - 1, "base_blocks": 2**31 - 3})]
)
@example([("location", {"hashes": [7], "parent": 0}), ("location", {"incarnation": 0, "hashes": [7]})])
@example([("location", {"hashes": [7]}), ("location", {"seq": 2, "hashes": [7, 14], "parent": 7})])
def test_no_integer_breaks_answers_or_checkpoints(told: list[tuple[str, dict[str, Any]]]) -> None:
    heard = Heard()
    for what, given_fields in told:
        heard.hear(what, given_fields)
    core, now = heard.core, heard.now
    core.check()
    branches, stats = listed(core, now), core.stats()
    assert BRANCH_REPLY.decode(encode(branches)) == branches
    assert STATS_REPLY.decode(encode(stats)) == stats
    for branch in core.branches.each():
        assert 0 <= branch.version <= LARGEST_VERSION
        assert 0 <= branch.life <= LARGEST_LIFE
    again = Directory(core.config, incarnation=2)
    put_back(again, taken(core, now))
    known = {each.id: (each.version, each.state, each.blocks) for each in branches.branches}
    assert {each.id: (each.version, each.state, each.blocks) for each in listed(again, now).branches} == known

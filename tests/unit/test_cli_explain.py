"""`ei explain REQUEST|BRANCH`: what the router remembers, and how it is said."""

import pytest

from schemas.telemetry import RequestTelemetry, RouteCandidate
from services.cli.explain_request import MEANINGS, Found, show
from services.router.core.misses import Cause
from services.router.recent import RecentRequests


def ended(request: str, branch: str = "b", **fields: object) -> RequestTelemetry:
    given = {
        "id": f"{request}-ended",
        "t": 1.0,
        "request": request,
        "branch": branch,
        "version": 0,
        "outcome": "stop",
        "t_arrive": 0.0,
        "t_end": 1.0,
    }
    return RequestTelemetry(**given | fields)  # type: ignore[arg-type]


def test_every_cause_has_its_words() -> None:
    assert MEANINGS.keys() == {cause.value for cause in Cause}


def test_requests_are_found_by_either_id_and_by_branch_within_their_tenant() -> None:
    recent = RecentRequests(kept=3)
    for number, tenant in enumerate(("a", "a", "b", "a")):
        recent.add(tenant, ended(f"mine-{number}" if number != 1 else "mine-1"))
    assert recent.find("a", "mine-0") is None, "the oldest was let go"
    assert recent.find("a", "mine-1") is not None
    assert recent.find("b", "mine-1") is None
    newest = recent.find("a", "mine")
    assert newest is not None
    assert newest.request == "mine-3"
    assert [found.request for found in recent.of_branch("a", "b", 9)] == ["mine-3", "mine-1"]
    assert [found.request for found in recent.of_branch("a", "b", 1)] == ["mine-3"]


def test_a_request_is_told_cause_by_cause(capsys: pytest.CaptureFixture[str]) -> None:
    request = ended(
        "q",
        prompt_tokens=1000,
        cached_tokens=400,
        restored_tokens=100,
        uncached_tokens=600,
        differs_at=512,
        lineage="transient",
        misses={"node_lost": 100, "diverged": 488, "tail": 12},
        candidates=[RouteCandidate(node="n1", wait_s=0, service_s=1, fetch_s=0, duplicate_s=0, ttft_s=1)],
    )
    broken = {"branch": "b", "position": 512, "before": "12:01", "now": "12:02"}
    show(Found([request, ended("p")], [broken]), as_json=False)
    said = " ".join(capsys.readouterr().out.split())
    assert "your prompt changes at token 512 on every call: '12:01' became '12:02'" in said
    assert "it leaves its branch's context at token 512" in said
    order = ["488 the prompt left its branch's context", "100 its node was lost", "12 less than a block"]
    assert [said.index(part) for part in order] == sorted(said.index(part) for part in order)

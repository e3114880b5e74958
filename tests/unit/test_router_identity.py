"""From headers and body to an identity."""

import pytest

from schemas.branch import BranchKind
from services.router.core.identity import Identity, IdentityError, identify


def test_nothing_said_is_left_to_inference() -> None:
    assert identify("t", {}, {}) == Identity("t")


def test_headers_say_everything() -> None:
    headers = {
        "x-ei-branch-id": "b",
        "x-ei-branch-parent": "a",
        "x-ei-branch-kind": "subagent",
        "x-ei-branch-version": "3",
        "x-ei-branch-end": "true",
    }
    expected = Identity("", "b", "a", 3, BranchKind.SUBAGENT, end=True, explicit=True, dialect="ei")
    assert identify("", headers, {}) == expected


def test_body_says_the_same() -> None:
    body = {"branch": {"id": "b", "parent": "a", "kind": "fork", "version": 0, "end": False}}
    assert identify("", {}, body) == Identity("", "b", "a", 0, BranchKind.FORK, explicit=True, dialect="ei")


def test_headers_come_before_the_body() -> None:
    assert identify("", {"x-ei-branch-id": "h"}, {"branch": {"id": "b", "version": 4}}).branch == "h"


def test_tenant_never_comes_from_the_call() -> None:
    assert identify("acme", {"x-ei-branch-id": "b"}, {"tenant": "other"}).tenant == "acme"


@pytest.mark.parametrize(
    ("headers", "body", "param"),
    [
        ({"x-ei-branch-id": ""}, {}, "x-ei-branch-id"),
        ({"x-ei-branch-id": "a\nb"}, {}, "x-ei-branch-id"),
        ({"x-ei-branch-id": "b", "x-ei-branch-version": "1.5"}, {}, "x-ei-branch-version"),
        ({"x-ei-branch-id": "b", "x-ei-branch-version": str(1 << 31)}, {}, "x-ei-branch-version"),
        ({"x-ei-branch-id": "b", "x-ei-branch-version": "9" * 5000}, {}, "x-ei-branch-version"),
        ({"x-ei-branch-id": "b", "x-ei-branch-parent": "b"}, {}, "x-ei-branch-parent"),
        ({}, {"branch": "b"}, "branch"),
        ({}, {"branch": {}}, "branch.id"),
        ({}, {"branch": {"id": "b", "version": True}}, "branch.version"),
        ({}, {"branch": {"id": "b", "kind": 5}}, "branch.kind"),
        ({}, {"branch": {"id": "b", "kind": "subagent"}}, "branch.kind"),
        ({}, {"branch": {"id": "b", "end": 1}}, "branch.end"),
    ],
)
def test_unusable_fields_are_named(headers: dict[str, str], body: dict[str, object], param: str) -> None:
    with pytest.raises(IdentityError) as error:
        identify("", headers, body)
    assert error.value.param == param

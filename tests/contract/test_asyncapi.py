"""The AsyncAPI document: fresh, whole, well-formed; and the table of channels behind it true to subjects and roles."""

import inspect
from typing import Any

import msgspec
import pytest
import yaml

from schemas import asyncapi, pool
from schemas.channels import CHANNELS, PARAMETERS, Channel
from schemas.roles import Role, grant
from schemas.subjects import Subjects
from services.bus.subjects import matches
from tests.contract.messages import DECODERS

DOCUMENT: dict[str, Any] = yaml.safe_load(asyncapi.DOCUMENT.read_text())
SUBJECTS = Subjects()
SERVICES = [role for role in Role if role is not Role.ANONYMOUS]


def filled_in(channel: Channel, name: str = "x") -> str:
    """The subject of a channel with every parameter but the partition set to `name`."""
    subject = channel.address.replace("{partition}", "p0")
    for parameter in PARAMETERS:
        subject = subject.replace(f"{{{parameter}}}", name)
    return subject


def references(node: Any) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [r for value in node.values() for r in references(value)]
    return [r for value in node for r in references(value)] if isinstance(node, list) else []


def test_the_document_is_fresh() -> None:
    assert asyncapi.DOCUMENT.read_text() == asyncapi.text(), "run: python -m schemas.asyncapi"


def test_its_structure_is_asyncapi_3_1() -> None:
    assert DOCUMENT["asyncapi"] == "3.1.0"
    assert {"title", "version", "license"} <= set(DOCUMENT["info"])
    assert set(DOCUMENT) == {
        "asyncapi", "info", "defaultContentType", "servers", "channels", "operations", "components"
    }  # fmt: skip
    assert all(server["protocol"] == "nats" for server in DOCUMENT["servers"].values())
    for channel in DOCUMENT["channels"].values():
        used = {part[1:-1] for part in (channel["address"] or "").split(".") if part.startswith("{")}
        assert used == set(channel.get("parameters", {}))
    for operation in DOCUMENT["operations"].values():
        assert operation["action"] in ("send", "receive")
        prefix = operation["channel"]["$ref"]
        assert all(m["$ref"].startswith(f"{prefix}/messages/") for m in operation.get("messages", []))


def test_every_reference_leads_somewhere() -> None:
    for reference in references(DOCUMENT):
        node: Any = DOCUMENT
        for part in reference.removeprefix("#/").split("/"):
            assert part in node, reference
            node = node[part]


def test_every_payload_is_described_by_its_schema() -> None:
    for name, message in DOCUMENT["components"]["messages"].items():
        schema = DOCUMENT["components"]["schemas"][name]
        assert message["payload"] == {"$ref": f"#/components/schemas/{name}"}
        fields = {field.encode_name for field in msgspec.structs.fields(DECODERS[name].kind)}
        assert set(schema["properties"]) == fields
        assert len(message["summary"]) > 10


def test_every_subject_has_a_channel_and_no_channel_is_invented() -> None:
    built: set[str] = set()
    for method, function in inspect.getmembers(SUBJECTS, inspect.ismethod):
        if method.startswith("_") or method in ("branch_event", "query_planner", "query_directory", "pool"):
            continue
        built.add(function(*["x" for _ in inspect.signature(function).parameters]))
    built |= {SUBJECTS.query_planner(verb) for verb in ("split", "phase", "pin", "mode", "status")}
    built |= {SUBJECTS.query_directory(v) for v in ("match", "branch", "branches", "references", "stats")}
    built |= {SUBJECTS.pool(verb, "x") for verb in ("lease", "release", "locate", "fetch", "store")}
    built = {subject.replace("event.*", "event.x") for subject in built}
    assert {filled_in(channel) for channel in CHANNELS} == built


def test_every_message_travels_on_a_channel_or_the_socket_of_the_pool() -> None:
    local = {"AllocateRequest", "AllocateReply", "CommitRequest", "CommitReply", "DeviceChanges"}
    local |= {"AttachRequest", "AttachReply", "PoolStatus"}
    assert all(hasattr(pool, name) for name in local)
    assert set(DOCUMENT["components"]["messages"]) | local == set(DECODERS)


@pytest.mark.parametrize("channel", CHANNELS, ids=[channel.name for channel in CHANNELS])
def test_every_channel_has_somebody_to_speak_and_somebody_to_hear(channel: Channel) -> None:
    subject = filled_in(channel)
    streams = "CONSUMER.MSG.NEXT.ei_p0_" + channel.address.split(".")[2]
    speak = [role for role in SERVICES if any(matches(p, subject) for p in grant(role, SUBJECTS).publish)]
    hear = [role for role in SERVICES if any(matches(p, subject) for p in grant(role, SUBJECTS).subscribe)]
    hear += [role for role in SERVICES if any(streams in p for p in grant(role, SUBJECTS).publish)]
    assert speak
    assert [role for role in hear if role is not Role.OPERATOR]


def test_one_node_may_not_speak_for_another() -> None:
    engine, other = grant(Role.ENGINE, SUBJECTS, "node-0"), SUBJECTS.telemetry_node("node-1")
    assert not any(matches(pattern, other) for pattern in engine.publish)
    pool_grant = grant(Role.KVPOOL, SUBJECTS, "node-0")
    assert not any(matches(pattern, SUBJECTS.kv_location("node-1")) for pattern in pool_grant.publish)


def test_only_the_planner_publishes_commands() -> None:
    command = SUBJECTS.phase_command("x")
    allowed = [role for role in Role if any(matches(p, command) for p in grant(role, SUBJECTS).publish)]
    assert allowed == [Role.PLANNER]


def test_without_a_key_only_branch_events_of_the_default_tenant() -> None:
    allowed = grant(Role.ANONYMOUS, SUBJECTS).publish
    assert all(subject.startswith("ei.p0.branch.event.") for subject in allowed)
    assert SUBJECTS.branch_event("any branch") in allowed
    assert SUBJECTS.branch_event("any branch", "acme") not in allowed

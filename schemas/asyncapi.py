"""The wire as an AsyncAPI 3.1 document. `python -m schemas.asyncapi` writes docs/asyncapi.yaml (needs PyYAML)."""

from pathlib import Path
from typing import Any

import msgspec

from schemas.channels import CHANNELS, PARAMETERS, Channel, Delivery
from schemas.codec import VERSION, Message

DOCUMENT = Path(__file__).parents[1] / "docs" / "asyncapi.yaml"
CONTENT_TYPE = "application/vnd.msgpack"
_TEXT = (
    "Control messages of Evolving Infra over NATS. Payloads are MessagePack maps; byte strings (shown as base64 here) "
    "are MessagePack bin. Every message has `v`; unknown keys are ignored, an unknown `v` is rejected. Requests are "
    "answered on their reply subject, failed ones with the headers Nats-Service-Error and Nats-Service-Error-Code."
)


def _reference(section: str, name: str) -> dict[str, str]:
    return {"$ref": f"#/components/{section}/{name}"}


def _message_types() -> list[type[Message]]:
    """Every message of a channel, each once, in the order of the table."""
    found = [kind for channel in CHANNELS for kind in (channel.message, channel.reply) if kind is not None]
    return list(dict.fromkeys(found))


def _summary(kind: type) -> str:
    """The first sentence of a type's documentation."""
    return " ".join((kind.__doc__ or kind.__name__).strip().split("\n\n", maxsplit=1)[0].split())


def _channel(channel: Channel) -> dict[str, Any]:
    entry: dict[str, Any] = {"address": channel.address, "description": channel.text}
    if channel.message is not None:
        kind = channel.message.__name__
        entry["messages"] = {kind: _reference("messages", kind)}
    entry["parameters"] = {name: _reference("parameters", name) for name in channel.parameters}
    entry["x-delivery"] = str(channel.delivery)
    return entry


def _reply_channel(channel: Channel) -> dict[str, Any]:
    assert channel.reply is not None
    kind = channel.reply.__name__
    return {
        "address": None,
        "description": f"Answers to {channel.name}, on the reply subject of the request.",
        "messages": {kind: _reference("messages", kind)},
    }


def _operation(channel: Channel) -> dict[str, Any]:
    """What who takes messages from this channel does."""
    entry: dict[str, Any] = {"action": "receive", "channel": {"$ref": f"#/channels/{channel.name}"}}
    if channel.message is not None:
        entry["messages"] = [{"$ref": f"#/channels/{channel.name}/messages/{channel.message.__name__}"}]
    if channel.reply is not None:
        reply = f"#/channels/{channel.name}Reply"
        entry["reply"] = {
            "address": {"location": "$message.header#/reply"},
            "channel": {"$ref": reply},
            "messages": [{"$ref": f"{reply}/messages/{channel.reply.__name__}"}],
        }
    return entry


def document() -> dict[str, Any]:
    """The whole document."""
    kinds = _message_types()
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    channels = {channel.name: _channel(channel) for channel in CHANNELS}
    asked = [channel for channel in CHANNELS if channel.delivery is Delivery.REQUEST]
    channels |= {f"{channel.name}Reply": _reply_channel(channel) for channel in asked}
    return {
        "asyncapi": "3.1.0",
        "info": {
            "title": "Evolving Infra",
            "version": f"{VERSION}.0.0",
            "description": _TEXT,
            "license": {"name": "Apache-2.0", "url": "https://www.apache.org/licenses/LICENSE-2.0"},
        },
        "defaultContentType": CONTENT_TYPE,
        "servers": {"local": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": channels,
        "operations": {f"on{channel.name[0].upper()}{channel.name[1:]}": _operation(channel) for channel in CHANNELS},
        "components": {
            "messages": {
                kind.__name__: {
                    "contentType": CONTENT_TYPE,
                    "summary": _summary(kind),
                    "payload": _reference("schemas", kind.__name__),
                }
                for kind in kinds
            },
            "parameters": {name: {"description": text} for name, text in PARAMETERS.items()},
            "schemas": dict(sorted(schemas.items())),
        },
    }


def text() -> str:
    """The document as YAML."""
    import yaml

    return str(yaml.safe_dump(document(), sort_keys=False, allow_unicode=True, width=120))


if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(text())

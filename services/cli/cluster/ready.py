"""Whether a local cluster serves, asked over HTTP without a thread or a loop."""

import http.client
from typing import Any

import msgspec

_TIMEOUT_S = 0.5


def get(port: int, path: str) -> tuple[int, Any]:
    """Status and JSON body of a GET on this machine; status 0 when nothing answers."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, msgspec.json.decode(response.read() or b"null")
    except (OSError, http.client.HTTPException, msgspec.MsgspecError):
        return 0, None
    finally:
        connection.close()


def missing(port: int, nodes: list[str]) -> list[str]:
    """Why the cluster cannot take its first request yet, in words; [] when every node serves."""
    status, body = get(port, "/ready")
    if status == 0:
        return ["the router does not answer yet"]
    if status != 200:
        return list(body.get("reasons", [])) if isinstance(body, dict) else ["the router is not ready"]
    status, body = get(port, "/v1/cluster")
    if status != 200 or not isinstance(body, dict):
        return ["the router does not know its nodes yet"]
    known = {node["node"] for node in body["nodes"] if node.get("ready", True)}
    return [f"{node} is not ready" for node in nodes if node not in known]

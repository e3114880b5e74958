"""A scripted timed engine behind the router: the reply is what the client reads, and it ends."""

from pathlib import Path

from schemas.phase import Phase
from tests.router_stage import in_memory, stage


async def test_a_scripted_reply_reaches_the_client_and_ends_the_answer(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text("[[reply]]\npattern = 'hello'\ntext = 'Good day, Zoë.'\n")
    async with stage(in_memory()) as cluster:
        await cluster.engine("p", script=str(script), phase=Phase.PREFILL)
        await cluster.engine("d", script=str(script), phase=Phase.DECODE)
        body = {"messages": [{"role": "user", "content": "well hello"}], "max_tokens": 100}
        whole = await cluster.post("/v1/chat/completions", body)
        assert whole.body["choices"][0]["message"]["content"] == "Good day, Zoë."
        assert whole.finish == "stop"
        assert whole.usage["completion_tokens"] == len("Good day, Zoë.".encode()) + 1
        streamed = await cluster.post("/v1/chat/completions", body | {"stream": True})
        parts = [choice["delta"].get("content", "") for event in streamed.events for choice in event["choices"]]
        assert "".join(parts) == "Good day, Zoë."
        short = await cluster.post("/v1/chat/completions", body | {"max_tokens": 4})
        assert (short.body["choices"][0]["message"]["content"], short.finish) == ("Good", "length")
        await cluster.settled()

"""Token ids that a model certainly knows: those of a few words, tokenised by the cluster itself."""

import aiohttp
import msgspec

TEXT = (
    "The agent reads a file, runs the tests, edits three lines and runs them again. It searches the repository for "
    "every caller of the function, writes a summary of what it found, asks a helper to look at the logs, and waits for "
    "its answer before it goes on. Numbers such as 17, 256 and 8,192 occur, so do names like config_path, HttpServer "
    "and test_round_trip; quotes, (brackets) and [lists] too. def main(): return {'status': 200} # a comment"
)
MINIMUM = 16


class AlphabetError(Exception):
    """The cluster did not tokenise the text; the words say what came instead."""


class _Tokenized(msgspec.Struct):
    tokens: list[int]


async def alphabet_of(session: aiohttp.ClientSession, url: str, model: str) -> list[int]:
    """Distinct token ids of a sample text, in ascending order; at least 16."""
    body = msgspec.json.encode({"model": model, "prompt": TEXT})
    async with session.post(f"{url}/tokenize", data=body, headers={"content-type": "application/json"}) as response:
        text = await response.read()
        if response.status != 200:
            raise AlphabetError(f"{url}/tokenize answered {response.status}: {text[:300].decode(errors='replace')}")
    try:
        tokens = sorted(set(msgspec.json.decode(text, type=_Tokenized).tokens))
    except msgspec.MsgspecError as error:
        raise AlphabetError(f"{url}/tokenize: {error}") from error
    if len(tokens) < MINIMUM:
        raise AlphabetError(f"{url}/tokenize gave {len(tokens)} distinct tokens, at least {MINIMUM} are needed")
    return tokens

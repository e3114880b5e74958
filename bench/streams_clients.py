"""The clients of bench.streams: plain sockets read in turn, `python -m bench.streams_clients PORT STREAMS SECONDS`.

So many streams are open at any time; one that has ended is followed by another; at the end all go away. One line of
JSON says what they saw (`Seen`). A client takes no more CPU than reading and counting cost, so that the machine is left
to what is measured. Every token of these answers is one letter (see bench.streams_nodes).
"""

import gc
import json
import random
import re
import select
import socket
import sys
import time
from dataclasses import dataclass, field

import msgspec

HOST = "127.0.0.1"
OPENED_PER_S = 100
STALL_S = 1.0
FOLLOWED = 10
"""Every so many-th stream is followed token by token."""
TOKENS_PER_S = 20
ANSWER_S = 120.0
"""How long an answer takes, but for the first ones, which are cut at random so that ends do not come together."""
PROMPT_TOKENS = 64
_READ_BYTES = 4096
_COUNTED_EVERY_S = 0.5
_TEXT = re.compile(rb'"text":"([a-z]+)"')
_EVENT_END = b"\n\n\r\n"


class Seen(msgspec.Struct):
    """`arrived`: by request id, when each token was on the socket (Unix seconds). `counted`: (time, all tokens so far).

    All are open from `opened_at` to `closing_at`. `short`: streams that ended without all their tokens; `stalls`: waits
    of a stream above a second, that for its first token included.
    """

    arrived: dict[str, list[float]]
    counted: list[tuple[float, int]]
    opened_at: float
    closing_at: float
    opened: int
    short: int
    stalls: int
    longest_gap_s: float


@dataclass(slots=True, eq=False)
class Stream:
    """One client that waits for `wanted` tokens. `followed`: whether it notes when each of them arrives."""

    number: int
    wanted: int
    socket: socket.socket
    followed: bool
    last_s: float
    tokens: int = 0
    longest_gap_s: float = 0.0
    stalls: int = 0
    begun: bool = False
    rest: bytes = b""
    arrived: list[float] = field(default_factory=list)

    def take(self, data: bytes, now: float) -> bool:
        """What came from the socket; False when the answer is over."""
        if self.rest or not self.begun:
            data = self._whole(self.rest + data)
        elif not data.endswith(_EVENT_END):
            data = self._whole(data)
        tokens = sum(map(len, _TEXT.findall(data)))
        if tokens:
            gap = now - self.last_s
            self.last_s = now
            self.longest_gap_s = max(self.longest_gap_s, gap)
            self.stalls += gap > STALL_S
            self.tokens += tokens
            if self.followed:
                self.arrived += [now] * tokens
        return b"[DONE]" not in data

    def _whole(self, data: bytes) -> bytes:
        """Whole events; what is begun waits for its end. RuntimeError: the request was refused."""
        if not self.begun:
            if not data.startswith(b"HTTP/1.1 200"[: len(data)]):
                raise RuntimeError(f"stream {self.number}: {data[:300]!r}")
            self.begun = len(data) >= len(b"HTTP/1.1 200")
        end = data.rfind(b"\n\n") + 2 if b"\n\n" in data else 0
        self.rest = data[end:]
        return data[:end]


def opened(port: int, number: int, tokens: int) -> Stream:
    """A stream whose request has been sent."""
    prompt = random.Random(number).choices(range(32, 127), k=PROMPT_TOKENS)
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-id: s{number}\r\n"
    head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((HOST, port))
    connection.sendall(head.encode() + body)
    return Stream(number, tokens, connection, number % FOLLOWED == 0, time.time())


def run(port: int, streams: int, seconds: float) -> Seen:
    """Open the streams one after the other, keep their number for `seconds`, leave."""
    poll = select.epoll()
    began = now = time.time()
    opened_at = began + streams / OPENED_PER_S
    closing_at = opened_at + seconds
    all_, running, counted, total = list[Stream](), dict[int, Stream](), list[tuple[float, int]](), 0
    while now < closing_at:
        now = time.time()
        while len(running) < min(streams, (now - began) * OPENED_PER_S):
            share = random.random() if len(all_) < streams else 1.0
            stream = opened(port, len(all_), max(TOKENS_PER_S, round(share * ANSWER_S * TOKENS_PER_S)))
            all_.append(stream)
            running[stream.socket.fileno()] = stream
            poll.register(stream.socket, select.EPOLLIN)
        for number, _ in poll.poll(1 / OPENED_PER_S):
            stream = running[number]
            before, data = stream.tokens, stream.socket.recv(_READ_BYTES)
            goes_on = stream.take(data, time.time()) and bool(data)
            total += stream.tokens - before
            if not goes_on:
                poll.unregister(running.pop(number).socket)
                stream.socket.close()
        if not counted or now - counted[-1][0] >= _COUNTED_EVERY_S:
            counted.append((now, total))
    return Seen(
        arrived={f"s{stream.number}": stream.arrived for stream in all_ if stream.followed},
        counted=counted,
        opened_at=opened_at,
        closing_at=closing_at,
        opened=len(all_),
        short=sum(stream.tokens != stream.wanted for stream in all_ if stream not in running.values()),
        stalls=sum(stream.stalls for stream in all_) + sum(now - s.last_s > STALL_S for s in running.values()),
        longest_gap_s=max(stream.longest_gap_s for stream in all_),
    )


if __name__ == "__main__":
    gc.disable()
    sys.stdout.write(msgspec.json.encode(run(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))).decode() + "\n")

"""What is refused before any work is done, and how the caller is told."""

from dataclasses import dataclass

from services.router.core.failure import Failure, invalid, limited, unavailable


@dataclass(frozen=True, slots=True)
class Limits:
    """Tokens of prompt and answer together; open requests of this router; predicted TTFT, None for no bound."""

    max_context_tokens: int
    max_open_requests: int = 4096
    ttft_bound_s: float | None = None


def context_failure(prompt_tokens: int, new_tokens: int | None, limit: int) -> Failure | None:
    """400 when prompt and requested answer do not fit `limit` tokens, with all numbers; one new token always must."""
    if prompt_tokens == 0:
        return invalid("the prompt has 0 tokens, at least 1 is needed", "prompt")
    if prompt_tokens + (new_tokens or 1) <= limit:
        return None
    wanted = f"{new_tokens} requested" if new_tokens else "at least 1"
    return invalid(
        f"the maximum context length is {limit} tokens; the prompt has {prompt_tokens} tokens and the answer {wanted}"
        f", together {prompt_tokens + (new_tokens or 1)}",
        "max_tokens" if new_tokens and prompt_tokens < limit else "messages",
        "context_length_exceeded",
    )


def open_failure(open_requests: int, limits: Limits) -> Failure | None:
    """429 when this router already has its maximum of open requests."""
    if open_requests < limits.max_open_requests:
        return None
    return limited(f"{open_requests} requests are open, the limit is {limits.max_open_requests}", "too_many_requests")


def ttft_failure(predicted_s: float, limits: Limits) -> Failure | None:
    """429 when even the best node would answer later than the bound; retry-after is the time above it."""
    bound = limits.ttft_bound_s
    if bound is None or predicted_s <= bound:
        return None
    return limited(f"predicted TTFT {predicted_s:.2f} s > {bound:g} s", "ttft_bound", predicted_s - bound)


def no_node_failure(phase: str, known: int) -> Failure:
    """503: nobody serves the phase now."""
    return unavailable(f"no live node serves {phase} ({known} nodes known)", f"no_{phase}_node", 2.0)


def broker_failure(waited_s: float) -> Failure:
    """503: without the broker no request can be placed."""
    return unavailable(f"the message broker has been unreachable for {waited_s:g} s", "broker_unavailable", 2.0)

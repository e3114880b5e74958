"""What is refused before work is done, and in which words."""

from schemas.directory import MatchReply, NodeMatch
from services.router.core.admission import Limits, context_failure, open_failure, ttft_failure
from services.router.core.placement import FetchCost, PrefillView, Prompt, predict
from services.router.core.timing import Coefficients

CASE_95 = Coefficients(c0=0.010, c1=20e-6, c2=1e-9, c3=2e-6)


def test_case_95_cost_decides_who_is_turned_away() -> None:
    limits = Limits(100_000, ttft_bound_s=2.0)
    busy = PrefillView("p", queue_s=1.9, model=CASE_95)
    nothing = MatchReply(blocks=0)
    cached = MatchReply(blocks=124, nodes=[NodeMatch(node="p", l1_blocks=0, l2_blocks=124)])

    def predicted(match: MatchReply) -> float:
        return predict(Prompt(8000, 64, match), busy, lambda _: True, lambda *_: FetchCost(1e9, 0)).ttft_s

    refused = ttft_failure(predicted(nothing), limits)
    assert refused is not None
    assert (refused.status, refused.retry_after_s) == (429, 1)
    assert refused.message == "predicted TTFT 2.10 s > 2 s"
    assert f"{predicted(cached):.2f}" == "1.93"
    assert ttft_failure(predicted(cached), limits) is None


def test_retry_after_is_the_time_above_the_bound() -> None:
    refused = ttft_failure(9.3, Limits(0, ttft_bound_s=2.0))
    assert refused is not None
    assert refused.retry_after_s == 8


def test_context_names_all_numbers() -> None:
    refused = context_failure(90, 20, 100)
    assert refused is not None
    assert refused.code == "context_length_exceeded"
    assert all(number in refused.message for number in ("100", "90", "20", "110"))
    assert context_failure(80, 20, 100) is None
    assert context_failure(99, None, 100) is None
    assert context_failure(100, None, 100) is not None
    assert context_failure(0, 1, 100) is not None


def test_open_requests_are_bounded() -> None:
    limits = Limits(0, max_open_requests=2)
    assert open_failure(1, limits) is None
    refused = open_failure(2, limits)
    assert refused is not None
    assert refused.message == "2 requests are open, the limit is 2"

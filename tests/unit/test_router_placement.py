"""Placement: the predicted time to first token, term by term, and who is chosen."""

import pytest

from schemas.directory import MatchReply, NodeMatch, Piece
from schemas.serve import FetchSource
from services.router.core.placement import (
    Candidate,
    DecodeView,
    FetchCost,
    PrefillView,
    Prompt,
    choose_decode,
    choose_prefill,
    duplicate_s,
    predict,
)
from services.router.core.prefix import local_prefix, reusable_blocks, shared_prefix
from services.router.core.timing import Coefficients, Work, decode_iteration_s, prefill_s

CASE_65 = Coefficients(c0=0.010, c1=20e-6, c2=1e-9, c3=2e-6)
COLD_4000 = prefill_s(CASE_65, Work(4000))


def pool_on(node: str, blocks: int) -> MatchReply:
    return MatchReply(
        blocks=blocks,
        nodes=[NodeMatch(node=node, l1_blocks=0, l2_blocks=blocks)],
        pieces=[Piece(first=0, last=blocks, nodes=[node])],
    )


def case_65(nodes: tuple[str, ...]) -> dict[str, Candidate]:
    prompt = Prompt(8000, 64, pool_on("p1", 124))
    views = {
        "p1": PrefillView("p1", remaining_s=0.5, queue_s=4 * COLD_4000, model=CASE_65),
        "p2": PrefillView("p2", model=CASE_65),
        "p3": PrefillView("p3", model=CASE_65),
    }
    seconds = {"p2": 0.05, "p3": 2.0}
    return {
        name: predict(
            prompt, views[name], lambda _: True, lambda _, to: FetchCost(tokens_per_s=1e30, latency_s=seconds[to])
        )
        for name in nodes
    }


def test_case_65_hot_node_does_not_turn_prefix_routing_off() -> None:
    found = case_65(("p1", "p2", "p3"))
    assert found["p1"].ttft_s == pytest.approx(0.9197, abs=5e-5)
    assert found["p2"].ttft_s == pytest.approx(0.0777, abs=5e-5)
    assert found["p3"].ttft_s == pytest.approx(0.2020, abs=5e-5)
    assert choose_prefill(list(found.values()), turn=0).node == "p2"


def test_case_65_fetch_slower_than_recompute_is_not_waited_for() -> None:
    found = case_65(("p1", "p3"))
    best = choose_prefill(list(found.values()), turn=0)
    assert (best.node, best.fetch, best.work) == ("p3", (), Work(8000))


def test_case_65_fetch_of_two_seconds_costs_two_seconds_when_chosen() -> None:
    view = PrefillView("p3", model=slow_compute())
    cost = FetchCost(tokens_per_s=1e30, latency_s=2.0)
    found = predict(Prompt(8000, 64, pool_on("p1", 124)), view, lambda _: True, lambda *_: cost)
    assert found.fetch == (FetchSource(node="p1", first=0, last=124),)
    assert found.ttft_s == pytest.approx(2.0 + prefill_s(view.model, Work(64, 7936, 7936)))


def test_a_picture_is_paid_for_where_its_kv_is_not() -> None:
    model = Coefficients(c0=0.0, c1=0.0, c2=0.0, c3=0.0, c4=1.3)
    prompt = Prompt(8000, 64, pool_on("p1", 124), media_ends=(640, 7936, 7940))
    nowhere = FetchCost(tokens_per_s=1e-9, latency_s=0.0)
    for name, media in (("p1", 1), ("p2", 3)):
        found = predict(prompt, PrefillView(name, model=model), lambda _: True, lambda *_: nowhere)
        assert (found.work.media, found.service_s) == (media, pytest.approx(1.3 * media))


def test_case_65_predicted_with_fetch() -> None:
    assert 2.0 + prefill_s(CASE_65, Work(64, 7936, 7936)) == pytest.approx(2.0277, abs=5e-5)


def slow_compute() -> Coefficients:
    return Coefficients(c0=0.010, c1=1e-3, c2=1e-9, c3=2e-6)


def test_fetch_hides_under_the_wait() -> None:
    view = PrefillView("p2", remaining_s=0.03, queue_s=0.01, model=CASE_65)
    cost = FetchCost(tokens_per_s=1e30, latency_s=0.05)
    found = predict(Prompt(8000, 64, pool_on("p1", 124)), view, lambda _: True, lambda *_: cost)
    assert found.ttft_s == pytest.approx(0.05 + prefill_s(CASE_65, Work(64, 7936, 7936)))


def test_nu_spreads_the_fixed_cost_over_a_batch() -> None:
    model = Coefficients(c0=0.01, c1=0, c2=0, c3=0, uncached_per_iteration=1000)
    assert prefill_s(model, Work(500)) == pytest.approx(0.005)


def test_equal_nodes_take_turns() -> None:
    prompt = Prompt(100, 16, MatchReply(blocks=0))
    found = [predict(prompt, PrefillView(name), lambda _: True, lambda *_: FetchCost(1, 0)) for name in "ab"]
    assert [choose_prefill(found, turn).node for turn in range(4)] == ["a", "b", "a", "b"]


def test_last_prompt_token_is_always_computed() -> None:
    assert [reusable_blocks(tokens, 4) for tokens in (40, 41, 44, 45, 4, 1, 0)] == [9, 10, 10, 11, 0, 0, 0]


def test_prefix_joins_pieces_of_several_nodes() -> None:
    match = MatchReply(
        blocks=10,
        nodes=[NodeMatch(node="p1", l1_blocks=1, l2_blocks=2)],
        pieces=[
            Piece(first=0, last=4, nodes=["p2", "p3"]),
            Piece(first=4, last=6, nodes=["p1"]),
            Piece(first=6, last=10, nodes=["d1"]),
        ],
    )
    prefix = shared_prefix("p1", match, 9, lambda _: True)
    assert (prefix.blocks, prefix.device) == (9, 1)
    assert prefix.fetch == (FetchSource(node="p2", first=2, last=4), FetchSource(node="d1", first=6, last=9))
    assert local_prefix("p1", match, 9).blocks == 2


def test_prefix_stops_at_a_gap_and_at_a_dead_node() -> None:
    gap = MatchReply(blocks=4, pieces=[Piece(first=2, last=4, nodes=["p2"])])
    assert shared_prefix("p1", gap, 9, lambda _: True).blocks == 0
    dead = MatchReply(blocks=4, pieces=[Piece(first=0, last=2, nodes=["p2"]), Piece(first=2, last=4, nodes=["p3"])])
    assert shared_prefix("p1", dead, 9, lambda node: node != "p3").blocks == 2


def test_neighbouring_pieces_of_one_source_are_one_fetch() -> None:
    match = MatchReply(blocks=4, pieces=[Piece(first=0, last=2, nodes=["p2"]), Piece(first=2, last=4, nodes=["p2"])])
    assert shared_prefix("p1", match, 9, lambda _: True).fetch == (FetchSource(node="p2", first=0, last=4),)


def test_pending_prefix_counts_where_it_is_being_computed() -> None:
    match = MatchReply(blocks=0, pending_blocks=64, pending_node="p2")
    assert shared_prefix("p2", match, 64, lambda _: True).blocks == 64
    assert shared_prefix("p1", match, 64, lambda _: True).blocks == 0


def test_duplicate_costs_nothing_while_unreferenced_room_is_left() -> None:
    view = PrefillView("p", pool_total_tokens=1000, pool_used_tokens=1000, pool_referenced_tokens=600, model=CASE_65)
    assert duplicate_s(view, 400, None) == 0
    assert duplicate_s(view, 500, None) == pytest.approx(500 * 0.6 * 20e-6)
    assert duplicate_s(view, 500, 0.5) == 0
    assert duplicate_s(view, 0, None) == 0


def test_decode_goes_to_the_smallest_iteration_time_with_room() -> None:
    views = [DecodeView("a", 3, 300, 1000), DecodeView("b", 1, 990, 1000), DecodeView("c", 4, 0, 1000)]
    assert choose_decode(views, 100, None, 0).node == "a"
    assert choose_decode(views, 900, None, 0).node == "c"
    assert choose_decode(views, 1001, None, 0).node == "c"


def test_decode_respects_a_limit_of_running_requests() -> None:
    views = [DecodeView("a", 2, running_limit=2), DecodeView("b", 5, running_limit=8)]
    assert choose_decode(views, 1, None, 0).node == "b"


def test_decode_stays_at_the_prefill_node_among_equals() -> None:
    views = [DecodeView("a"), DecodeView("b"), DecodeView("c")]
    assert choose_decode(views, 1, "c", 0).node == "c"
    assert [choose_decode(views, 1, None, turn).node for turn in range(3)] == ["a", "b", "c"]


def test_iteration_time_of_experts_saturates() -> None:
    model = Coefficients(d0=0.01, d1=0.02, d2=0.0, expert_share=0.5, fed_tokens=1)
    assert decode_iteration_s(model, 1) == pytest.approx(0.02)
    assert decode_iteration_s(model, 60) == pytest.approx(0.03)
    dense = Coefficients(d0=0.01, d1=0.02, d2=0.001, expert_share=0)
    assert decode_iteration_s(dense, 8) == pytest.approx(0.018)

"""Placement over any answer of the directory: nothing is fetched twice, from the dead, or past a gap."""

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.directory import MatchReply, NodeMatch, Piece
from services.router.core.placement import RECOMPUTE_GAIN_S, FetchCost, PrefillView, Prompt, choose_prefill, predict
from services.router.core.prefix import local_prefix, reusable_blocks, shared_prefix

NODES = ("a", "b", "c", "d")
BLOCK = 16


@st.composite
def matches(draw: st.DrawFn) -> MatchReply:
    """Pieces as a directory gives them, or with gaps and overlaps as one might."""
    edges = sorted(draw(st.lists(st.integers(0, 40), max_size=8)))
    pieces = [
        Piece(first=first, last=last, nodes=draw(st.lists(st.sampled_from(NODES), min_size=1, max_size=3, unique=True)))
        for first, last in zip(edges[::2], edges[1::2], strict=False)
        if first < last
    ]
    nodes = [
        NodeMatch(node=name, l1_blocks=draw(st.integers(0, 30)), l2_blocks=draw(st.integers(0, 30)))
        for name in draw(st.lists(st.sampled_from(NODES), max_size=4, unique=True))
    ]
    return MatchReply(blocks=max((piece.last for piece in pieces), default=0), pieces=pieces, nodes=nodes)


@settings(deadline=None)
@given(matches(), st.integers(1, 800), st.sets(st.sampled_from(NODES)))
def test_prefix_is_whole_and_its_sources_live(match: MatchReply, tokens: int, live: set[str]) -> None:
    limit = reusable_blocks(tokens, BLOCK)
    for node in NODES:
        whole = shared_prefix(node, match, limit, live.__contains__)
        alone = local_prefix(node, match, limit)
        assert 0 <= whole.device <= whole.blocks <= limit
        assert alone.fetch == ()
        assert alone.blocks <= whole.blocks
        at = None
        for source in whole.fetch:
            assert source.node in live - {node}
            assert source.first < source.last
            assert at is None or source.first >= at
            at = source.last
            holders = [p for p in match.pieces if p.first < source.last and p.last > source.first]
            assert any(source.node in piece.nodes for piece in holders)


@settings(deadline=None)
@given(matches(), st.integers(1, 800), st.lists(st.floats(0, 10), min_size=4, max_size=4), st.floats(1, 1e6))
def test_best_is_the_smallest_and_recomputing_bounds_the_fetch(
    match: MatchReply, tokens: int, queues: list[float], rate: float
) -> None:
    prompt = Prompt(tokens, BLOCK, match)
    views = [PrefillView(name, queue_s=queue) for name, queue in zip(NODES, queues, strict=True)]
    found = [predict(prompt, view, lambda _: True, lambda *_: FetchCost(rate, 0.001)) for view in views]
    best = choose_prefill(found, 3)
    for candidate, view in zip(found, views, strict=True):
        assert best.ttft_s <= candidate.ttft_s + 1e-9
        assert candidate.work.cached + candidate.work.uncached == tokens
        assert candidate.work.uncached >= 1
        cold = predict(Prompt(tokens, BLOCK, MatchReply(blocks=0)), view, lambda _: True, lambda *_: FetchCost(1, 0))
        own = local_prefix(view.node, match, prompt.limit)
        assert candidate.ttft_s <= cold.ttft_s + own.blocks * BLOCK * view.model.c3 + RECOMPUTE_GAIN_S + 1e-9

"""Iteration times: formula, table, presets; what an iteration contains."""

import pytest

from services.engine.core.batching import (
    DecodeWork,
    PrefillWork,
    accept_tokens,
    compose_decode,
    compose_prefill,
    finish_prefill,
)
from services.engine.core.timing import (
    PRESETS,
    Coefficients,
    DecodeTerms,
    ObservedPrefill,
    PrefillTerms,
    SiliconTable,
    attention_pairs,
)


def test_the_prefill_time_of_case_65() -> None:
    """64 uncached of 8,000 tokens: 0.0277 s; all of it computed: 0.2020 s."""
    times = Coefficients(c0=0.010, c1=20e-6, c2=1e-9, c3=2e-6)
    cached = PrefillTerms(1, 64, attention_pairs(64, 7936), 7936)
    assert times.prefill_s(cached) == pytest.approx(0.0277, abs=5e-5)
    assert times.prefill_s(PrefillTerms(1, 8000, attention_pairs(8000, 0))) == pytest.approx(0.2020, abs=5e-5)


def test_the_decode_time_reported_for_glm() -> None:
    """17 ms at 8 and 45 ms at 64 running requests, but for the term of the context."""
    times = PRESETS["glm-5.2"].times
    assert times.decode_s(DecodeTerms(8, 0)) == pytest.approx(0.0175, abs=0.0006)
    assert times.decode_s(DecodeTerms(64, 0)) == pytest.approx(0.0446, abs=0.0006)
    assert times.decode_s(DecodeTerms(8, 1_000_000)) - times.decode_s(DecodeTerms(8, 0)) == pytest.approx(0.001)


def test_experts_touched_grow_to_all_and_are_constant_in_dense_models() -> None:
    sparse, dense = Coefficients(active_share=8 / 256, fed_tokens=4), Coefficients()
    shares = [sparse.experts_touched(requests) for requests in (1, 8, 64)]
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(1 - (1 - 1 / 32) ** 4)
    assert shares[-1] < 1
    assert dense.experts_touched(1) == dense.experts_touched(64) == 1.0


def test_zero_takes_no_time_and_speed_divides_it() -> None:
    terms = PrefillTerms(1, 1000, 1e6, 10, 2)
    assert PRESETS["zero"].times.prefill_s(terms) == 0.0
    assert PRESETS["zero"].transfer_s(1000) == 0.0
    laptop = PRESETS["laptop"].times
    assert laptop.faster(4).prefill_s(terms) == pytest.approx(laptop.prefill_s(terms) / 4)
    assert laptop.faster(4).decode_s(DecodeTerms(3, 999)) == pytest.approx(laptop.decode_s(DecodeTerms(3, 999)) / 4)


TABLE = {
    "ctx": [["m", t_uc, t_c, 1, 10 + t_uc / 100 + t_c / 1000] for t_uc in (100, 1000) for t_c in (0, 10_000)],
    "gen": [["m", 0, b, ctx, 5 + b + ctx / 1000] for b in (1, 8) for ctx in (2000, 8000)]
    + [["m", 3, b, ctx, 7 + 2 * b + ctx / 100] for b in (1, 8) for ctx in (2000, 8000)],
}


def test_a_table_is_interpolated_between_and_beyond_its_points() -> None:
    table = SiliconTable(TABLE, "m", restore_s=1e-6)
    for t_uc, t_c in ((100, 0), (550, 5000), (1000, 10_000), (2000, 20_000)):
        terms = PrefillTerms(1, t_uc, attention_pairs(t_uc, t_c))
        assert table.prefill_s(terms) == pytest.approx((10 + t_uc / 100 + t_c / 1000) / 1e3)
    assert table.decode_s(DecodeTerms(4, 4 * 4000)) == pytest.approx((5 + 4 + 4) / 1e3)
    assert table.prefill_s(PrefillTerms(1, 100, attention_pairs(100, 0), 1000)) == pytest.approx(0.012)


def test_drafts_change_the_base_and_not_the_slope_over_context() -> None:
    table = SiliconTable(TABLE, "m", drafts=3)
    assert table.decode_s(DecodeTerms(8, 8 * 2000)) == pytest.approx((7 + 16 + 20) / 1e3)
    slope = table.decode_s(DecodeTerms(8, 8 * 8000)) - table.decode_s(DecodeTerms(8, 8 * 2000))
    assert slope == pytest.approx(6 / 1e3)


def test_a_batch_is_looked_up_by_its_sums() -> None:
    table = SiliconTable(TABLE, "m")
    two = PrefillTerms(2, 400, attention_pairs(200, 5000) + attention_pairs(200, 5000))
    assert table.prefill_s(two) == pytest.approx((10 + 4 + 4.9) / 1e3, rel=0.01)


@pytest.mark.parametrize(("model", "drafts"), [("other", 0), ("m", 2)])
def test_a_table_without_the_model_is_refused(model: str, drafts: int) -> None:
    with pytest.raises(ValueError, match="has no rows of model"):
        SiliconTable(TABLE, model, drafts=drafts)


def test_a_table_with_a_hole_is_refused() -> None:
    with pytest.raises(ValueError, match="wanted a full grid"):
        SiliconTable({**TABLE, "ctx": TABLE["ctx"][:-1]}, "m")


def test_an_observed_engine_is_followed() -> None:
    observed = ObservedPrefill(first_guess_s=1.0)
    assert observed.prefill_s(PrefillTerms(1, 10, 0)) == 10.0
    observed.observe(0, 5.0)
    for _ in range(50):
        observed.observe(100, 0.2)
    assert observed.prefill_s(PrefillTerms(1, 10, 0)) == pytest.approx(0.02)


def test_prompts_are_cut_into_chunks_in_order() -> None:
    works = [PrefillWork(100, 40, 40), PrefillWork(30, 0), PrefillWork(30, 0)]
    names = {id(work): index for index, work in enumerate(works)}
    sizes = []
    while (batch := compose_prefill([w for w in works if w.left], 50)) is not None:
        sizes.append([(names[id(chunk.work)], chunk.tokens) for chunk in batch.chunks])
        finish_prefill(batch)
    assert sizes == [[(0, 50)], [(0, 10), (1, 30), (2, 10)], [(2, 20)]]


def test_restored_tokens_and_media_are_charged_with_the_first_chunk() -> None:
    work = PrefillWork(100, 40, 40, 2)
    restored, pairs, media = [], [], []
    while (batch := compose_prefill([work] if work.left else [], 30)) is not None:
        restored.append(batch.terms.restored_tokens)
        media.append(batch.terms.media)
        pairs.append(batch.terms.attention_pairs)
        finish_prefill(batch)
    assert (restored, media) == ([40, 0], [2, 0])
    assert sum(pairs) == attention_pairs(60, 40)


def test_speculation_accepts_its_mean_and_never_past_the_end() -> None:
    work = DecodeWork(100, 26)
    given = []
    while work.left:
        given.append(accept_tokens(work, 2.5))
    assert given == [2, 3] * 5 + [1]
    assert work.context_tokens == 126


def test_only_so_many_run_at_once() -> None:
    works = [DecodeWork(10 * number, 5) for number in range(1, 6)]
    batch = compose_decode(works, 3)
    assert batch is not None
    assert (batch.terms.requests, batch.terms.context_tokens) == (3, 60)
    assert compose_decode([], 3) is None

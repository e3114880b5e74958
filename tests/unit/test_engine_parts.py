"""Small parts of the engine: answers kept, liveness, content, replies in parts, settings."""

from pathlib import Path

import numpy as np
import pytest

from schemas.block_key import PAIRS, PLAIN, block_digests, token_bytes, token_list
from schemas.phase import Phase
from schemas.serve import Finish, LegUpdate, RequestState, Sampling
from services.engine.backend import Leg, LegKey
from services.engine.core.answers import Answers
from services.engine.core.liveness import Liveness
from services.engine.replies import UPDATES_AT_ONCE, _parts
from services.engine.settings import EngineSettings
from services.engine.timed.content import Context, block_content
from services.settings import SettingsError, load

KEY = LegKey("q", 1, Phase.DECODE)


def test_tokens_are_taken_once_and_in_order() -> None:
    answers = Answers()
    update = answers.tokens(KEY, 0, [5, 6])
    assert update is not None
    assert (update.seq, token_list(update.tokens)) == (0, [5, 6])
    assert answers.tokens(KEY, 0, [5, 6]) is None
    update = answers.tokens(KEY, 1, [6, 7])
    assert update is not None
    assert (update.seq, token_list(update.tokens)) == (2, [7])
    with pytest.raises(ValueError, match="token 5 after 3 tokens: 2 are missing"):
        answers.tokens(KEY, 5, [1])


def test_an_answer_is_said_again_with_its_end_until_forgotten() -> None:
    answers = Answers()
    answers.state(KEY, RequestState.DECODING)
    answers.tokens(KEY, 0, [5, 6, 2])
    end = answers.end(KEY, Finish.STOP, "", (2,), None, None)
    assert (end.seq, end.stop_token) == (3, 2)
    again = answers.since(KEY, 1)
    assert again is not None
    assert (again.seq, token_list(again.tokens), again.finish, again.stop_token) == (1, [6, 2], Finish.STOP, 2)
    beyond = answers.since(KEY, 9)
    assert beyond is not None
    assert (beyond.seq, beyond.tokens) == (3, b"")
    answers.forget(KEY)
    assert answers.since(KEY, 0) is None


def test_silence_counts_from_the_first_time_somebody_is_needed() -> None:
    alive = Liveness(timeout_s=3.0)
    alive.expect("a", 10.0)
    assert alive.gone(12.9, listening=True) == {}
    assert alive.gone(13.1, listening=True) == {"a": "silent for 3.1 s (limit 3 s)"}
    assert alive.gone(13.2, listening=True) == {}, "said once"


def test_a_new_incarnation_is_a_loss_and_an_unneeded_one_is_not() -> None:
    alive = Liveness(timeout_s=3.0)
    alive.seen("a", 1, 0.0)
    alive.expect("a", 0.5)
    alive.seen("a", 1, 1.0)
    assert alive.gone(1.0, listening=True) == {}
    alive.seen("a", 2, 1.5)
    assert alive.gone(1.6, listening=True) == {"a": "restarted"}
    alive.seen("a", 3, 1.7)
    alive.keep(set(), 1.8)
    alive.expect("a", 1.9)
    assert alive.gone(2.0, listening=True) == {}, "needed only since"


def test_block_content_differs_in_every_word_and_between_blocks() -> None:
    one, other = (block_content(bytes([seed]) * 32, 4096) for seed in (1, 2))
    assert len(set(one.view("<u8").tolist())) == 512
    assert not np.any(one.view("<u8") == other.view("<u8"))
    assert len(block_content(bytes(32), 100)) == 100


@pytest.mark.parametrize("version", [PLAIN, PAIRS])
def test_a_context_that_grows_has_the_digests_of_the_whole(version: str) -> None:
    tokens = list(range(1, 30))
    prompt = token_bytes(tokens[:13])
    leg = Leg(
        key=KEY,
        tokens=prompt,
        prompt_tokens=13,
        sampling=Sampling(max_new_tokens=20),
        room=1,
        peer="",
        rendezvous="",
        digests=tuple(block_digests(prompt, 4, key_version=version)),
    )
    context = Context(leg, 4, version)
    numbers = {context.next_number()}
    for token in tokens[13:]:
        context.append(token)
        numbers.add(context.next_number())
    assert context.digests == block_digests(token_bytes(tokens), 4, key_version=version)
    assert context.blocks_with_kv() == len(block_digests(token_bytes(tokens[:-1]), 4, key_version=version))
    assert len(numbers) == 17


def test_updates_that_do_not_fit_are_cut() -> None:
    many = [LegUpdate(id=str(n), attempt=1, phase=Phase.DECODE) for n in range(UPDATES_AT_ONCE + 1)]
    assert [len(part) for part in _parts(many)] == [UPDATES_AT_ONCE, 1]
    long = [LegUpdate(id=str(n), attempt=1, phase=Phase.DECODE, tokens=bytes(200_000)) for n in range(3)]
    assert [len(part) for part in _parts(long)] == [1, 1, 1]


def test_settings_are_read_by_table(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('node = "node-3"\nengine = "timed"\n[timed]\npreset = "glm-5.2"\nblock_size = 64\n')
    settings = load(EngineSettings, path, {"EI_TIMED__SPEED": "10", "EI_PHASE": "decode"})
    assert (settings.name, settings.phase) == ("engine-node-3", Phase.DECODE)
    assert (settings.timed.preset, settings.timed.speed, settings.timed.device_tokens) == ("glm-5.2", 10.0, 2_899_968)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[timed]\npreset = "warp"', "warp"),
        ("[timed]\nl1_tokens = 100", "32768"),
        ("[timed]\nspeed = 0", "speed"),
        ('engine = "vllm"', "vllm"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "engine.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=named):
        load(EngineSettings, path, {})

"""The parts of the SGLang backend that need neither torch nor SGLang."""

import importlib.util
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.block_key import PAIRS, block_digests, namespace_seed, pack_keys, short_key, token_bytes
from schemas.kv import ChangeType, Tier
from schemas.phase import Phase
from schemas.serve import Finish, RequestState, Sampling
from services.engine.sglang import names
from services.engine.sglang.background import JobThread
from services.engine.sglang.config import PLUGIN_VARIABLE, PluginConfig, SglangSettings, plugin_config
from services.engine.sglang.device_events import DeviceEventRecorder
from services.engine.sglang.frames import BadFrame, Cancel, Hello, Splitter, Step, Submit, Tokens, pack
from services.engine.sglang.launch import environment, server_args
from services.engine.sglang.page_hash import page_digests, page_hashes
from services.engine.sglang.phase_hint import hinted_phase, phase_hint
from services.engine.sglang.report import Report
from services.engine.sglang.sessions import Sessions
from services.engine.sglang.telemetry import IterationObserver


class RadixKey:
    """What our hash sees of SGLang's key."""

    def __init__(self, tokens: list[int], *, is_bigram: bool = False) -> None:
        self._tokens, self.is_bigram = tokens, is_bigram

    def raw_token_ids(self) -> list[int]:
        return self._tokens

    def __len__(self) -> int:
        return len(self._tokens) - self.is_bigram


def test_page_hashes_are_the_block_keys() -> None:
    tokens = [random.Random(1).randrange(50_000) for _ in range(70)]
    seed = namespace_seed("adapter", "salt")
    packed = token_bytes(tokens)
    assert page_digests(tokens[:64], seed, 16) == block_digests(packed, 16, seed)
    assert page_hashes(RadixKey(tokens), None, 16)[:4] == [digest.hex() for digest in block_digests(packed, 16)]
    assert page_digests(RadixKey(tokens, is_bigram=True), b"", 16)[:4] == block_digests(packed, 16, b"", PAIRS)
    assert len(page_hashes(tokens, None, 16)) == 5, "upstream hashes a partial last page too"
    assert page_hashes(tokens[:3], seed) == block_digests(token_bytes(tokens[:3]), 3, seed)[0].hex()


def test_device_events_name_blocks_and_parents_by_our_keys() -> None:
    recorder = DeviceEventRecorder(enabled=False, page_size=16, dynamo_format=False, lora_names=None)
    digests = block_digests(token_bytes(range(64)), 16)
    root = SimpleNamespace(key=None, parent=None, hash_value=[])
    first = SimpleNamespace(key=1, parent=root, hash_value=[digest.hex() for digest in digests[:3]])
    last = SimpleNamespace(key=1, parent=first, hash_value=[digests[3].hex()])
    recorder.record_store(first)
    recorder.record_store(last, session_id="x")
    recorder.record_store(last, medium=SimpleNamespace(value="CPU_PINNED"))
    recorder.record_remove(last)
    recorder.record_all_cleared()
    stored, next_stored, removed, cleared = recorder.drain()
    assert (stored.type, stored.tier, stored.parent) == (ChangeType.STORED, Tier.L1, None)
    assert stored.hashes == pack_keys(digests[:3])
    assert next_stored.parent == short_key(digests[2])
    assert (removed.type, removed.hashes) == (ChangeType.REMOVED, pack_keys(digests[3:]))
    assert cleared.type is ChangeType.CLEARED
    assert recorder.drain() == recorder.take() == []


def test_frames_survive_any_cut_and_bad_ones_are_refused() -> None:
    frames = [
        Hello(role="worker", pid=1),
        Submit(rid="r", tokens=b"1234", sampling=Sampling(max_new_tokens=3), phase=Phase.PREFILL, room=2**62),
        Step(used_tokens=16, tokens=[Tokens("r", 0, b"1234")]),
        Cancel(rid="r"),
    ]
    data = b"".join(pack(frame) for frame in frames)
    for size in (1, 3, 7, len(data)):
        splitter = Splitter()
        found = [frame for at in range(0, len(data), size) for frame in splitter.feed(data[at : at + size])]
        assert found == frames
    with pytest.raises(BadFrame, match="no frame"):
        Splitter().feed(b"\x01\0\0\0\xc1")
    with pytest.raises(BadFrame, match="announced"):
        Splitter().feed(b"\xff\xff\xff\xff")


class FINISH_LENGTH:  # noqa: N801 (SGLang's name: the report goes by it)
    pass


class FINISH_ABORT:  # noqa: N801
    message = "gone"


def _request(rid: str, output: list[int], finished: Any = None, cached: int = 0) -> Any:
    return SimpleNamespace(
        rid=rid,
        output_ids=output,
        output_ids_through_stop=output,
        finished_reason=finished,
        finished=lambda: finished is not None,
        cached_tokens=cached,
        origin_input_ids=[0] * 20,
        multimodal_inputs=None,
    )


def test_a_report_gives_each_token_once_and_an_end_only_when_nothing_is_held() -> None:
    report = Report()
    assert report.step(0, set(), []) is None
    report.progress(_request("r", [5]))
    report.progress(_request("r", [5]))
    step = report.step(16, set(), [])
    assert step is not None
    assert step.tokens == [Tokens("r", 0, token_bytes([5]))]
    report.ended(_request("r", [5, 6, 7], FINISH_LENGTH(), cached=16))
    report.aborted(_request("q", []), "queue")
    step = report.step(16, {"r"}, [])
    assert step is not None
    assert step.tokens == [Tokens("r", 1, token_bytes([6, 7]))]
    assert [(end.rid, end.finish, end.reason) for end in step.ends] == [("q", Finish.ERROR, "queue")]
    step = report.step(16, set(), [])
    assert step is not None
    assert [(end.rid, end.finish, end.cached_tokens) for end in step.ends] == [("r", Finish.LENGTH, 16)]
    report.ended(_request("s", [], FINISH_ABORT()))
    step = report.step(0, set(), [])
    assert step is not None
    assert (step.ends[0].finish, step.ends[0].reason) == (Finish.ERROR, "gone")
    report.state("t", RequestState.PREFILLING, 32, 16)
    step = report.step(0, set(), [])
    assert step is not None
    assert step.states[0].restored_tokens == 16


def _batch(requests: list[Any], *, new: list[int], before: list[int], idle: bool = False) -> Any:
    mode = SimpleNamespace(is_idle=lambda: idle, is_prebuilt=lambda: False)
    return SimpleNamespace(reqs=requests, extend_lens=new, prefix_lens=before, forward_mode=mode)


def test_an_observed_prefill_counts_cached_tokens_with_its_first_chunk_only() -> None:
    observer = IterationObserver(1, lambda request, cached: min(cached, 8))
    request = _request("r", [])
    first = observer.launch(_batch([request], new=[4], before=[12]), Phase.PREFILL)
    observer.launched(1, first)
    second = observer.launch(_batch([request], new=[4], before=[16]), Phase.PREFILL)
    observer.launched(2, second)
    chunk, rest = observer.ended(1, None), observer.ended(2, None)
    assert chunk is not None
    assert rest is not None
    assert (chunk.uncached_tokens, chunk.cached_tokens, chunk.restored_tokens, chunk.output_tokens) == (4, 12, 8, 0)
    assert (rest.uncached_tokens, rest.cached_tokens, rest.restored_tokens, rest.output_tokens) == (4, 0, 0, 1)
    assert chunk.attention_pairs == 4 * 12 + 4 * 5 / 2
    assert (chunk.seq, rest.seq) == (1, 2)
    assert observer.ended(3, None) is None
    assert observer.launch(_batch([], new=[], before=[], idle=True), Phase.PREFILL) is None


def test_an_observed_prefill_counts_each_medium_with_the_batch_that_reaches_it() -> None:
    observer = IterationObserver(1, lambda request, cached: 0)
    request = _request("r", [])
    spans = [[(0, 3)], [(5, 7)], [(9, 11)], [(14, 15), (17, 18)]]
    request.multimodal_inputs = SimpleNamespace(mm_items=[SimpleNamespace(offsets=each) for each in spans])
    found = []
    for number, (before, new) in enumerate([(6, 4), (10, 5), (15, 5)]):
        observer.launched(number, observer.launch(_batch([request], new=[new], before=[before]), Phase.PREFILL))
        iteration = observer.ended(number, None)
        assert iteration is not None
        found.append(iteration.media)
    assert found == [2, 1, 0], "the first is cached, the second cut by what is"


def test_an_observed_decode_counts_what_was_fed_and_accepted() -> None:
    observer = IterationObserver(4, lambda request, cached: 0)
    batch = _batch([_request("r", [1, 2]), _request("q", [3])], new=[], before=[])
    observer.launched(1, observer.launch(batch, Phase.DECODE))
    iteration = observer.ended(1, 5)
    assert iteration is not None
    assert (iteration.requests, iteration.context_tokens) == (2, 43)
    assert (iteration.fed_tokens, iteration.accepted_tokens, iteration.output_tokens) == (8, 5, 5)


def test_sessions_close_when_superseded_or_silent() -> None:
    sessions = Sessions(10.0)
    assert sessions.superseded("a@1", 0.0) == []
    assert sessions.superseded("b@0", 1.0) == []
    assert sessions.superseded("a@1", 5.0) == []
    assert sessions.superseded("a@2", 6.0) == ["a@1"]
    assert sessions.superseded(None, 11.0) == ["b@0"]
    assert sessions.superseded(None, 16.0) == ["a@2"]
    assert sessions.superseded(None, 99.0) == []


def test_jobs_complete_in_order_and_a_failed_one_stops_nothing() -> None:
    jobs = JobThread("test")
    gate, last = threading.Event(), threading.Event()
    jobs.put(lambda: gate.wait(5))
    jobs.put(lambda: 1 / 0 == 0)
    jobs.put(lambda: True)
    jobs.put(lambda: last.set() is None)
    assert (jobs.pending, jobs.completed) == (4, 0)
    with pytest.raises(IndexError):
        jobs.take_done()
    gate.set()
    assert last.wait(5)
    assert [jobs.take_done() for _ in range(3)] == [True, False, True]
    jobs.close()
    assert (jobs.pending, jobs.completed) == (0, 0)


def test_the_plug_in_is_inert_without_our_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_config({}) is None
    monkeypatch.delenv(PLUGIN_VARIABLE, raising=False)
    from services.engine.sglang.plugin import install

    install()


def test_the_launcher_hands_down_what_the_plug_in_reads(tmp_path: Any) -> None:
    plugin = PluginConfig(plain=False, device="cpu", channel="/s", pool="/p", model="m")
    environ = environment(SglangSettings(), plugin, tmp_path, {"PYTHONPATH": "/mine", "SGLANG_PLUGINS": "other"})
    assert plugin_config(environ) == plugin
    assert environ["PYTHONPATH"].endswith(":/mine")
    assert "cpu_stubs" in environ["PYTHONPATH"]
    assert "SGLANG_PLUGINS" not in environ, "a white list of plug-ins would leave ours out"
    on_gpu = environment(SglangSettings(device="cuda"), plugin, tmp_path, {})
    assert "PYTHONPATH" not in on_gpu
    assert "SGLANG_USE_CPU_ENGINE" not in on_gpu


def test_arguments_of_the_operator_win() -> None:
    settings = SglangSettings(sglang_args={"mem_fraction_static": 0.8, "enable_dp_attention": True}, l1_tokens=None)
    arguments = server_args(settings, Path("/m"), plain=False, rendezvous_port=1)
    assert arguments["model_path"] == "/m"
    assert (arguments["mem_fraction_static"], arguments["enable_dp_attention"]) == (0.8, True)
    assert "max_total_tokens" not in arguments
    assert arguments["disaggregation_mode"] == "decode"
    assert "disaggregation_mode" not in server_args(settings, Path("/m"), plain=True, rendezvous_port=0)


@pytest.mark.parametrize(
    ("device", "installed", "backend"), [("cpu", False, "pil"), ("cpu", True, None), ("cuda", False, None)]
)
def test_images_are_not_resized_by_a_stand_in(
    device: str, installed: bool, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    arguments = server_args(SglangSettings(device=device), Path("/m"), plain=False, rendezvous_port=1)
    assert arguments.get("image_processor_backend") == backend


@pytest.mark.parametrize(("field", "value"), [("block_size", 0), ("chunk_tokens", 250), ("max_running", 0)])
def test_bad_settings_are_named(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"sglang\.{field}"):
        SglangSettings(**{field: value})


def test_the_phase_travels_in_the_kv_hints() -> None:
    hint = phase_hint("r", Phase.PREFILL)
    actions = [SimpleNamespace(action_type=a["action_type"], payload=a["payload"]) for a in hint["actions"]]
    assert hinted_phase(SimpleNamespace(actions=actions)) is Phase.PREFILL
    assert hinted_phase(None) is Phase.DECODE
    assert hinted_phase(SimpleNamespace(actions=[SimpleNamespace(action_type="other", payload={})])) is Phase.DECODE


def test_another_version_and_missing_hooks_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.5.24")
    with pytest.raises(names.IncompatibleSglang, match=r"sglang 0\.5\.24 is installed.*0\.5\.23"):
        names.check_version()
    names.check_hooks(["a.b"], {"a.b", "c.d"})
    with pytest.raises(names.IncompatibleSglang, match=r"a\.c, a\.d"):
        names.check_hooks(["a.d", "a.b", "a.c"], {"a.b"})
    with pytest.raises(names.IncompatibleSglang, match="waiting_queue"):
        names.check_scheduler(SimpleNamespace())

"""Records of requests that ended, for tests of how answers are told."""

from services.router.core.effects import Outcome, Record


def record(prompt: int = 10, cached: int = 0, output: int = 3, outcome: Outcome = Outcome.STOP) -> Record:
    """A request that took no time."""
    return Record(
        request="r",
        branch=None,
        version=None,
        outcome=outcome,
        arrived=0.0,
        ended=0.0,
        placed=None,
        fetched=None,
        prefill_started=None,
        first_token=None,
        prompt_tokens=prompt,
        cached_tokens=cached,
        restored_tokens=0,
        known_tokens=0,
        output_tokens=output,
        prefill_node=None,
        decode_node=None,
        attempts=1,
        ttft_predicted_s=None,
        blind=False,
        lineage="",
    )

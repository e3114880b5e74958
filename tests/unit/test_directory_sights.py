"""What is kept of earlier looks at runs."""

import pytest

from services.directory.core import match
from tests.unit.directory_bench import Bench, chain, stored


def test_a_run_may_be_looked_at_again_when_its_own_looks_are_the_oldest_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(match, "SIGHTS_KEPT", 1)
    bench, keys = Bench(), chain(*"abcd")
    bench.say("p1", 1, stored(keys))
    assert [bench.match(keys[:blocks]).blocks for blocks in (2, 3, 4, 2)] == [2, 3, 4, 2]

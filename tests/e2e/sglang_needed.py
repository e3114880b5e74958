"""The mark of tests that need SGLang."""

from importlib.util import find_spec

import pytest

NEEDS_SGLANG = pytest.mark.skipif(find_spec("sglang") is None, reason="SGLang is not installed (the [engine] extra)")

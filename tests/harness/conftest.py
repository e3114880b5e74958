"""Real programs are installed and run only when they are asked for: `pytest -m harness`."""

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "harness" in str(config.option.markexpr).replace("not harness", ""):
        return
    asked_for = pytest.mark.skip(reason="real harness programs (1 GB from npm, minutes): python -m pytest -m harness")
    for item in items:
        if item.get_closest_marker("harness") is not None:
            item.add_marker(asked_for)

"""docs/metrics.md against what the services register: nothing missing, nothing left over, types and labels right."""

import asyncio
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.app import App, serve
from services.bus import MemoryBus, MemoryHub
from services.directory.service import DirectoryService
from services.directory.settings import DirectorySettings
from services.engine.__main__ import build as build_engine
from services.engine.settings import EngineSettings
from services.kvpool.service import KvPool
from services.planner.service import PlannerService
from services.planner.settings import PlannerServiceSettings
from services.router.service import RouterService
from services.router.settings import RouterSettings
from tests.pool_node import settings as pool_settings

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
SERVICES = ("router", "directory", "engine", "kvpool", "planner")
SECTIONS = (*SERVICES, "bus", "process")
START_S = 60.0
_ROW = re.compile(r"\| `([a-z0-9_]+)` \| (counter|gauge|histogram) \|([^|]*)\| [^|]+ \| [^|]+ \|")
_UNIT = "total|seconds|bytes|tokens|blocks|ratio|count|info"
_NAME = re.compile(rf"ei_([a-z]+)_(?:[a-z][a-z0-9_]*_(?:{_UNIT})|tokens|blocks)\Z")
"""Where the unit says all, it stands alone: `ei_kvpool_blocks`."""


@dataclass(frozen=True, order=True)
class Entry:
    """One metric, by the name that a scrape shows (counters end in `_total`)."""

    name: str
    kind: str
    labels: tuple[str, ...]


def entries(registry: CollectorRegistry) -> Iterator[Entry]:
    """All metrics of a registry, also those with labels that have no series yet."""
    for collector in list(registry._collector_to_names):
        for family in collector.collect():
            labels: Any = getattr(collector if hasattr(collector, "_labelnames") else family, "_labelnames", ())
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield Entry(name, family.type, tuple(labels))


async def scraped(build: Callable[[App[Any]], Any], settings: Any) -> list[Entry]:
    """Start a service, take its metrics, end it."""
    found: list[Entry] = []
    stop = asyncio.Event()

    def started(app: App[Any]) -> None:
        found.extend(entries(app.registry))
        stop.set()

    async with asyncio.timeout(START_S):
        await serve(build, settings, stop=stop, hurry=stop, bus=MemoryBus(MemoryHub()), started=started)
    return found


async def _all(folder: Path) -> dict[str, list[Entry]]:
    quiet: dict[str, Any] = {"log_level": "error"}
    return {
        "router": await scraped(RouterService, RouterSettings(**quiet)),
        "directory": await scraped(DirectoryService, DirectorySettings(state_dir=str(folder / "state"), **quiet)),
        "engine": await scraped(build_engine, EngineSettings(pool_socket=str(folder / "no.sock"), **quiet)),
        "kvpool": await scraped(KvPool, pool_settings(folder, "a")),
        "planner": await scraped(PlannerService, PlannerServiceSettings(**quiet)),
    }


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Entry]]:
    """What each service registers, by service."""
    return asyncio.run(_all(tmp_path_factory.mktemp("metrics")))


def section_of(service: str, name: str) -> str:
    """The table a metric of a service belongs into; what all services share has its own."""
    return next((shared for shared in ("bus", "process") if name.startswith((f"ei_{shared}_", f"{shared}_"))), service)


def documented() -> dict[str, list[Entry]]:
    """The tables of the page, by the heading they stand under. A row that does not parse is a mistake."""
    found: dict[str, list[Entry]] = {}
    rows: list[Entry] = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            rows = found.setdefault(line.removeprefix("## ").lower(), [])
        elif line.startswith("| `"):
            row = _ROW.fullmatch(line)
            assert row is not None, f"not `name` | type | labels | meaning | what to do: {line}"
            rows.append(Entry(row[1], row[2], tuple(re.findall(r"`([a-z_]+)`", row[3]))))
    return found


@pytest.mark.parametrize("section", SECTIONS)
def test_the_page_lists_each_metric_with_type_and_labels(section: str, registered: dict[str, list[Entry]]) -> None:
    real = {one for service, all_ in registered.items() for one in all_ if section_of(service, one.name) == section}
    page = documented().get(section, [])
    assert real, f"no service registers a metric of {section!r}"
    assert sorted(real - set(page)) == [], f"missing in {PAGE.name}, section {section!r}, or other type or labels there"
    assert sorted(set(page) - real) == [], f"in {PAGE.name}, section {section!r}, but not in the code"
    assert len(page) == len(set(page)), f"section {section!r} names a metric twice"


def test_the_text_speaks_only_of_metrics_that_exist(registered: dict[str, list[Entry]]) -> None:
    names = {one.name for all_ in registered.values() for one in all_}
    assert set(re.findall(r"`(ei_[a-z0-9_]+)[`{]", PAGE.read_text())) - names == set()


def test_the_page_has_no_tables_of_unknown_services() -> None:
    assert {section for section, rows in documented().items() if rows} == set(SECTIONS)


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_shows_bus_and_process(service: str, registered: dict[str, list[Entry]]) -> None:
    assert {section_of(service, one.name) for one in registered[service]} == {service, "bus", "process"}


@pytest.mark.parametrize("service", SERVICES)
def test_names_are_service_thing_unit(service: str, registered: dict[str, list[Entry]]) -> None:
    for one in registered[service]:
        if section_of(service, one.name) != "process":
            name = _NAME.match(one.name)
            assert name is not None, f"{one.name} is not ei_<service>_<thing>_<unit>, unit one of {_UNIT}"
            assert name[1] in (service, "bus"), f"{one.name} is registered by {service}"


@pytest.mark.parametrize("service", SERVICES)
def test_no_label_grows_with_branches(service: str, registered: dict[str, list[Entry]]) -> None:
    for one in registered[service]:
        assert "branch" not in one.labels, f"{one.name}: a series per branch never stops growing"

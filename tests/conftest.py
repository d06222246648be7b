"""Brokers for all tests: real ones, one for each test."""

from __future__ import annotations

import gc
import os
import resource
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from broker_config.broker.embedded import EmbeddedBroker, start_broker
from broker_config.mqtt.endpoint import Endpoint
from tests.support.programs import UNPACKED, find_needs
from tests.support.provisioned_federation import Guarded, guarded
from tests.support.secured_mosquitto import Secured, secured_mosquitto

if TYPE_CHECKING:
    from tests.support.browser import Page

# Workers share the processors: with a thread each, tests that train take a quarter less of them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

os.environ["PATH"] += f"{os.pathsep}{UNPACKED}"

# Hypothesis tries the same examples each time, as in its own profile for continuous integration;
# `make chaos` tries others. How long one takes says nothing on a busy machine.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("others", deadline=None, max_examples=1000)
settings.load_profile("same")

# A shell that starts the tests in the background lets them, and all that they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Modules and thousands of tests are all here to stay: looking through them for garbage again and
# again takes time.
gc.disable()


def pytest_collection_finish() -> None:
    """What there is now stays; garbage is looked for among what tests make."""
    gc.freeze()
    gc.enable()


NEEDS = find_needs()

# What the main promises do without: `make slow` runs all of it.
SLOW = (
    "benchmarks",
    "edge_node/extensions/audit",
    "edge_node/extensions/genicam",
    "edge_node/extensions/opcua",
    "edge_node/extensions/record",
    "edge_node/extensions/sparkplug",
    "edge_node/extensions/textures",
    "edge_node/extensions/tracking",
    "research",
    "trainer/models/test_fast_kernels.py",
    "trainer/report",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the slow folders, and the tests that need chromium as tests of pages,
    before `-m` selects.
    """
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).as_posix().startswith(SLOW):
            item.add_marker(pytest.mark.slow)
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.needs("chromium"))
        if any(mark.args == ("chromium",) for mark in item.iter_markers("needs")):
            item.add_marker(pytest.mark.page)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs what is not here. In CI that is a failure: it would prove nothing."""
    for mark in item.iter_markers("needs"):
        name = mark.args[0]
        if NEEDS[name].here:
            continue
        if os.environ.get("CI", "") not in ("", "0", "false"):
            pytest.fail(f"needs {name}: {NEEDS[name].remedy}", pytrace=False)
        pytest.skip(f"needs {name}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in a line each how many tests were skipped for want of something, and what brings it."""
    skipped = Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", []))
    for name, need in NEEDS.items():
        count = skipped[f"Skipped: needs {name}"]
        if count:
            terminalreporter.write_line(f"{count} tests need {name}: {need.remedy}")


class PagesApart(LoadFileScheduling):
    """A file's tests go to one worker, but for a page of documentation,
    which waits more than it computes.
    """

    def _split_scope(self, nodeid: str) -> str:
        return nodeid if "test_a_page_runs" in nodeid else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> PagesApart:
    """Whatever --dist says."""
    return PagesApart(config, log)


# As most machines have it: what leaks file descriptors fails here, and not first at a user's.
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@pytest.fixture(scope="session", autouse=True)
def _state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What a line remembers by default is no business of the user's who tests."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(params=["mosquitto", "amqtt"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """Each kind of broker in turn."""
    with start_broker(tmp_path / "broker", kind=request.param) as running:
        yield running


@pytest.fixture
def mosquitto(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    """A mosquitto."""
    with start_broker(tmp_path / "broker", kind="mosquitto") as running:
        yield running


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """A mosquitto for all tests of a module, whose federations differ by name."""
    with start_broker(tmp_path_factory.mktemp("broker"), kind="mosquitto") as running:
        yield Endpoint.parse(running.url)


@pytest.fixture(scope="module")
def plants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three plants' folders, each with eight images of each class."""
    from tests.support.plants import draw  # noqa: PLC0415 (the product takes a while to import)
    from tests.support.threaded_federation import PLANTS  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("plants")
    return {name: draw(folder / name, 8, seed) for seed, name in enumerate(PLANTS)}


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    """A chromium with one tab; what is waited for may take as long as a busy machine needs."""
    from tests.support.browser import browse  # noqa: PLC0415 (playwright takes a while to import)

    with browse() as page:
        yield page


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A mosquitto with TLS, websockets and client certificates."""
    with secured_mosquitto(tmp_path_factory.mktemp("secured")) as broker:
        yield broker


@pytest.fixture(scope="module")
def provisioned() -> Iterator[Guarded]:
    """A mosquitto as `edge-node provision` configures it for federation steel,
    with its members' kits.
    """
    # pytest's folders are closed to the user mosquitto
    with tempfile.TemporaryDirectory() as passable:
        Path(passable).chmod(0o711)
        with guarded(Path(passable) / "steel") as broker:
            yield broker

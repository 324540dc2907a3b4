"""What holds for every test: how OpenMP waits, that no time is asserted, which tests come first, what is skipped."""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from tests.examples import QUICK, SAME

# Test workers, servers and whatever else runs share the cores. OpenMP threads that spin while they wait for each other
# would wait for cores that the others' spinning threads hold: a second of small kernels then takes most of a minute.
# Set before anything loads OpenMP, and inherited by every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# A quarter of the time of importing torch, transformers or vLLM goes into looking through what lives to the end.
gc.disable()

# Tests talk to servers on this machine only, which a proxy cannot reach.
for _name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)

# A busy machine takes longer for an example than hypothesis' 200 ms, and one that stands still for ten than 30 s.
_ANY_TIME: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("any machine", **_ANY_TIME)
settings.register_profile(QUICK, **_ANY_TIME)
# What a change broke is found by the same examples as before it; new ones are drawn where pytest is called by itself.
settings.register_profile(SAME, **_ANY_TIME, derandomize=True)
settings.load_profile("any machine")

_NEEDS_VLLM = Path(__file__).resolve().parent / "vllm"
"""Where a test lies says that it needs vLLM: one file without the mark turned the order below off, and said nothing."""
_OTHERS = "files that start no server"
# The files that start servers of their own or those of tests/vllm/conftest.py. Each of those is started by the first
# file that asks and read by the others (tests/shared_result.py), so the order is: the longest first, and no two
# neighbours that ask for the same server. One test worker has each of them, and one has all others, because it alone
# imports vLLM: nobody can share that work, so it begins at once. At the end it left one of two cores idle.
_ORDER = (
    "test_demo.py",
    "test_serving_equals_stock.py",
    _OTHERS,
    "test_measured.py",
    "test_bf16_equals_stock.py",
    "test_disaggregation.py",
    "test_placed_experts.py",
    "test_failures.py",
    "test_fp8.py",
    "test_flag_passes.py",
    "test_fp8_memory.py",
    "test_four_bit.py",
    "test_gpt_oss.py",
    "test_layer_sensitivity.py",
    "test_killed_launcher.py",
)


def _group(file: str) -> str:
    """Return the entry of a file in the order above."""
    name = file.rpartition("/")[2]
    return name if name in _ORDER else _OTHERS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out soaks unless they are asked for.

    Put tests with the longest servers first, and give them an hour: one may start two, on a machine that is busy.
    """
    if "soak" not in config.option.markexpr:
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    for item in items:
        if _NEEDS_VLLM in item.path.parents:
            item.add_marker(pytest.mark.vllm)
    served = [item for item in items if item.get_closest_marker("vllm") or item.get_closest_marker("gpu")]
    if config.getoption("timeout", None) is None:  # a mark would go before --timeout
        for item in served:
            item.add_marker(pytest.mark.timeout(3600))
    if len(served) == len(items):
        items.sort(key=lambda item: _ORDER.index(_group(item.path.name)))


class _Groups(LoadFileScheduling):
    """Gives each group of the order above to one test worker."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups | None:
    """Replace pytest-xdist's scheduler of whole files (its loadgroup does nothing with pytest 9.2)."""
    return _Groups(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Look for garbage again, but not among what was imported, and a thirtieth as often as Python does by itself."""
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped for which reason."""
    skipped = [report.longrepr for report in terminalreporter.stats.get("skipped", [])]
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped")
        for reason, count in Counter(reason.removeprefix("Skipped: ") for _, _, reason in skipped).most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What was measured on this machine decides no test, and no test leaves anything in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def heeded_signals() -> Iterator[None]:
    """SIGINT and SIGHUP as a program finds them that was started at a terminal.

    A script that runs the tests in the background has SIGINT ignored, nohup SIGHUP, here and in all that is started
    from here: a test that sends one would wait for ever.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)

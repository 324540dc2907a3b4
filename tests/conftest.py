"""What holds for every test: how OpenMP waits, that no time is asserted, which tests share servers, what is skipped."""

from __future__ import annotations

import functools
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Test workers, servers and whatever else runs share the cores. OpenMP threads that spin while they wait for each other
# would wait for cores that the others' spinning threads hold: a second of small kernels then takes most of a minute.
# Set before anything loads OpenMP, and inherited by every process that a test starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests talk to servers on this machine only, which a proxy cannot reach.
for _name in ("http_proxy", "https_proxy", "all_proxy"):
    os.environ.pop(_name, None)
    os.environ.pop(_name.upper(), None)

# A busy machine takes longer for an example than hypothesis' 200 ms.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# The servers of tests/vllm/conftest.py that tests of several files ask, then the files that start their own: run in
# this order, the longest first, so that tests without a server fill what is left.
_SHARED_SERVERS = (
    ("stock_fp32", "ours_fp32", "ours_expert_parallel", "plain_tensor_parallel"),
    ("fallback_bf16", "ours_bf16"),
)
_OWN_SERVERS = ("test_demo.py", "test_flag_passes.py", "test_fp8_memory.py", "test_fp8_sensitivity.py")


@functools.cache
def _servers_of(file: Path) -> int:
    """Return the place in the order above of what a file's tests start: the same number, the same servers."""
    text = file.read_text(encoding="utf-8")
    for place, names in enumerate(_SHARED_SERVERS):
        if any(name in text for name in names):
            return place
    own = _OWN_SERVERS.index(file.name) if file.name in _OWN_SERVERS else len(_OWN_SERVERS)
    return len(_SHARED_SERVERS) + own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests with the longest servers first, and give them an hour: one may start two, on a machine that is busy."""
    served = [item for item in items if item.get_closest_marker("vllm") or item.get_closest_marker("gpu")]
    for item in served:
        item.add_marker(pytest.mark.timeout(3600))
    if len(served) == len(items):
        items.sort(key=lambda item: _servers_of(item.path))


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`, give files that ask the same servers to one worker: each would start its own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class LoadServerScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            place = _servers_of(Path(config.rootpath, file))
            return file if place >= len(_SHARED_SERVERS) else _SHARED_SERVERS[place][0]

    return LoadServerScheduling(config, log)

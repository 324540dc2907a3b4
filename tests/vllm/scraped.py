"""A real Prometheus that scrapes a server, where the system has one."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_optimizer.measure.live.activity import Activity, activity
from moe_optimizer.measure.live.servers import LiveServer
from tests.eventually import eventually
from tests.free_ports import free_port

PROMETHEUS = shutil.which("prometheus")
"""From the system's packages; None: what needs it is skipped."""
_DASHBOARD = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "moe-optimizer.json"
_CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
- {{job_name: server, static_configs: [{{targets: ["{target}"]}}]}}
"""

Query = Callable[[str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Watched:
    """What was seen of a server while it answered."""

    activity: Activity
    """As `moe-optimizer top` shows it."""
    found: Mapping[str, int] | None
    """Query of the dashboard -> series that a Prometheus had for it; None where the system has none."""


def watch(server: LiveServer, answer: Callable[[], object], folder: Path) -> Watched:
    """Have a server answer, and watch it."""
    queries = dashboard_queries()
    with contextlib.nullcontext() if PROMETHEUS is None else prometheus(server.client.base_url, folder) as query:
        before = server.moment()
        answer()
        now = activity(before, server.moment())
        if query is None:
            return Watched(now, None)
        # The rates of two scrapes, one of them after the answer.
        eventually(lambda: any(float(each["value"][1]) > 0 for each in query(queries[0])), f"no rate: {queries[0]}")
        return Watched(now, {each: len(query(each)) for each in queries})


def dashboard_queries() -> list[str]:
    """Return the queries of the Grafana dashboard, with what Grafana sets in its place.

    Rates are over minutes: scrapes that a busy server does not answer in time may be missing for longer than seconds.
    """
    panels = json.loads(_DASHBOARD.read_text(encoding="utf-8"))["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    return [query.replace("$model", ".*").replace("$__rate_interval", "5m") for query in queries]


@contextlib.contextmanager
def prometheus(base_url: str, folder: Path) -> Iterator[Query]:
    """Start Prometheus on a server's metrics; yields what answers a PromQL query with its series."""
    assert PROMETHEUS is not None
    folder.mkdir(parents=True)
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(target=base_url.removeprefix("http://")), encoding="utf-8")
    port = free_port()
    arguments = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen(
        [PROMETHEUS, *arguments, f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
        stdout=subprocess.DEVNULL,
    )

    def query(expression: str) -> list[dict[str, Any]]:
        url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]["result"]

    def scraped() -> bool:
        try:
            return bool(query("up == 1"))
        except OSError:
            return False

    try:
        eventually(scraped, "Prometheus has not scraped the server")
        yield query
    finally:
        process.terminate()
        process.wait(timeout=60)

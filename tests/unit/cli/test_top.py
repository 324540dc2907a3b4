"""`top`: one interval of a server as text and as JSON, and what is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from moe_optimizer.cli.main import main
from moe_optimizer.cli.top_view import rendered
from moe_optimizer.measure.live.activity import Activity, LiveActivity, ServerActivity, Times
from tests.builders import cpu_machine, made_plan, tiny_moe
from tests.free_ports import free_port

PAGE = """\
vllm:num_requests_running{{engine="0",model_name="chat"}} 3.0
vllm:generation_tokens_total{{engine="0",model_name="chat"}} {tokens}
moe_optimizer_pass_state{{model_name="chat",pass="flash_dmoe",state="ran"}} 1.0
moe_optimizer_pass_state{{model_name="chat",pass="flash_dmoe",state="applied"}} 0.0
moe_optimizer_kernel_range{{kernel="stock",model_name="chat",tokens="9+",weights="bf16"}} 1.0
moe_optimizer_kernel_range{{kernel="direct",model_name="chat",tokens="1-8",weights="bf16"}} 1.0
moe_optimizer_compilations_total{{model_name="chat",rank="0",when="after_ready"}} 2.0
"""


@contextlib.contextmanager
def serving(page: str, *, port: int = 0) -> Iterator[str]:
    """Serve a metrics page, in which each answer has 100 tokens more."""
    tokens = itertools.count(0, 100)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page.format(tokens=next(tokens)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            """Say nothing."""

    with HTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/metrics"])
def test_a_server_is_shown_for_one_interval(suffix: str, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(PAGE) as url:
        assert main(["top", url + suffix, "--once", "--interval", "0.05", "--json"]) == 0
    (server,) = json.loads(capsys.readouterr().out)["servers"]
    seen = server["activity"]
    assert server["url"] == url
    assert (seen["model"], seen["running"], seen["compiled_after_ready"]) == ("chat", 3, 2)
    assert seen["passes"] == {"flash_dmoe": "ran"}
    assert seen["kernels"] == {"1-8 tokens, bf16": "direct", "9+ tokens, bf16": "stock"}
    assert seen["output_tokens_per_s"] == pytest.approx(100 / seen["seconds"])


def test_without_a_terminal_it_ends_after_one_interval(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(PAGE) as url:
        assert main(["top", url, "--interval", "0.05"]) == 0
    assert "flash_dmoe ran" in capsys.readouterr().out


def test_what_is_no_server_of_vllm_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving("process_cpu_seconds_total 1.0\n") as url:
        assert main(["top", url]) == 2
    assert main(["top", "http://"]) == 2
    assert main(["top"]) == 2
    assert main(["top", str(tmp_path)]) == 2
    assert "plan.json" in capsys.readouterr().err.splitlines()[-3]


@pytest.mark.parametrize("serves", ["the run's plan", "another plan", "no plan"])
def test_a_run_whose_address_another_plan_serves_by_now_is_refused(
    serves: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    plan = made_plan(tiny_moe(), cpu_machine(), port=port)
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    info = 'moe_optimizer_build_info{{{{model_name="chat",plan="{}"}}}} 1.0\n'
    added = {"the run's plan": info.format(plan.digest), "another plan": info.format("0123"), "no plan": ""}
    with serving(PAGE + added[serves], port=port):
        code = main(["top", str(tmp_path), "--interval", "0.05"])
    assert code == (2 if serves == "another plan" else 0)
    assert ("0123" in capsys.readouterr().err) == (code == 2)


def test_a_server_that_does_not_answer_is_a_failed_server() -> None:
    assert main(["top", f"http://127.0.0.1:{free_port()}"]) == 7


def shown(count: int) -> LiveActivity:
    now = Activity(
        model="organisation/a-model-with-a-long-name-30b-a3b-instruct", seconds=1.0, running=256, waiting=12_345,
        finished=99, prompt_tokens_per_s=1_234_567.0, output_tokens_per_s=43_210.0,
        ttft=Times(median_ms=152.3, p99_ms=43_000.1), tpot=Times(median_ms=None, p99_ms=None), cache_share=1.0,
        prefix_hit_share=0.5, drafts_per_step=3.0, accepted_per_step=1.25, preemptions=3,
        passes={f"pass_{number}": "not_applied" for number in range(12)},
        kernels={f"{number}+ tokens, bf16": "grouped-bf16-n64" for number in (1, 5, 257)},
        compiled_after_ready=0, worst_layer=60, worst_imbalance=12.5,
    )  # fmt: skip
    return LiveActivity(
        servers=tuple(
            ServerActivity(name=f"replica-{n} server", url=f"http://replica-{n}", activity=now) for n in range(count)
        )
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    text = rendered(shown(2), {"http://replica-0": [float(n) for n in range(500)]}, width=width)
    assert max(map(len, text.splitlines())) <= width


def test_the_curve_ends_with_the_latest_interval_and_is_highest_at_the_fastest() -> None:
    text = rendered(shown(1), {"http://replica-0": [20.0, 50.0, 100.0, 0.0, 100.0]}, width=80)
    name, curve = text.splitlines()[-1].split(maxsplit=1)
    assert name == "tokens/s"
    assert curve[2] == curve[4] == max(curve)
    assert curve[3] == min(curve)
    assert len(curve) == 5

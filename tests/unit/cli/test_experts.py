"""`experts`: where the counts come from, the heatmap, the picture."""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import re
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_optimizer.cli import expert_metrics
from moe_optimizer.cli.expert_metrics import parse_metrics
from moe_optimizer.cli.heatmap import cell_loads, render_load
from moe_optimizer.cli.heatmap_png import colours
from moe_optimizer.cli.main import main
from moe_optimizer.costs.expert_imbalance import load_report
from moe_optimizer.errors import InputError
from moe_optimizer.specs.expert_load import PARTS_DIR, ExpertLoad, LayerLoad

SINCE = "2026-11-20T10:00:00+00:00"


def load_of(*layers: tuple[int, ...], model: str = "org/model") -> ExpertLoad:
    return ExpertLoad(
        model=model,
        num_experts=len(layers[0]),
        layers=tuple(
            LayerLoad(index=index, name=f"model.layers.{index}.mlp.experts", tokens=tokens)
            for index, tokens in enumerate(layers)
        ),
        since=SINCE,
        steps=12,
    )


UNEVEN = load_of((8, 0, 1, 3), (2, 2, 2, 2))


def rendered(load: ExpertLoad, *, width: int = 80, top: int = 3, unicode: bool = True) -> str:
    return render_load(load, load_report(load), width=width, top=top, unicode=unicode)


def rows(text: str) -> list[str]:
    """The heatmap's rows: between its heading and its legend."""
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("layer "))
    last = next(number for number, line in enumerate(lines) if line.startswith("times the mean"))
    return lines[first + 1 : last]


def test_a_run_folder_a_merged_file_and_a_file_are_read(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / PARTS_DIR).mkdir()
    for name in (f"{PARTS_DIR}/0.json", "expert_load.json"):
        (tmp_path / name).write_text(UNEVEN.to_json())
    outputs = []
    for source in (tmp_path, tmp_path / "expert_load.json"):
        assert main(["experts", str(source)]) == 0
        outputs.append(capsys.readouterr().out)
    (tmp_path / PARTS_DIR / "0.json").unlink()
    (tmp_path / PARTS_DIR).rmdir()
    assert main(["experts", str(tmp_path)]) == 0
    outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] == outputs[2]
    assert re.findall(r"\d+", outputs[0])[:2] == ["2", "4"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "SOURCE: is missing"),
        (["nowhere"], "nowhere"),
        (["."], "no expert load"),
        (["http://"], "not a URL"),
        (["http://[::1"], "not a URL"),
        (["http://a:b"], "not a URL"),
        (["nowhere", "--top", "x"], "--top: got 'x'"),
    ],
)
def test_a_wrong_source_is_bad_input(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["experts", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error


def test_json_has_the_counts_and_their_figures(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "load.json").write_text(UNEVEN.to_json())
    assert main(["experts", str(tmp_path / "load.json"), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["load"] == json.loads(UNEVEN.to_json())
    assert printed["report"]["layers"][0]["figures"]["max_over_mean"] == pytest.approx(8 / 3)


def test_darker_is_busier() -> None:
    first, second = rows(rendered(UNEVEN))
    assert first[7:23] == "████" + "    " + "░░░░" + "▒▒▒▒"
    assert first.endswith("2.7 x")
    assert second[7:23] == "▒" * 16


def test_without_blocks_ascii_says_the_same() -> None:
    first, _ = rows(rendered(UNEVEN, unicode=False))
    assert first[7:23] == "####" + "    " + "...." + "----"
    assert rendered(UNEVEN, unicode=False).isascii()


@pytest.mark.parametrize("experts", [1, 2, 8, 60, 64, 66, 67, 128, 160, 256, 1024])
@pytest.mark.parametrize("width", [72, 80, 200])
def test_every_width_holds_every_number_of_experts(experts: int, width: int) -> None:
    text = rendered(load_of(tuple(range(1, experts + 1)), (10**9,) * experts), width=width)
    assert max(map(len, text.splitlines())) <= width


def test_a_busy_expert_stays_visible_among_quiet_neighbours() -> None:
    tokens = [1] * 256
    tokens[130] = 1000
    (layer,) = load_of(tuple(tokens)).layers
    cells = cell_loads(layer, 4)
    assert len(cells) == 64
    assert max(cells) == cells[130 // 4] > 100


def test_the_busiest_experts_are_named_in_order() -> None:
    text = rendered(UNEVEN, top=2)
    numbers = [re.findall(r"[\d.]+", line) for line in text.splitlines()[-2:]]
    assert numbers == [["0", "0", "2.67", "8"], ["0", "3", "1.00", "3"]]
    assert "busiest experts" not in rendered(UNEVEN, top=0)


def test_a_load_without_tokens_says_so() -> None:
    assert "no token" in rendered(load_of((0, 0))).splitlines()[-1]


def test_a_model_name_cannot_write_control_characters() -> None:
    assert "\x1b" not in rendered(load_of((1, 2), model="a\x1b[31mb"))


def colour(times_mean: float) -> tuple[int, ...]:
    return tuple(int(channel) for channel in colours(np.array([times_mean]))[0])


def size_of(picture: Path) -> tuple[int, int]:
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def test_the_picture_has_a_colour_for_every_expert(tmp_path: Path, capsys: Any) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "load.json").write_text(UNEVEN.to_json())
    target = tmp_path / "load.png"
    assert main(["experts", str(tmp_path / "load.json"), "--png", str(target)]) == 0
    assert f" {target}" in capsys.readouterr().err
    assert size_of(target)[0] > 200
    with image.open(target) as picture:
        seen = {color for _, color in picture.convert("RGB").getcolors(1 << 20)}
    assert {colour(8 / 3), colour(0.0), colour(1 / 3), colour(1.0)} <= seen
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".tmp")] == []


@pytest.mark.parametrize("layers", [1, 61, 200])
@pytest.mark.parametrize("experts", [1, 256, 1024])
def test_pictures_of_any_size(layers: int, experts: int, tmp_path: Path) -> None:
    pytest.importorskip("PIL.Image")
    from moe_optimizer.cli.heatmap_png import write_heatmap

    write_heatmap(load_of(*[tuple(range(experts + 1))[1:]] * layers), tmp_path / "x.png")
    width, height = size_of(tmp_path / "x.png")
    assert width < 12_000
    assert height < 6000


def test_without_pillow_the_command_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "load.json").write_text(UNEVEN.to_json())
    for name in [each for each in sys.modules if each.partition(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    importing = builtins.__import__

    def without_pillow(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "PIL":
            raise ImportError("No module named 'PIL'")
        return importing(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without_pillow)
    assert main(["experts", str(tmp_path / "load.json"), "--png", str(tmp_path / "x.png")]) == 2
    printed = capsys.readouterr()
    assert "pip install pillow" in printed.err
    assert printed.out == ""


def test_a_picture_that_cannot_be_written_is_bad_input(tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("PIL.Image")
    (tmp_path / "load.json").write_text(UNEVEN.to_json())
    assert main(["experts", str(tmp_path / "load.json"), "--png", str(tmp_path / "none" / "x.png")]) == 2
    assert str(tmp_path / "none" / "x.png") in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_colours_go_from_blue_over_white_to_red() -> None:
    red, _, blue = colour(1 / 8)
    assert blue > red
    assert len(set(colour(1.0))) == 1
    red, _, blue = colour(8.0)
    assert red > blue
    assert colour(100.0) == colour(8.0)


PAGE = """# TYPE moe_optimizer_expert_tokens_total counter
moe_optimizer_expert_tokens_total{expert="0",layer="3",model_name="a\\"b"} 6.0
moe_optimizer_expert_tokens_total{expert="1",layer="3",model_name="a\\"b"} 1.2e+06
moe_optimizer_expert_load_steps_total{model_name="a\\"b"} 20.0
moe_optimizer_expert_load_since_timestamp_seconds{model_name="a\\"b"} 1.7952e+09
moe_optimizer_expert_load_max_over_mean_ratio{layer="3",model_name="a\\"b",name="layers.3"} 1.5
vllm:something{a="b"} 1.0
"""


def test_a_page_of_metrics_is_an_expert_load() -> None:
    load = parse_metrics(PAGE, origin="page")
    assert (load.model, load.num_experts, load.steps) == ('a"b', 2, 20)
    assert load.layers == (LayerLoad(index=3, name="layers.3", tokens=(6, 1_200_000)),)
    assert load.since == "2026-11-20T18:40:00+00:00"


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("vllm:x 1.0\n", "no expert load"),
        (PAGE.replace('expert="0"', 'expert="2"'), "are not 0 to 2"),
        (PAGE.replace('expert="0",', ""), "KeyError"),
        (PAGE.replace(" 6.0", " six"), "ValueError"),
        (PAGE.replace(" 6.0", " NaN"), "ValueError"),
    ],
)
def test_a_page_without_the_whole_load_is_refused(page: str, said: str) -> None:
    with pytest.raises(InputError, match=r"^page: ") as caught:
        parse_metrics(page, origin="page")
    assert said in str(caught.value)


@pytest.fixture
def server() -> Iterator[str]:
    """Answers PAGE on /metrics and 404 elsewhere; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(PAGE.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
            pass

    running = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/metrics"])
def test_a_server_is_asked_for_its_metrics(server: str, suffix: str, capsys: Any) -> None:
    assert main(["experts", server + suffix]) == 0
    assert "2 experts, 20 steps" in capsys.readouterr().out


def test_an_address_that_is_no_server_of_ours(server: str, capsys: Any) -> None:
    assert main(["experts", f"{server}/v1"]) == 2
    assert "status 404" in capsys.readouterr().err


def test_a_server_that_does_not_answer_is_exit_7(capsys: Any) -> None:
    assert main(["experts", "http://127.0.0.1:1"]) == 7
    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\n\r\n"], ids=["in the headers", "in the page"])
def test_a_server_that_sends_a_byte_at_a_time_is_given_up(
    sent: bytes, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(expert_metrics, "TIMEOUT_S", 0.5)
    enough = threading.Event()

    def trickle(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(sent)
            while not enough.wait(0.1):
                connection.sendall(b"H")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=trickle, args=(listener,))
        thread.start()
        try:
            assert main(["experts", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 7
        finally:
            enough.set()
            thread.join()
    assert "within 0.5 s" in capsys.readouterr().err


def test_a_terminal_that_lacks_blocks_gets_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "load.json").write_text(UNEVEN.to_json())
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["experts", str(tmp_path / "load.json")]) == 0
    stdout.flush()
    assert b"\\u25" not in stdout.buffer.getvalue()

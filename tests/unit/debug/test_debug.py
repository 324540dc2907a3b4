"""`debug`: nothing differs where nothing does, and what was changed is what is named."""

from __future__ import annotations

import io
import json
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from email.message import Message
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_optimizer.debug.compare import CompareReport, Finding, compare
from moe_optimizer.debug.generations import generations
from moe_optimizer.debug.oracle import oracle
from moe_optimizer.debug.steps import Comparison
from moe_optimizer.engine import LLMEngine, llm_engine, model_runner
from moe_optimizer.engine.block_manager import BlockManager
from moe_optimizer.engine.engine_args import EngineArgs
from moe_optimizer.engine.sampled_tokens import SampledTokens
from moe_optimizer.engine.sampler import TorchSampler
from moe_optimizer.errors import InputError
from tests.engine.tiny_models import SHAPES, TINY_MOE, write_model
from tests.needed import skip_without

skip_without("transformers")


@pytest.fixture(scope="module")
def make_comparison(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Comparison]:
    def make(name: str) -> Comparison:
        folder = write_model(tmp_path_factory.mktemp(name), name)
        args = EngineArgs(
            model=str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True, num_gpu_blocks_override=16
        )
        return Comparison(LLMEngine(args), list(range(1, 40)))

    return make


@pytest.mark.parametrize("name", SHAPES)
def test_every_operation_of_every_family_is_that_of_transformers(name: str, make_comparison: Any) -> None:
    steps = list(make_comparison(name).steps())
    assert [step for step in steps if not step.same] == []
    named = {"embeddings", "layer 1: Q projection", "layer 1: causal mask", "layer 0: head 1", "logits"}
    assert named | {"layer 0: hidden state", "layer 1: hidden state"} <= {step.name for step in steps}


@pytest.mark.parametrize(
    ("name", "parameter", "expected"),
    [
        ("qwen3_moe", "model.embed_tokens.weight", "embeddings"),
        ("qwen3_moe", "model.layers.1.self_attn.k_norm.weight", "layer 1: K norm"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight", "layer 1: router"),
        ("qwen3_moe", "model.layers.0.mlp.experts.w2", "layer 0: experts"),
        ("qwen3", "model.layers.0.mlp.down_proj.weight", "layer 0: MLP"),
        ("qwen3", "lm_head.weight", "logits"),
    ],
)
def test_a_changed_weight_is_named_by_its_operation(
    name: str, parameter: str, expected: str, make_comparison: Any
) -> None:
    comparison = make_comparison(name)
    comparison.ours.get_parameter(parameter).add_(0.01)
    assert next(step for step in comparison.steps() if not step.same).name == expected


def test_a_layer_whose_operations_are_right_and_add_up_wrongly_is_named(make_comparison: Any) -> None:
    comparison = make_comparison("qwen3_moe")
    layer = comparison.ours.model.layers[1]
    forward = layer.forward
    layer.forward = lambda x, residual, *more: forward(x, 0.99 * residual, *more)
    assert next(step for step in comparison.steps() if not step.same).name == "layer 1: hidden state"


def test_a_value_that_is_no_number_differs(make_comparison: Any) -> None:
    comparison = make_comparison("qwen3")
    comparison.ours.model.norm.weight.data[0] = float("nan")
    assert next(step for step in comparison.steps() if not step.same).name == "final norm"


def test_a_layer_that_there_is_not_is_refused(make_comparison: Any) -> None:
    with pytest.raises(InputError, match="--layer: got 2"):
        list(make_comparison("qwen3").steps(2))


def test_the_bundled_model_has_nothing_that_differs() -> None:
    report = compare(TINY_MOE, layer=0)
    assert report.first_difference is None
    assert {finding.name for finding in report.findings} >= {"tokenizer round trip", "generated tokens", "KV cache"}
    assert len(report.pattern) == 24
    assert all(weights.std > 0 for weights in report.weights if "norm" not in weights.name)
    assert {each.name.split(".")[2] for each in report.weights if ".layers." in each.name} == {"0"}


def finding(report: CompareReport, name: str) -> Finding:
    return next(each for each in report.findings if each.name == name)


def test_statistics_of_a_weight_are_those_of_its_values(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MOE, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.2.self_attn.o_proj.weight"
    values = torch.zeros_like(tensors[name])
    values[0, 0], values[0, 1] = 3, -5
    save_file({**tensors, name: values}, folder / "model.safetensors")
    weights = {each.name: each for each in compare(folder, layer=2).weights}[name]
    count = values.numel()
    mean = -2 / count
    assert weights.mean == pytest.approx(mean)
    assert weights.std == pytest.approx(((34 - count * mean**2) / (count - 1)) ** 0.5)
    assert (weights.largest, weights.zeros) == (5, pytest.approx(1 - 2 / count))


def test_the_picture_shows_what_each_token_attends_to(tmp_path: Path) -> None:
    folder = shutil.copytree(TINY_MOE, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    save_file({**tensors, name: torch.zeros_like(tensors[name])}, folder / "model.safetensors")
    # Without queries every token attends alike to itself and those before it: ten shades, from " " to "@".
    picture = compare(folder, layer=0).pattern
    assert (picture[0], picture[2], picture[8], picture[20]) == ("@", "---", "." * 9, "")


def test_a_tokenizer_with_more_tokens_than_the_model_is_found(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = shutil.copytree(TINY_MOE, tmp_path / "model")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<added {number}>" for number in range(2049 - len(tokenizer))])
    tokenizer.save_pretrained(folder)
    assert not finding(compare(folder, layer=0), "vocabulary").same


def test_a_run_that_differs_from_the_one_before_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Drifting(TorchSampler):
        """Chooses another token each time that it is asked."""

        calls = 0

        def sample(self, logits_SV: torch.Tensor, sequences: list[Any]) -> SampledTokens:
            Drifting.calls += 1
            return SampledTokens.of([Drifting.calls for _ in sequences])

    monkeypatch.setattr(model_runner, "TorchSampler", Drifting)
    report = compare(TINY_MOE, layer=0)
    assert not finding(report, "two runs").same
    assert not finding(report, "generated tokens").same


def test_the_share_of_held_slots_that_hold_a_token_is_told() -> None:
    # Blocks of 16: while one prompt token grows to 16, a block is held that is on average half full.
    text = "def"
    detail = finding(compare(TINY_MOE, layer=0, text=text), "KV cache").detail
    tokens = range(2, 17)
    assert f"{sum(tokens) / len(tokens) / 16:.0%} of the slots" in detail


def test_a_block_that_is_not_given_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Leaking(BlockManager):
        def free(self, sequence: Any) -> None:
            if sequence.group.request_id == "watched":
                self.held = sequence.block_table.block_ids
                sequence.block_table.block_ids = type(self.held)("i")
            super().free(sequence)

        def check_integrity(self, sequences: Any) -> None:
            pass

    monkeypatch.setattr(llm_engine, "BlockManager", Leaking)
    assert not finding(compare(TINY_MOE, layer=0), "KV cache").same


def test_changed_outputs_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "outputs.json"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert generations(TINY_MOE, save=Path("~") / file.name, against=None, max_tokens=6).changed == ()
    assert generations(TINY_MOE, save=None, against=file, max_tokens=6).changed == ()
    kept = json.loads(file.read_text())
    name = sorted(kept)[0]
    kept[name][3] += 1
    file.write_text(json.dumps(kept))
    (changed,) = generations(TINY_MOE, save=None, against=file, max_tokens=6).changed
    assert changed.startswith(f"{name}: token 3")


@pytest.mark.parametrize("text", ["no json", "[1]", '{"greedy": 5}', '{"greedy": ["a"]}'])
def test_a_file_that_holds_no_outputs_is_refused_before_anything_is_generated(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_optimizer.debug.generations.LLM", None)
    file = tmp_path / "outputs.json"
    file.write_text(text)
    with pytest.raises(InputError, match=file.name):
        generations(TINY_MOE, save=None, against=file)


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does, with what transformers computes; one reported log-probability may be wrong."""

    model: Any = None
    wrong: tuple[int, float] | None = None
    """Place, and what is added."""

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "served"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        token_ids, tokens, logprobs = list(body["prompt"]), [], []
        for _ in range(4):
            with torch.inference_mode():
                row = self.model(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
            token_ids.append(int(row.argmax()))
            tokens.append(f"token_id:{token_ids[-1]}")
            logprobs.append(float(row.max()))
        if self.wrong is not None:
            logprobs[self.wrong[0]] += self.wrong[1]
        self._answer({"choices": [{"logprobs": {"tokens": tokens, "token_logprobs": logprobs}}]})

    def _answer(self, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def server_url() -> Iterator[str]:
    from transformers import AutoModelForCausalLM

    Server.model, Server.wrong = AutoModelForCausalLM.from_pretrained(TINY_MOE, dtype=torch.float32).eval(), None
    with HTTPServer(("127.0.0.1", 0), Server) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_is_right_is_within_rounding(server_url: str) -> None:
    report = oracle(server_url, TINY_MOE)
    assert report.same
    assert report.tokens == 16
    assert report.largest_difference < 1e-4


def test_the_first_wrong_token_of_a_server_is_named(server_url: str) -> None:
    Server.wrong = (2, 0.5)
    report = oracle(server_url, TINY_MOE)
    assert not report.same
    assert report.first_difference is not None
    assert (report.first_difference.prompt, report.first_difference.place) == (0, 2)
    assert all(float(line.rpartition(" ")[2]) > 0 for line in report.layers), report.layers
    assert {line.partition(":")[0] for line in report.layers} == {"Attention", "MoE", "RMSNorm"}


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:8000", "nothing"])
def test_a_server_that_is_not_there_is_an_error_of_the_user(url: str) -> None:
    with pytest.raises(InputError, match=url):
        oracle(url, TINY_MOE)


def test_what_a_server_says_against_the_question_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        body = io.BytesIO(b'{"error": "unknown argument return_tokens"}')
        raise urllib.error.HTTPError("http://127.0.0.1:9", 400, "Bad Request", Message(), body)

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(InputError, match=r"400.*unknown argument return_tokens") as refused:
        oracle("http://127.0.0.1:9", TINY_MOE)
    assert "vLLM" in (refused.value.hint or "")


def test_the_oracle_needs_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([{"data": [{"id": "m"}]}, {"choices": [{"logprobs": {"tokens": ["the"], "token_logprobs": [0.0]}}]}])
    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: io.BytesIO(json.dumps(next(answers)).encode()))
    with pytest.raises(InputError, match="token_id:N"):
        oracle("http://127.0.0.1:9", TINY_MOE)

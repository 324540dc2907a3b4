"""Checkpoints: shards, tied embeddings, torch files behind a flag, and what is wrong with a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_optimizer.engine.engine_args import EngineArgs, EngineConfig
from moe_optimizer.engine.layers.linear import Linear, MergedLinear
from moe_optimizer.engine.model_runner import load_model
from moe_optimizer.engine.tokenizer import generation_defaults, load_tokenizer
from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.ops.few_rows import MOST_ROWS
from tests.engine.tiny_models import write_model

MANY = MOST_ROWS + 1
"""Rows that our own product of few rows leaves to torch and oneDNN."""


def parameters(folder: Path, **arguments: Any) -> dict[str, Tensor]:
    args = EngineArgs(model=str(folder), dtype="float32", skip_tokenizer_init=True, **arguments)
    return dict(load_model(EngineConfig.resolve(args)).named_parameters())


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Bounds are on what is multiplied: the same in each run, whatever a test worker has drawn before."""
    torch.manual_seed(0)


@pytest.fixture
def folder(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    """A model that the test may change."""
    return Path(shutil.copytree(tiny_model("qwen3_moe"), tmp_path / "model"))


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_shards_are_the_same_as_one_file(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    sharded = write_model(tmp_path, "qwen3_moe", shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert_equal(parameters(sharded), parameters(tiny_model("qwen3_moe")))


def test_experts_are_packed_gate_before_up(folder: Path) -> None:
    stored, ours = load_file(folder / "model.safetensors"), parameters(folder)
    prefix = "model.layers.1.mlp.experts"
    gate, up = (stored[f"{prefix}.3.{name}_proj.weight"] for name in ("gate", "up"))
    assert torch.equal(ours[f"{prefix}.w13"][3], torch.cat((gate, up)))
    assert torch.equal(ours[f"{prefix}.w2"][3], stored[f"{prefix}.3.down_proj.weight"])


def test_tied_embeddings_need_no_head(tiny_model: Callable[..., Path]) -> None:
    assert "lm_head.weight" not in parameters(tiny_model("qwen3-tied"))


def test_torch_files_are_read_only_when_asked_for(folder: Path, tiny_model: Callable[..., Path]) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="safetensors"):
        parameters(folder)
    assert_equal(parameters(folder, load_format="pt"), parameters(tiny_model("qwen3_moe")))


def test_a_torch_file_runs_no_code(folder: Path, tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"model.norm.weight": Harmful()}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=r"pytorch_model\.bin") as refused:
        parameters(folder, load_format="pt")
    # Torch's own text tells how to let it run.
    assert "Weights only" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_dummy_weights_need_no_file_and_are_the_same_each_time(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert_equal(parameters(folder, load_format="dummy"), parameters(folder, load_format="dummy"))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight"),
        (lambda tensors: tensors.pop("model.layers.0.mlp.experts.2.up_proj.weight"), r"experts\.2\.up_proj"),
        (lambda tensors: tensors.pop("model.layers.0.self_attn.k_proj.weight"), "missing.*k_proj"),
        (lambda tensors: tensors.update(surplus=torch.zeros(2)), "surplus"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}), r"\[7\]"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.experts.9.up_proj.weight": torch.zeros(32, 48)}), "9"),
    ],
    ids=["missing", "expert missing", "part missing", "surplus", "shape", "too many experts"],
)
def test_a_tensor_that_does_not_fit_is_named(folder: Path, change: Callable[[Any], Any], word: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(InputError, match=word):
        parameters(folder)


def test_a_file_that_is_cut_off_is_an_error(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(InputError, match=r"model\.safetensors"):
        parameters(folder)


def test_a_folder_without_weights_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="weights"):
        parameters(folder)


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("model_type", "gpt2", "model_type"),
        ("sliding_window", 128, "sliding_window"),
        ("hidden_act", "gelu", "hidden_act"),
        ("quantization_config", {"quant_method": "gptq"}, "quantiz"),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}, "rope_type"),
    ],
)
def test_a_model_that_would_be_computed_wrongly_is_refused(folder: Path, field: str, value: Any, word: str) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if field == "sliding_window":
        config["use_sliding_window"] = True
    path.write_text(json.dumps({**config, field: value}))
    with pytest.raises(UnsupportedError, match=word):
        parameters(folder)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"model_type": "unheard-of"}', '{"model_type": "qwen3", "num_hidden_layers": "2"}'],
)
def test_a_configuration_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        parameters(folder)


def test_a_folder_without_a_tokenizer_is_not_given_one(folder: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "generation_config.json", "tokenizer.json"])
def test_a_pipe_among_the_files_of_a_model_is_refused_at_once(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    reads = {"generation_config.json": generation_defaults, "tokenizer.json": load_tokenizer}
    with pytest.raises(InputError, match=f"{name}: is not a regular file"):
        reads.get(name, parameters)(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match=r"index\.json"):
        parameters(folder)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied"])
def test_logits_come_from_a_copy_for_onednn_where_it_multiplies_the_dtype(
    name: str, tiny_model: Callable[..., Path]
) -> None:
    for dtype in ("float32", "bfloat16"):
        args = EngineArgs(model=str(tiny_model(name)), dtype=dtype, device="cpu", skip_tokenizer_init=True)
        model = load_model(EngineConfig.resolve(args))
        has_product = dtype == "float32" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
        assert (model.head.packed is not None) == (has_product and torch.backends.mkldnn.is_available())
        hidden = torch.randn(MANY, model.config.hidden_size, dtype=model.head.weight.dtype)
        with torch.inference_mode():
            got, want = model.logits(hidden).double(), hidden.double() @ model.head.weight.double().T
        assert (got - want).abs().max() < (1e-5 if dtype == "float32" else 0.05)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_logits_are_of_the_weight_as_it_is_now(tiny_model: Callable[..., Path]) -> None:
    args = EngineArgs(model=str(tiny_model("qwen3")), dtype="float32", device="cpu", skip_tokenizer_init=True)
    model = load_model(EngineConfig.resolve(args))
    hidden = torch.randn(MANY, model.config.hidden_size)
    with torch.inference_mode():
        before = model.logits(hidden)
        model.head.weight.mul_(2.0)
        assert torch.allclose(model.logits(hidden), 2.0 * before, rtol=1e-5, atol=1e-5)


def _wide(tiny_model: Callable[..., Path], dtype: Any) -> list[Linear | MergedLinear]:
    args = EngineArgs(model=str(tiny_model("qwen3-wide")), dtype=dtype, device="cpu", skip_tokenizer_init=True)
    model = load_model(EngineConfig.resolve(args))
    return [module for module in model.modules() if isinstance(module, (Linear, MergedLinear))]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_large_matrices_are_computed_from_copies(dtype: str, tiny_model: Callable[..., Path]) -> None:
    copied = {"float32": True, "bfloat16": torch.ops.mkldnn._is_mkldnn_bf16_supported(), "float16": False}[dtype]
    for module in _wide(tiny_model, dtype):
        assert (module.packed is not None) == copied
        x = torch.randn(MANY, module.weight.shape[1]).to(module.weight.dtype)
        with torch.inference_mode():
            got, want = module.multiplied(x), torch.nn.functional.linear(x, module.weight)
        if dtype == "float32":
            assert (got - want).abs().max() <= 2e-5
            continue
        # transformers multiplies as `linear` does. Several threads may add up in another order: a sum of float32 that
        # lies between two numbers of half precision is then rounded to the other one.
        torch.testing.assert_close(got, want, rtol=2.0**-7, atol=0)
        assert (got != want).float().mean() < 1e-3


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_small_matrices_have_no_copies(tiny_model: Callable[..., Path]) -> None:
    args = EngineArgs(model=str(tiny_model("qwen3")), dtype="float32", device="cpu", skip_tokenizer_init=True)
    modules = load_model(EngineConfig.resolve(args)).modules()
    assert not [
        module for module in modules if isinstance(module, (Linear, MergedLinear)) and module.packed is not None
    ]


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
def test_copies_that_would_take_too_much_memory_are_not_made_and_it_is_said(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=1 << 20))
    assert all(module.packed is None for module in _wide(tiny_model, "float32"))
    assert "oneDNN" in caplog.text


def _other_form(*_: Any) -> Any:
    raise TypeError("expected other arguments")


@pytest.mark.parametrize("name", ["_linear_pointwise", "_reorder_linear_weight"])
@pytest.mark.parametrize("there", [None, _other_form], ids=["gone", "of another form"])
def test_a_torch_without_the_product_of_onednn_gives_the_same_logits_and_says_so(
    name: str, there: Any, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    args = EngineArgs(model=str(tiny_model("qwen3")), dtype="float32", device="cpu", skip_tokenizer_init=True)
    ops = {each: getattr(torch.ops.mkldnn, each) for each in ("_linear_pointwise", "_reorder_linear_weight")}
    ops = {each: op for each, op in (ops | {name: there}).items() if op is not None}
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(**ops))
    model = load_model(EngineConfig.resolve(args))
    hidden = torch.randn(MANY, model.config.hidden_size)
    assert model.head.packed is None
    assert ("no oneDNN product" in caplog.text) == torch.backends.mkldnn.is_available()
    with torch.inference_mode():
        assert torch.equal(model.logits(hidden), torch.nn.functional.linear(hidden, model.head.weight))


def test_a_weight_in_a_dtype_without_the_product_has_no_copy(tiny_model: Callable[..., Path]) -> None:
    args = EngineArgs(model=str(tiny_model("qwen3")), dtype="float32", device="cpu", skip_tokenizer_init=True)
    model = load_model(EngineConfig.resolve(args)).half()
    model.head.pack()
    assert model.head.packed is None

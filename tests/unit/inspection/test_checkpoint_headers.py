"""What safetensors headers add to, and check against, a configuration."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError, UnsupportedError
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.safetensors_header import read_tensors
from moe_optimizer.specs.model import ModelSpec

Inspect = Callable[..., ModelSpec]

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "vocab_size": 10,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
BYTES = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1}


def shapes() -> dict[str, tuple[int, ...]]:
    layer = "model.layers.0."
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (10, 8),
        "lm_head.weight": (10, 8),
        "model.norm.weight": (8,),
        f"{layer}input_layernorm.weight": (8,),
        f"{layer}post_attention_layernorm.weight": (8,),
        f"{layer}self_attn.q_proj.weight": (8, 8),
        f"{layer}self_attn.k_proj.weight": (4, 8),
        f"{layer}self_attn.v_proj.weight": (4, 8),
        f"{layer}self_attn.o_proj.weight": (8, 8),
        f"{layer}block_sparse_moe.gate.weight": (2, 8),
    }
    for i in range(2):
        expert = f"{layer}block_sparse_moe.experts.{i}."
        found |= {f"{expert}w1.weight": (16, 8), f"{expert}w2.weight": (8, 16), f"{expert}w3.weight": (16, 8)}
    return found


def safetensors(tensors: Mapping[str, tuple[int, ...]], **dtypes: str) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        kind = next((value for key, value in dtypes.items() if key in name), "BF16")
        start, end = end, end + math.prod(shape) * BYTES[kind]
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def test_headers_that_agree_change_nothing_and_warn_of_nothing(inspect_config: Inspect) -> None:
    without = inspect_config(CONFIG)
    spec = inspect_config(CONFIG, {"model.safetensors": safetensors(shapes())})
    assert spec.warnings == ()
    assert spec.total_params == without.total_params == sum(math.prod(shape) for shape in shapes().values())
    assert spec.weight_bytes == without.weight_bytes == 2 * spec.total_params
    assert spec.expert_weight_bytes == 2 * spec.expert_params


@pytest.mark.parametrize(
    "names",
    [
        {"block_sparse_moe.input_linear": (2, 32, 8), "block_sparse_moe.output_linear": (2, 8, 16)},
        {"mlp.input_linear": (2, 32, 8), "mlp.output_linear": (2, 8, 16)},
        {"moe.gate_proj": (2, 16, 8), "moe.up_proj": (2, 16, 8), "moe.down_proj": (2, 8, 16)},
    ],
    ids=lambda names: next(iter(names)),
)
def test_experts_stored_as_one_tensor_under_other_names_are_found(
    names: dict[str, tuple[int, ...]], inspect_config: Inspect
) -> None:
    held = {name: shape for name, shape in shapes().items() if ".experts." not in name}
    held |= {f"model.layers.0.{name}.weight": shape for name, shape in names.items()}
    spec = inspect_config(CONFIG, {"model.safetensors": safetensors(held)})
    assert (spec.warnings, spec.expert_weight_bytes) == ((), 2 * spec.expert_params)


def test_header_gives_the_stored_bytes(inspect_config: Inspect) -> None:
    spec = inspect_config(CONFIG, {"model.safetensors": safetensors(shapes(), norm="F32")})
    assert spec.weight_bytes == 2 * spec.total_params + 2 * 24


def test_parameters_that_the_configuration_does_not_explain_are_a_warning(inspect_config: Inspect) -> None:
    more = {**shapes(), "model.layers.0.extra.weight": (3,)}
    spec = inspect_config(CONFIG, {"model.safetensors": safetensors(more)})
    assert spec.total_params == inspect_config(CONFIG).total_params + 3
    assert any("weight files hold" in warning for warning in spec.warnings)


def test_towers_count_but_do_not_disagree(inspect_config: Inspect) -> None:
    more = {**shapes(), "vision_tower.layers.9.fc.weight": (100,)}
    spec = inspect_config(CONFIG, {"model.safetensors": safetensors(more)})
    assert spec.total_params == inspect_config(CONFIG).total_params + 100
    assert spec.warnings == ()


def test_prediction_layers_and_stored_buffers_do_not_count(inspect_config: Inspect) -> None:
    more = {
        **shapes(),
        "model.layers.1.eh_proj.weight": (100,),
        "mtp.fc.weight": (50,),
        "model.layers.0.self_attn.rotary_emb.inv_freq": (4,),
    }
    spec = inspect_config(CONFIG, {"model.safetensors": safetensors(more)})
    assert spec.total_params == inspect_config(CONFIG).total_params
    assert spec.warnings == ()
    # What drafts is noted apart, also where the configuration does not speak of it.
    assert (spec.mtp_layers, spec.mtp_weight_bytes) == (1, 150 * 2)


def test_a_checkpoint_without_its_prediction_layers_is_noted(inspect_config: Inspect) -> None:
    config = {**CONFIG, "num_nextn_predict_layers": 1}
    spec = inspect_config(config, {"model.safetensors": safetensors(shapes())})
    assert (spec.mtp_layers, spec.mtp_weight_bytes) == (1, 0)


def test_packed_weights_do_not_confuse_the_count(inspect_config: Inspect) -> None:
    packed = {
        name.replace(".weight", ".qweight") if ".experts." in name else name: (shape[0], shape[1] // 8)
        if ".experts." in name
        else shape
        for name, shape in shapes().items()
    }
    config = {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 8}}
    spec = inspect_config(config, {"model.safetensors": safetensors(packed, qweight="I32")})
    assert spec.total_params == inspect_config(CONFIG).total_params
    assert spec.expert_weight_bytes == spec.expert_params // 2


def test_fp8_scales_do_not_count_as_parameters(inspect_config: Inspect) -> None:
    scaled = {**shapes(), "model.layers.0.self_attn.q_proj.weight_scale_inv": (1, 1)}
    config = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    spec = inspect_config(config, {"model.safetensors": safetensors(scaled, proj="F8_E4M3", experts="F8_E4M3")})
    assert spec.total_params == inspect_config(CONFIG).total_params
    assert spec.warnings == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_local_experts": 4}, "4 experts, .* 2"),
        ({"intermediate_size": 32}, r"\[32, 8\]"),
        ({"num_local_experts": 1}, "has no experts"),
    ],
)
def test_contradicting_experts_are_an_error(changes: dict[str, Any], words: str, inspect_config: Inspect) -> None:
    with pytest.raises(InputError) as error:
        inspect_config({**CONFIG, **changes}, {"model.safetensors": safetensors(shapes())})
    assert re.search(words, str(error.value))


def test_fused_experts_are_checked_by_their_number(inspect_config: Inspect) -> None:
    fused = {name: shape for name, shape in shapes().items() if ".experts." not in name}
    fused |= {"model.layers.0.mlp.experts.gate_up_proj": (3, 32, 8), "model.layers.0.mlp.experts.down_proj": (3, 8, 16)}
    with pytest.raises(InputError, match="experts: got 3, expected 2"):
        inspect_config(CONFIG, {"model.safetensors": safetensors(fused)})


def test_shards_are_read_through_the_index(inspect_config: Inspect) -> None:
    names = list(shapes())
    halves = [{name: shapes()[name] for name in part} for part in (names[:7], names[7:])]
    files: dict[str, Any] = {f"model-{i}.safetensors": safetensors(half) for i, half in enumerate(halves)}
    files["consolidated.safetensors"] = safetensors(shapes())
    weight_map = {name: f"model-{i}.safetensors" for i, half in enumerate(halves) for name in half}
    files["model.safetensors.index.json"] = {"weight_map": weight_map}
    assert inspect_config(CONFIG, files).weight_bytes == inspect_config(CONFIG).weight_bytes


def test_missing_shard_leaves_the_configuration_to_count(inspect_config: Inspect) -> None:
    files = {"model.safetensors.index.json": {"weight_map": {"a": "model-0.safetensors"}}}
    assert inspect_config(CONFIG, files).total_params == inspect_config(CONFIG).total_params


def test_shards_without_an_index_count_only_when_all_are_there(inspect_config: Inspect) -> None:
    names = sorted(shapes())
    halves = [{name: shapes()[name] for name in part} for part in (names[:7], names[7:])]
    first, second = ({f"model-0000{i}-of-00002.safetensors": safetensors(half)} for i, half in enumerate(halves, 1))
    assert inspect_config(CONFIG, first) == inspect_config(CONFIG)
    assert inspect_config(CONFIG, first | second).warnings == ()


def test_weights_that_stop_short_of_a_known_family_leave_the_configuration_to_count(inspect_config: Inspect) -> None:
    part = {name: shape for name, shape in shapes().items() if "norm" not in name}
    spec = inspect_config(CONFIG, {"model.safetensors": safetensors(part)})
    assert spec.total_params == inspect_config(CONFIG).total_params
    assert "incomplete" in " ".join(spec.warnings)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "pickle.bin", 7])
def test_index_cannot_name_files_elsewhere(name: Any, inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match="weight_map"):
        inspect_config(CONFIG, {"model.safetensors.index.json": {"weight_map": {"a": name}}})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"short",
        (10**12).to_bytes(8, "little"),
        (100).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[{}]",
        (2).to_bytes(8, "little") + b"{{",
        safetensors(shapes())[:-1],
        (50_000).to_bytes(8, "little") + b"[" * 50_000,
    ],
)
def test_a_broken_header_is_refused_by_its_file(data: bytes, inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors"):
        inspect_config(CONFIG, {"model.safetensors": data})


def test_bytes_that_do_not_fit_dtype_and_shape_are_refused(inspect_config: Inspect) -> None:
    data = safetensors({"a": (4, 4)})
    with pytest.raises(InputError, match="needs 64 bytes"):
        inspect_config(CONFIG, {"model.safetensors": data.replace(b'"BF16"', b'"F32" ')})


def test_a_checkpoint_in_gguf_alone_is_called_one(tmp_path: Path) -> None:
    for name in ("model-Q4_K_M.gguf", "training_args.bin"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(UnsupportedError, match=r"^model-Q4_K_M\.gguf: GGUF .*safetensors$"):
        read_tensors(tmp_path)


def test_a_folder_without_weights_has_no_tensors(tmp_path: Path) -> None:
    assert read_tensors(tmp_path) is None


def test_bundled_model_agrees_with_its_weights() -> None:
    folder = Path(__file__).parents[3] / "examples" / "tiny-moe"
    if not (folder / "model.safetensors").is_file():
        pytest.skip("examples/tiny-moe has no weights here")
    spec = ModelInspector().inspect(folder)
    assert spec.is_moe
    assert spec.warnings == ()
    assert spec.weight_bytes == 2 * spec.total_params


@pytest.mark.parametrize("cut", [1, 7, 300])
def test_a_file_that_is_cut_off_a_little_is_refused(cut: int, inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match=r"model\.safetensors: tensor.* ends "):
        inspect_config(CONFIG, {"model.safetensors": safetensors(shapes())[:-cut]})


def layout(*ranges: tuple[int, int], size: int) -> bytes:
    header = {
        f"t{i}": {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}
        for i, (start, end) in enumerate(ranges)
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(size)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (layout((0, 4), (0, 4), size=4), "byte 0 .* 4"),
        (layout((0, 4), (2, 6), size=6), "byte 2 .* 4"),
        (layout((0, 4), (8, 12), size=12), "byte 8 .* 4"),
        (layout((0, 4), size=5), "end .*byte 4 .* 5"),
        (layout(size=1), "end .*byte 0 .* 1"),
    ],
    ids=["same bytes", "overlap", "hole", "rest", "only a rest"],
)
def test_a_layout_that_no_loader_takes_is_refused(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(InputError, match=words):
        read_tensors(tmp_path)


def test_tensors_need_not_be_listed_in_the_order_of_their_bytes(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(layout((4, 8), (0, 4), (8, 8), size=8))
    assert [tensor.num_bytes for tensor in read_tensors(tmp_path) or ()] == [4, 4, 0]


def test_a_shape_of_thousands_of_dimensions_is_refused(tmp_path: Path) -> None:
    header = {"t": {"dtype": "BF16", "shape": [1 << 60] * 5000, "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(InputError, match="got 5000 dimensions"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(("dimensions", "words"), [(16, ""), (17, "17 dimensions, .* 16")])
def test_the_limit_of_dimensions_is_exact(dimensions: int, words: str, tmp_path: Path) -> None:
    header = {"t": {"dtype": "BF16", "shape": [1] * dimensions, "data_offsets": [0, 2]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(2))
    if words:
        with pytest.raises(InputError, match=words):
            read_tensors(tmp_path)
    else:
        assert [tensor.shape for tensor in read_tensors(tmp_path) or ()] == [(1,) * dimensions]


def test_a_type_that_the_format_does_not_have_is_refused(tmp_path: Path) -> None:
    header = {"t": {"dtype": "I3", "shape": [8], "data_offsets": [0, 3]}}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(3))
    with pytest.raises(InputError, match=r"'t': dtype:.*'I3',.*BOOL"):
        read_tensors(tmp_path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_no_file_is_not_waited_for(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.safetensors:.*(regular file|cannot)"):
        read_tensors(tmp_path)


def test_a_git_lfs_pointer_is_called_one(inspect_config: Inspect) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 42\n"
    with pytest.raises(InputError, match="git-lfs pointer") as error:
        inspect_config(CONFIG, {"model.safetensors": pointer})
    assert "git lfs pull" in str(error.value.hint)

"""A broken model folder, or one that would run code, ends in one sentence, quickly and in little memory."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import ExitCode, InputError, UnsupportedError
from moe_optimizer.inspection import model_inspector
from moe_optimizer.inspection.json_file import MAX_CONFIG_BYTES
from moe_optimizer.inspection.model_inspector import ModelInspector
from moe_optimizer.inspection.servable import ConfigurationClasses
from moe_optimizer.specs.model import ModelSpec
from tests.unit.inspection.one_sentence import message

Inspect = Callable[..., ModelSpec]
Load = Callable[[str], dict[str, Any]]
Folder = Callable[..., Path]


# --- the file ---


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"  \n ", "empty"),
        (b'{"model_type": "mix', "not valid JSON"),
        (b"[1, 2, 3]", "an array"),
        (b'"text"', "a string"),
        (b"null", "null"),
        (b"\x80\x04\x95pickle\xff\xfe", "not UTF-8"),
        (b"\x00\x01\x02\x03", "not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"{'single': 1}", "not valid JSON"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_with_what_it_is(
    content: bytes, words: str, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError) as error:
        inspect_config(content)
    assert message(error).startswith("config.json:")
    assert words in message(error)


def test_bytes_that_are_no_text_are_called_so_however_many_brackets_they_have(inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match=r"byte 1 .*UTF-8"):
        inspect_config(b"[\xff" * 500)


@pytest.mark.parametrize("bracket", [b"[", b'{"a":', b"[" * 3 + b"]" * 2])
def test_deep_nesting_is_refused_before_it_is_parsed(bracket: bytes, inspect_config: Inspect) -> None:
    with pytest.raises(InputError, match="nested more than"):
        inspect_config(bracket * (MAX_CONFIG_BYTES // len(bracket) - 1))


def test_brackets_inside_strings_are_not_nesting(load_config: Load, inspect_config: Inspect) -> None:
    config = {**load_config("mixtral"), "note": '[[{{"\\' * 100}
    assert inspect_config(config).num_experts == 8


def test_a_hundred_megabytes_are_refused_unread(model_folder: Folder) -> None:
    folder = model_folder(b"{}")
    with (folder / "config.json").open("wb") as stream:
        stream.truncate(100 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match="expected at most"):
        ModelInspector().inspect(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000, "KiB"


def test_largest_accepted_file_of_small_values_is_read(load_config: Load, inspect_config: Inspect) -> None:
    text = json.dumps(load_config("mixtral"))[:-1] + ', "x": [' + "{}," * (1 << 20) + "0]}"
    assert inspect_config(text).num_experts == 8


def test_a_pipe_in_place_of_the_configuration_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match="regular file"):
        ModelInspector().inspect(tmp_path)


def test_a_device_in_place_of_the_configuration_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="regular file"):
        ModelInspector().inspect(tmp_path)


def test_a_folder_in_place_of_the_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match=r"config\.json"):
        ModelInspector().inspect(tmp_path)


# --- the folder ---


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        ModelInspector().inspect(tmp_path / "nowhere")


def test_a_folder_without_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json: is missing"):
        ModelInspector().inspect(tmp_path)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="is a file"):
        ModelInspector().inspect(tmp_path / "model.safetensors")


def test_a_loop_of_links_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(InputError, match="loop"):
        ModelInspector().inspect(tmp_path / "loop")
    (tmp_path / "config.json").symlink_to(tmp_path / "config.json")
    with pytest.raises(InputError, match=r"config\.json: cannot be "):
        ModelInspector().inspect(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_refused(model_folder: Folder) -> None:
    folder = model_folder(b"{}")
    (folder / "config.json").chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        ModelInspector().inspect(folder)
    folder.chmod(0)
    try:
        with pytest.raises(InputError, match="Permission denied"):
            ModelInspector().inspect(folder)
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize("name", ["", "   ", "a\0b", "x" * 5000, "/" + "y" * 5000, "~no-such-user/model"])
def test_a_name_that_can_be_neither_folder_nor_hub_id_is_refused(name: str) -> None:
    with pytest.raises(InputError):
        ModelInspector().inspect(name)


def test_terminal_escapes_in_names_and_values_are_written_out(tmp_path: Path, inspect_config: Inspect) -> None:
    with pytest.raises(InputError) as error:
        ModelInspector().inspect(tmp_path / "a\x1b[31mred\x07")
    assert "\\x1b[31m" in message(error)
    with pytest.raises(InputError) as error:
        inspect_config({"architectures": ["LlamaForCausalLM"], "hidden_size": "\x1b]0;title\x07"})
    message(error)


def test_a_folder_with_gguf_weights_is_refused_by_their_name(tmp_path: Path) -> None:
    (tmp_path / "model-Q4_K.gguf").touch()
    with pytest.raises(InputError, match=r"GGUF|gguf"):
        ModelInspector().inspect(tmp_path)


# --- what would run code ---


def test_weights_in_pickle_only_are_refused(load_config: Load, inspect_config: Inspect) -> None:
    with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: pickled weights") as error:
        inspect_config(load_config("mixtral"), {"pytorch_model.bin": b"\x80\x04."})
    assert error.value.exit_code is ExitCode.UNSUPPORTED


def test_trainers_leftovers_are_not_weights(load_config: Load, inspect_config: Inspect) -> None:
    assert inspect_config(load_config("mixtral"), {"training_args.bin": b"\x80\x04."}).is_moe


AUTO_MAP = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"}


def test_code_of_the_models_own_needs_trust(load_config: Load, model_folder: Folder) -> None:
    config = {
        **load_config("mixtral"),
        "model_type": "evil",
        "architectures": ["EvilForCausalLM"],
        "auto_map": AUTO_MAP,
    }
    folder = model_folder(config, {"modeling_evil.py": b"raise SystemExit('ran')"})
    with pytest.raises(UnsupportedError) as error:
        ModelInspector().inspect(folder)
    assert "EvilForCausalLM" in message(error)
    assert "--trust-remote-code" in str(error.value.hint)
    assert ModelInspector(trust_remote_code=True).inspect(folder).needs_remote_code


@pytest.mark.parametrize(
    ("classes", "needed"),
    [
        (ConfigurationClasses(frozenset({"bailing_moe"}), frozenset()), False),
        (ConfigurationClasses(frozenset({"mixtral"}), frozenset()), True),
        (None, False),
    ],
    ids=["a built-in configuration", "none", "not known"],
)
def test_own_code_is_needed_where_only_it_reads_the_configuration(
    classes: ConfigurationClasses | None,
    needed: bool,
    load_config: Load,
    inspect_config: Inspect,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_inspector, "configuration_classes", lambda: classes)
    config = load_config("bailing_moe")
    assert "AutoConfig" in config["auto_map"]
    spec = inspect_config(config, {"modeling_bailing_moe.py": b"raise SystemExit('ran')"})
    assert spec.needs_remote_code is needed
    assert spec.num_experts == config["num_experts"]


def test_a_class_without_its_configuration_is_not_needed(load_config: Load, inspect_config: Inspect) -> None:
    config = load_config("bailing_moe") | {"auto_map": {"AutoModelForCausalLM": "modeling_bailing_moe.Own"}}
    assert not inspect_config(config).needs_remote_code


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 42\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "hf_quant_config.json"])
def test_a_git_lfs_pointer_in_place_of_json_is_called_one(
    name: str, load_config: Load, inspect_config: Inspect
) -> None:
    with pytest.raises(InputError, match=f"{name}: .*git-lfs") as error:
        inspect_config(load_config("qwen3_moe"), {name: POINTER})
    assert "git lfs pull" in (error.value.hint or "")


def test_a_folder_in_mistrals_own_format_is_called_one(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    (tmp_path / "consolidated.safetensors").write_text("")
    with pytest.raises(InputError, match=r"params\.json"):
        ModelInspector().inspect(tmp_path)

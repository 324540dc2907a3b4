"""Bad input: a sentence and an exit code, whatever the input; nothing left behind.

Each case runs the real command as a user would, to serve (not as a dry run), in a process of its own, within 1 GiB
of address space and 60 s of processor time. One of each kind starts Python for it (`fresh`), the others are forks.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"
BAD_INPUT, UNSUPPORTED = 2, 3


def make_model(folder: Path, change: Callable[[dict[str, Any]], None] | None = None, raw: bytes | None = None) -> Path:
    """A copy of the tiny model whose config.json is changed, or replaced by `raw`."""
    model = folder / "model"
    shutil.copytree(TINY_MOE, model)
    if raw is not None:
        (model / "config.json").write_bytes(raw)
    if change is not None:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        change(config)
        (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return model


def setting(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(values)


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.pop(key) and None


def nested(levels: int) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for _ in range(levels):
        config = {"text_config": config}
    return config


def refused(
    run_command: Any, folder: Path, arguments: list[str], *words: str, codes: tuple[int, ...], **more: Any
) -> Any:
    """Run the command and hold it to the contract of every refusal; return what it printed."""
    run_dir = folder / "run"
    before = sorted(folder.rglob("*"))
    finished = run_command(["--run-dir", str(run_dir), *arguments], cwd=folder, **more)
    assert finished.code in codes, finished
    assert finished.stdout == ""
    assert finished.first_line.startswith("error: ")
    assert all(word in finished.first_line for word in words), f"{finished.first_line!r} lacks one of {words}"
    assert "internal error" not in finished.first_line
    assert "Traceback" not in finished.stderr
    assert len(finished.hints) <= 1
    rest = [line for line in finished.stderr.splitlines()[1:] if line and not line.startswith(("hint: ", "warning: "))]
    assert rest == [], f"more than one line, warnings and a hint: {finished.stderr!r}"
    assert finished.left_running == ()
    assert sorted(folder.rglob("*")) == before, "something was left behind"
    return finished


TRUNCATED = (TINY_MOE / "config.json").read_bytes()[:200]

BAD_CONFIGS: dict[str, tuple[bytes | Callable[[dict[str, Any]], None], tuple[str, ...]]] = {
    "truncated": (TRUNCATED, ("config.json",)),
    "empty": (b"", ("config.json", "empty")),
    "only spaces": (b"  \n ", ("config.json", "empty")),
    "an array": (b"[1, 2]", ("config.json", "array")),
    "a number": (b"7", ("config.json", "number")),
    "binary": (bytes(range(256)) * 64, ("config.json",)),
    "not UTF-8": (b'{"model_type": "\xff\xfe"}', ("config.json", "UTF-8")),
    "deep nesting in a small file": (b"[" * 500_000, ("config.json", "nested")),
    "deep objects in a small file": (b'{"text_config":' * 100_000, ("config.json", "nested")),
    "an integer of a million digits": (b'{"num_experts": ' + b"9" * 1_000_000 + b"}", ("config.json",)),
    "text_config in text_config": (json.dumps(nested(50)).encode(), ("config.json",)),
    "hidden_size a string": (setting(hidden_size="wide"), ("config.json", "hidden_size")),
    "hidden_size an array": (setting(hidden_size=[128]), ("config.json", "hidden_size")),
    "hidden_size zero": (setting(hidden_size=0), ("config.json", "hidden_size")),
    "hidden_size missing": (without("hidden_size"), ("config.json", "hidden_size")),
    "layers a boolean": (setting(num_hidden_layers=True), ("config.json", "num_hidden_layers")),
    "layers a fraction": (setting(num_hidden_layers=4.5), ("config.json", "num_hidden_layers")),
    "a billion layers": (setting(num_hidden_layers=10**9), ("config.json", "num_hidden_layers")),
    "architectures a number": (setting(architectures=5), ("config.json", "architectures")),
    "architectures of numbers": (setting(architectures=[5]), ("config.json", "architectures")),
    "negative experts": (setting(num_experts=-16), ("config.json", "num_experts")),
    "NaN experts": (setting(num_experts=float("nan")), ("config.json", "num_experts")),
    "infinitely many experts": (setting(num_experts=float("inf")), ("config.json", "num_experts")),
    "experts a word": (setting(num_experts="sixteen"), ("config.json", "num_experts")),
    "experts an object": (setting(num_experts={"n": 16}), ("config.json", "num_experts")),
    "a million experts too many": (setting(num_experts=10**7), ("config.json", "num_experts")),
    "experts beyond 64 bits": (setting(num_experts=10**30), ("config.json", "num_experts")),
    "more used than there are": (setting(num_experts_per_tok=17), ("config.json", "num_experts_per_tok")),
    "negative top-k": (setting(num_experts_per_tok=-1), ("config.json", "num_experts_per_tok")),
    "text_config an array": (setting(text_config=[1]), ("config.json",)),
    "a dtype that there is not": (setting(dtype="int3"), ("config.json: dtype", "int3", "bfloat16")),
    "quantization_config a word": (setting(quantization_config="fp8"), ("config.json", "quantization_config")),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_broken_configuration_is_refused(name: str, tmp_path: Path, run_command: Any) -> None:
    content, words = BAD_CONFIGS[name]
    raw, change = (content, None) if isinstance(content, bytes) else (None, content)
    model = make_model(tmp_path, change, raw)
    fresh = name in ("truncated", "deep nesting in a small file", "a billion layers")
    refused(run_command, tmp_path, ["--model", str(model)], *words, codes=(BAD_INPUT, UNSUPPORTED), fresh=fresh)


@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_a_hundred_megabytes_of_nesting_are_refused_unread(opening: bytes, tmp_path: Path, run_command: Any) -> None:
    model = make_model(tmp_path)
    with (model / "config.json").open("wb") as stream:
        for _ in range(100):
            stream.write(opening * (1_000_000 // len(opening)))
    refused(run_command, tmp_path, ["--model", str(model)], "config.json", codes=(BAD_INPUT,))
    (model / "config.json").unlink()


def test_a_missing_folder_is_named(tmp_path: Path, run_command: Any) -> None:
    refused(run_command, tmp_path, ["--model", "./not-there"], "not-there", codes=(BAD_INPUT,))


def test_a_hub_id_that_is_not_cached_is_named_offline(tmp_path: Path, run_command: Any) -> None:
    environ = {"HF_HOME": str(tmp_path / "hf")}
    refused(run_command, tmp_path, ["--model", "nobody/nothing"], "nobody/nothing", codes=(BAD_INPUT,), env=environ)


def test_a_folder_without_configuration_is_named(tmp_path: Path, run_command: Any) -> None:
    (tmp_path / "empty").mkdir()
    refused(run_command, tmp_path, ["--model", "./empty"], "config.json", "missing", codes=(BAD_INPUT,))


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path, run_command: Any) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    refused(run_command, tmp_path, ["--model", "./file"], "file", codes=(BAD_INPUT,))


def test_a_loop_of_links_ends(tmp_path: Path, run_command: Any) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    refused(run_command, tmp_path, ["--model", str(tmp_path / "a")], codes=(BAD_INPUT,))


def test_a_loop_of_links_at_the_configuration_ends(tmp_path: Path, run_command: Any) -> None:
    model = make_model(tmp_path)
    (model / "config.json").unlink()
    (model / "config.json").symlink_to("config.json")
    refused(run_command, tmp_path, ["--model", str(model)], "config.json", codes=(BAD_INPUT,))


# Everything is imported before the change of user, because the interpreter itself may lie where only root reads.
AS_NOBODY = """
import os, sys
from moe_optimizer.cli.main import main
main(["inspect", sys.argv[1], "--json"])
os.setgid(65534); os.setuid(65534)
sys.exit(main(["inspect", sys.argv[2]]))
"""


@pytest.mark.skipif(os.geteuid() == 0 and not hasattr(os, "setuid"), reason="cannot change user")
@pytest.mark.parametrize("locked", ["folder", "config.json"])
def test_what_may_not_be_read_is_named(locked: str, tmp_path: Path, run_command: Any) -> None:
    model = make_model(tmp_path)
    tmp_path.chmod(0o755)
    path = model if locked == "folder" else model / "config.json"
    path.chmod(0)
    program = ("-c", AS_NOBODY) if os.geteuid() == 0 else ("-m", "moe_optimizer", "inspect")
    arguments = [str(TINY_MOE), str(model)] if os.geteuid() == 0 else [str(model)]
    for parent in list(tmp_path.parents)[:3]:
        parent.chmod(parent.stat().st_mode | 0o011)
    finished = run_command(arguments, program=program, cwd=tmp_path)
    path.chmod(0o755)
    assert finished.code == BAD_INPUT, finished
    assert "Permission denied" in finished.first_line
    assert "Traceback" not in finished.stderr


@pytest.mark.parametrize("content", [None, b"", b'{"model": {', b"{}"], ids=["absent", "empty", "cut off", "not one"])
def test_a_tokenizer_that_is_not_whole_is_refused(content: bytes | None, tmp_path: Path, run_command: Any) -> None:
    model = make_model(tmp_path)
    (model / "tokenizer.json").unlink()
    if content is not None:
        (model / "tokenizer.json").write_bytes(content)
    refused(run_command, tmp_path, ["--model", str(model)], "tokenizer", codes=(BAD_INPUT,))


@pytest.mark.parametrize(
    ("vllm_args", "code"), [(["--max-model-len", "1M"], BAD_INPUT), (["--quantization", "fp8"], UNSUPPORTED)]
)
def test_an_argument_of_vllm_that_cannot_work_is_refused(
    vllm_args: list[str], code: int, tmp_path: Path, run_command: Any
) -> None:
    arguments = ["--model", str(TINY_MOE), "--hardware", "cpu", "--", *vllm_args]
    refused(run_command, tmp_path, arguments, vllm_args[0], codes=(code,))


def test_a_flag_that_vllm_does_not_have_is_refused_before_vllm_starts(tmp_path: Path, run_command: Any) -> None:
    arguments = ["--model", str(TINY_MOE), "--", "--max-num-sqes", "4"]
    finished = refused(run_command, tmp_path, arguments, "--max-num-sqes", codes=(BAD_INPUT,))
    (hint,) = finished.hints
    assert "--max-num-seqs" in hint


def test_code_of_the_models_own_needs_to_be_trusted(tmp_path: Path, run_command: Any) -> None:
    change = setting(
        model_type="own", architectures=["OwnForCausalLM"], auto_map={"AutoModelForCausalLM": "modeling_own.Own"}
    )
    model = make_model(tmp_path, change)
    refused(run_command, tmp_path, ["--model", str(model)], "config.json", codes=(UNSUPPORTED,))


# Each level names the one before nine times: 9 ** 9 elements when written out.
ALIAS_BOMB = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("name: x\npases: {}\n", ("profile.yaml:2", "pases")),
        ("name: x\npasses:\n  fp8: {granularty: block}\n", ("profile.yaml:3", "granularty")),
        ("name: x\nworkload: {batch_size: many}\n", ("profile.yaml:2", "batch_size")),
        ("name: x\ngpu_memory_utilization: .nan\n", ("profile.yaml:2", "gpu_memory_utilization")),
        ("- a list\n", ("profile.yaml",)),
        ("name: [unclosed\n", ("profile.yaml",)),
        ("", ("profile.yaml",)),
        ("name: !!python/object/apply:os.system [touch pwned]\n", ("profile.yaml",)),
        (ALIAS_BOMB, ("profile.yaml",)),
    ],
)
def test_a_broken_profile_is_refused_with_its_line(
    content: str, words: tuple[str, ...], tmp_path: Path, run_command: Any
) -> None:
    (tmp_path / "profile.yaml").write_text(content, encoding="utf-8")
    arguments = ["--model", str(TINY_MOE), "--profile", "./profile.yaml"]
    refused(run_command, tmp_path, arguments, *words, codes=(BAD_INPUT,))


@pytest.mark.parametrize(
    ("arguments", "words", "hint"),
    [
        (["--profile", "agressive"], ("agressive",), "aggressive"),
        (["--modle", "x"], ("--modle",), "--model"),
        (["--enable-fp9"], ("--enable-fp9",), "--enable-fp8"),
        (["--enable-fp8", "--disable-fp8"], ("--enable-fp8", "--disable-fp8"), ""),
        (["--require", "fp8", "--disable-fp8"], ("--require fp8", "--disable-fp8"), ""),
        (["--port", "8000", "--port", "8001"], ("--port", "more than once"), ""),
        (["--port", "0"], ("--port", "'0'", "65535"), ""),
        (["--gpus", "two"], ("--gpus", "'two'"), ""),
        (["--gpus", "0"], ("--gpus", "'0'"), ""),
        (["--batch-size", "-1"], ("--batch-size", "'-1'"), ""),
        (["--dtype", "int8"], ("--dtype", "int8"), ""),
        (["--engine", "vlm"], ("--engine", "vlm"), "vllm"),
        (["--hardware", "h100-sxm5"], ("h100-sxm5",), "h100_sxm"),
        (["--hardware", "cpu", "--gpus", "2"], ("cpu", "2"), ""),
        (["--hardware", "h100_sxm"], ("h100_sxm", "this machine"), "--dry-run"),
        (["--max-model-len", "99999999"], ("--max-model-len",), ""),
        (["--host", "no.such.host.invalid"], ("--host", "no.such.host.invalid"), ""),
        (["stray"], ("two models", "stray"), ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_flag_is_refused(
    arguments: list[str], words: tuple[str, ...], hint: str, tmp_path: Path, run_command: Any
) -> None:
    finished = refused(
        run_command, tmp_path, ["--model", str(TINY_MOE), *arguments]
        if "--modle" not in arguments else arguments, *words, codes=(BAD_INPUT,), fresh="--modle" in arguments,
    )  # fmt: skip
    assert hint in "".join(finished.hints)


def test_the_embedded_engine_refuses_an_optimization_of_vllm(tmp_path: Path, run_command: Any) -> None:
    arguments = ["--model", str(TINY_MOE), "--engine", "embedded", "--enable-fp8"]
    refused(run_command, tmp_path, arguments, "--enable-fp8", "embedded", codes=(BAD_INPUT,))


@pytest.mark.thorough
def test_the_embedded_engine_refuses_an_argument_that_only_vllm_has(tmp_path: Path, run_command: Any) -> None:
    arguments = ["--model", str(TINY_MOE), "--engine", "embedded", "--", "--enforce-eagr"]
    refused(run_command, tmp_path, arguments, "--enforce-eagr", codes=(BAD_INPUT,), fresh=True)


@pytest.mark.parametrize(
    "variables",
    [{"MOE_OPTIMIZER_PROFLE": "balanced"}, {"MOE_OPTIMIZER_PROFILE": "balancd"}, {"MOE_OPTIMIZER_DISABLE": "x"}],
)
def test_a_wrong_environment_variable_is_refused(variables: dict[str, str], tmp_path: Path, run_command: Any) -> None:
    fresh = "MOE_OPTIMIZER_PROFILE" in variables
    refused(run_command, tmp_path, ["--model", str(TINY_MOE)], codes=(BAD_INPUT,), env=variables, fresh=fresh)


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path, run_command: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(run_command, tmp_path, ["--model", str(TINY_MOE), "--port", port], "--port", port, codes=(BAD_INPUT,))


def test_a_model_too_large_says_how_much_it_needs(tmp_path: Path, run_command: Any) -> None:
    change = setting(
        hidden_size=7168, num_hidden_layers=61, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=2048,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    model = make_model(tmp_path, change)
    (model / "model.safetensors").unlink()
    refused(run_command, tmp_path, ["--model", str(model)], "GB", codes=(UNSUPPORTED,))


@pytest.mark.parametrize("name", ["\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\u202egnp.exe", "a\nerror: forged"])
def test_escape_sequences_in_a_name_do_not_reach_the_terminal(name: str, tmp_path: Path, run_command: Any) -> None:
    finished = refused(run_command, tmp_path, ["--model", f"./{name}"], codes=(BAD_INPUT,))
    assert not set(finished.stderr) & {"\x1b", "\x07", "\u202e"}


def test_escape_sequences_in_a_configuration_do_not_reach_the_terminal(tmp_path: Path, run_command: Any) -> None:
    model = make_model(tmp_path, setting(architectures=["\x1b[2J\x1b[31mQwen"], model_type="\x1b]0;x\x07"))
    finished = refused(run_command, tmp_path, ["--model", str(model)], codes=(BAD_INPUT, UNSUPPORTED))
    assert not set(finished.stderr) & {"\x1b", "\x07"}

"""From a hub id to a folder, without a network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.hub import fetch_model, hub_cache, resolve_model
from moe_optimizer.inspection.model_inspector import ModelInspector
from tests.paper_hub import paper_hub


def cached(root: Path, hub_id: str, revision: str, *, main: bool = True) -> Path:
    repository = root / f"models--{hub_id.replace('/', '--')}"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    if main:
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(revision)
    return snapshot


def test_id_is_found_in_the_cache(tmp_path: Path) -> None:
    cached(tmp_path, "owner/name", "old", main=False)
    snapshot = cached(tmp_path, "owner/name", "abc123")
    assert resolve_model("owner/name", {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}) == snapshot


def test_id_without_a_main_reference_uses_any_snapshot(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "owner/name", "abc123", main=False)
    assert resolve_model("owner/name", {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}) == snapshot


def test_reference_cannot_leave_the_cache(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "owner/name", "abc123")
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("../../../../etc")
    assert resolve_model("owner/name", {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}) == snapshot


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"HF_HUB_CACHE": "/a"}, "/a"),
        ({"HF_HOME": "/b"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
    ],
)
def test_the_hub_cache_is_where_the_environment_says(environ: dict[str, str], cache: str) -> None:
    assert hub_cache(environ) == Path(cache)


def test_an_id_that_is_not_cached_is_refused_offline(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="hub cache") as error:
        resolve_model("owner/name", {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE" in str(error.value.hint)
    assert "hf download " in str(error.value.hint)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[dict[str, str], list[str]]]:
    """A hub with one model: yields the environment that leads to it, and the files that were fetched from it."""
    constants = pytest.importorskip("huggingface_hub.constants")
    model = tmp_path / "on the hub"
    model.mkdir()
    (model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin", "README.md"):
        (model / name).write_text(json.dumps({"file": name}))
    with paper_hub("owner/name", model) as (url, fetched):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(tmp_path / "cache")}, fetched


def test_weights_are_fetched_once(hub: tuple[dict[str, str], list[str]]) -> None:
    environ, fetched = hub
    resolve_model("owner/name", environ)
    assert fetched == ["config.json"]
    folder = fetch_model("owner/name", environ)
    assert sorted(fetched) == ["config.json", "model.safetensors", "tokenizer.json"]
    fetched.clear()
    assert fetch_model("owner/name", environ) == folder
    assert fetch_model("owner/name", {**environ, "HF_HUB_OFFLINE": "1"}) == folder
    assert fetched == []
    assert (fetch_model("owner/name", environ, weights="*.bin") / "pytorch_model.bin").is_file()


def test_weights_that_are_not_in_the_cache_are_refused_offline(hub: tuple[dict[str, str], list[str]]) -> None:
    environ, _ = hub
    resolve_model("owner/name", environ)
    with pytest.raises(InputError, match="not all in the hub cache"):
        fetch_model("owner/name", {**environ, "HF_HUB_OFFLINE": "1"})


def test_a_folder_is_not_looked_into_for_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert fetch_model(str(tmp_path)) == tmp_path


def test_a_folder_wins_over_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "owner" / "name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/name", {"HF_HUB_OFFLINE": "1"}) == Path("owner/name")


def test_name_is_the_id_or_the_folders_last_component(
    tmp_path: Path, load_config: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(tmp_path, "owner/name", "abc123")
    (snapshot / "config.json").write_text(json.dumps(load_config("mixtral")))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ModelInspector().inspect("owner/name").name == "owner/name"
    assert ModelInspector().inspect(snapshot).name == "abc123"


def test_vllm_fetches_the_weights_of_a_hub_id_that_has_none_in_the_cache(
    tmp_path: Path, load_config: Callable[[str], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = cached(tmp_path, "owner/name", "abc123")
    (snapshot / "config.json").write_text(json.dumps(load_config("mixtral")))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert ModelInspector().inspect("owner/name").path == "owner/name"
    assert ModelInspector().inspect(snapshot).path == str(snapshot)
    (snapshot / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert ModelInspector().inspect("owner/name").path == str(snapshot)


def test_inspection_imports_nothing_heavy(
    model_folder: Callable[..., Path], load_config: Callable[[str], dict[str, Any]]
) -> None:
    folder = model_folder(load_config("deepseek_v3"))
    program = (
        "import sys\n"
        "from moe_optimizer.inspection.model_inspector import ModelInspector, to_inspect_json\n"
        f"to_inspect_json(ModelInspector().inspect({str(folder)!r}))\n"
        "heavy = {'torch', 'transformers', 'vllm', 'huggingface_hub', 'numpy', 'pydantic', 'rich', 'yaml'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() == "[]"


def test_a_cache_below_the_home_of_a_user_that_does_not_exist_is_empty() -> None:
    with pytest.raises(InputError, match="hub cache"):
        resolve_model("owner/name", {"HF_HOME": "~no-such-user/hf", "HF_HUB_OFFLINE": "1"})


def test_a_pipe_in_the_cache_does_not_block(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, "owner/name", "abc123")
    (tmp_path / "models--owner--name" / "refs" / "main").unlink()
    os.mkfifo(tmp_path / "models--owner--name" / "refs" / "main")
    assert resolve_model("owner/name", {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}) == snapshot


def test_a_cache_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--name"
    repository.mkdir()
    (repository / "snapshots").symlink_to("snapshots")
    with pytest.raises(InputError, match=f"{repository} cannot "):
        resolve_model("owner/name", {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"})

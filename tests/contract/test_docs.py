"""What the documents name exists: paths, make targets, commands, environment variables and records."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from moe_optimizer import env
from moe_optimizer.inspection.vllm_runs import read_vllm_runs

ROOT = Path(__file__).resolve().parents[2]


def _documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")  # fmt: skip
    return [ROOT / name for name in listed if name and (ROOT / name).is_file()]


DOCUMENTS = _documents()
# A path as the documents write it: backticked, with a slash or a known ending, no placeholder.
_CODE = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(
    r"^(?:moe_optimizer|csrc|configs|tests|scripts|docs|examples|benchmarks|requirements)/[\w./-]*$"
    r"|^[\w-]+\.(?:md|toml|sh|lock)$|^run_optimizer\.py$"
)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Files that exist at run time only, or in the user's model folder.
_ELSEWHERE = {"config.json"}


def test_documents_are_found_to_check() -> None:
    assert (ROOT / "README.md") in DOCUMENTS


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_paths_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    missing = [
        name
        for name in _CODE.findall(text)
        if _PATH.match(name) and name not in _ELSEWHERE
        and not any((base / name).exists() for base in (ROOT, document.parent, ROOT / "moe_optimizer"))
    ]  # fmt: skip
    missing += [
        target
        for target in _LINK.findall(text)
        if "://" not in target and not (document.parent / target).exists()
    ]  # fmt: skip
    assert not missing, f"{document.relative_to(ROOT)} names paths that do not exist: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_make_targets_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", document.read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets, f"{document.relative_to(ROOT)}: no such make target: {sorted(named - targets)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_environment_variables_exist(document: Path) -> None:
    named = set(re.findall(r"\bMOE_OPTIMIZER_[A-Z_]+\b", document.read_text(encoding="utf-8")))
    assert named <= set(env.NAMES), f"{document.relative_to(ROOT)}: unknown variables {sorted(named - set(env.NAMES))}"


def test_readmes_table_has_the_versions_of_vllm_that_were_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (heading,) = re.findall(r"^\| optimization \|.*$", readme, re.MULTILINE)
    named = {
        (column.strip().startswith("CPU"), version) for column, version in re.findall(r"([^|]*vLLM ([\d.]+))", heading)
    }
    run = {(run.device == "cpu", run.version.rpartition(".")[0]) for run in read_vllm_runs().runs}
    assert named == run


def test_the_page_on_installing_has_every_run_of_vllm() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+\.\d+\.\d+ \|.*$", page, re.MULTILINE)
    runs = read_vllm_runs().runs
    assert rows == [
        f"| {run.version} | {run.device.upper()} | {run.machine} | {run.ran} | {run.date} |" for run in runs
    ]


def test_the_container_has_the_newest_vllm_that_was_run_on_gpus() -> None:
    dockerfile = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
    newest = read_vllm_runs().versions("cuda")[0]
    assert f"ARG VLLM_VERSION={newest}\n" in dockerfile
    assert set(re.findall(r"vllm-moe-optimizer:(\S+)", dockerfile)) == {newest}


def test_readme_names_the_test_command_that_ci_runs() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in (ROOT / "README.md").read_text(encoding="utf-8")

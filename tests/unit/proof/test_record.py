"""Proof files: written whole, read strictly."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.proof.record import PROOF_DIR, LayerProof, PassProof, Proof, ProofWriter, read_proofs
from tests.eventually import eventually


def proof(rank: int = 0) -> Proof:
    layer = LayerProof(
        name="layers.0", num_local_experts=8, hidden_size=4, intermediate_size=2, dtype="float32", expert_map=True
    )
    return Proof(
        role="worker",
        rank=rank,
        pid=100 + rank,
        plan_digest="0123456789abcdef",
        versions={"vllm": "0.32.0"},
        world_size=2,
        model_rank=rank,
        passes={"flash_dmoe": PassProof(requested="cpu kernel", applied=True, layers=(layer,))},
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = [proof(0), proof(1)]
    for one in written:
        ProofWriter(tmp_path, one).write()
    assert list(read_proofs(tmp_path)) == written


def test_the_file_is_named_after_role_rank_and_pid(tmp_path: Path) -> None:
    ProofWriter(tmp_path, proof(1)).write()
    assert [path.name for path in (tmp_path / PROOF_DIR).iterdir()] == ["worker-1-101.json"]


@pytest.mark.parametrize("counts", [False, True])
def test_a_touched_proof_is_written_by_itself_also_if_only_counts_have_changed(tmp_path: Path, counts: bool) -> None:
    writer = ProofWriter(tmp_path, proof())
    writer.start()
    writer.proof.passes["flash_dmoe"].ran = True
    writer.touch(counts=counts)
    eventually(lambda: read_proofs(tmp_path)[0].passes["flash_dmoe"].ran, "the writer thread did not write")


def test_a_run_folder_that_was_removed_meanwhile_is_private_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    writer = ProofWriter(run_dir, proof())
    for _ in range(2):
        writer.write()
        assert run_dir.stat().st_mode & 0o777 == 0o700
        shutil.rmtree(run_dir)


def test_a_folder_that_refuses_does_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / PROOF_DIR).write_text("a file where the folder should be")
    writer = ProofWriter(tmp_path, proof())
    writer.write()
    writer.write()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_no_folder_means_no_proofs(tmp_path: Path) -> None:
    assert read_proofs(tmp_path) == ()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 2}', "\x00"])
def test_a_file_that_is_no_proof_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / PROOF_DIR).mkdir()
    (tmp_path / PROOF_DIR / "worker-0-1.json").write_text(text)
    with pytest.raises(InputError, match=r"worker-0-1\.json: .*proof"):
        read_proofs(tmp_path)


def test_an_unknown_field_is_an_error(tmp_path: Path) -> None:
    writer = ProofWriter(tmp_path, proof())
    writer.write()
    data = json.loads(writer.path.read_text())
    writer.path.write_text(json.dumps({**data, "surprise": 1}))
    with pytest.raises(InputError, match="surprise"):
        read_proofs(tmp_path)


def test_a_pipe_among_the_proofs_does_not_block(tmp_path: Path) -> None:
    (tmp_path / PROOF_DIR).mkdir()
    os.mkfifo(tmp_path / PROOF_DIR / "worker-0-1.json")
    with pytest.raises(InputError, match="regular file"):
        read_proofs(tmp_path)

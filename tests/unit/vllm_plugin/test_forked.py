"""A process that is forked from one with the plugin has a proof of its own, with the patches that both have."""

from __future__ import annotations

import multiprocessing
import sys
from pathlib import Path

import pytest

from moe_optimizer.proof.record import read_proofs
from moe_optimizer.vllm_plugin.patch import Patch, apply_when_imported
from moe_optimizer.vllm_plugin.session import PluginSession, current_session, start_session
from tests.builders import cpu_machine, made_plan, profile_with, tiny_moe
from tests.plugin_state import own_patches, own_session


def _write_proof() -> None:
    session = current_session()
    assert session is not None
    session.writer.write()


def test_the_proof_of_a_fork_lists_its_parents_patches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_session(monkeypatch)
    own_patches(monkeypatch)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    plan = made_plan(tiny_moe(), cpu_machine(), profile_with())
    parent = start_session(PluginSession(run_dir=tmp_path, plan=plan))
    target = "a_module_that_nobody_imports:function"
    apply_when_imported(Patch(target=target, why="", remove_when="", fingerprints={}, replacement=lambda each: each))
    parent.patches_changed()
    child = multiprocessing.get_context("fork").Process(target=_write_proof)
    child.start()
    child.join()
    parent.writer.write()
    assert child.exitcode == 0
    patches = {proof.pid: [each.target for each in proof.patches] for proof in read_proofs(tmp_path)}
    assert patches == {parent.pid: [target], child.pid: [target]}

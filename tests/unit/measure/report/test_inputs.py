"""What a report is made of: files are told apart by what they hold, folders are searched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_optimizer.errors import InputError
from moe_optimizer.measure.bench.result import RESULT_FILE
from moe_optimizer.measure.report.inputs import read_inputs
from moe_optimizer.plan.json_codec import encode
from moe_optimizer.plan.plan import PLAN_FILE
from moe_optimizer.proof.record import PROOF_DIR
from moe_optimizer.specs.expert_load import PARTS_DIR
from tests.builders.quality import quality_result
from tests.builders.reports import STEP_RECORD, full_inputs
from tests.builders.results import bench_result


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a benchmark: its result, and a run folder of one side with plan, proof and counts."""
    folder = tmp_path_factory.mktemp("bench")
    inputs = full_inputs()
    side = folder / "server-0_0"
    for path in (side / PROOF_DIR, side / PARTS_DIR):
        path.mkdir(parents=True)
    (folder / RESULT_FILE).write_text(json.dumps(encode(inputs.bench)))
    (folder / "server-0_0.start.json").write_text("{}")
    (folder / "quality.json").write_text(json.dumps(encode(quality_result())))
    (side / PLAN_FILE).write_text(inputs.runs[0].plan.to_json())
    (side / PROOF_DIR / "worker-0-4321.json").write_text(json.dumps(encode(inputs.runs[0].proofs[0])))
    assert inputs.load is not None
    (side / PARTS_DIR / "0.json").write_text(inputs.load.to_json())
    return folder


def test_the_folder_of_a_benchmark_gives_all_it_holds(written: Path):
    found, expected = read_inputs([written]), full_inputs()
    assert found.bench == expected.bench
    assert found.load == expected.load
    assert found.quality == quality_result()
    assert [run.plan for run in found.runs] == [expected.runs[0].plan]
    assert found.runs[0].proofs == expected.runs[0].proofs
    assert found.ledgers == ()


def test_the_folder_of_a_run_gives_plan_proof_and_counts(written: Path):
    found = read_inputs([written / "server-0_0"])
    assert (len(found.runs), len(found.runs[0].proofs), found.bench) == (1, 1, None)
    assert found.load is not None


def test_files_are_put_together(written: Path):
    found = read_inputs([written / RESULT_FILE, STEP_RECORD, written / "server-0_0" / PLAN_FILE])
    assert found.bench is not None
    assert [ours.batch for _, ours in found.ledgers] == [1, 8, 64, 128]
    assert found.plan is not None


def test_a_plan_that_several_starts_share_is_there_once(written: Path, tmp_path: Path):
    plan = (written / "server-0_0" / PLAN_FILE).read_text()
    for name in ("server-0_0", "server-0_1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / PLAN_FILE).write_text(plan)
    assert len(read_inputs([tmp_path]).runs) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}'])
def test_a_file_of_another_kind_is_refused(text: str, tmp_path: Path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"other\.json"):
        read_inputs([path])


def test_a_folder_with_nothing_to_report_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="nothing to report"):
        read_inputs([tmp_path])


def test_a_source_that_does_not_exist_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="absent"):
        read_inputs([tmp_path / "absent.json"])


def as_json(result: Any) -> dict[str, Any]:
    return json.loads(json.dumps(encode(result)))


def test_a_record_of_a_benchmark_is_read_as_its_result_is(tmp_path: Path):
    record = {"what": "a benchmark", "commit": "abc1234", "dirty": False} | as_json(bench_result())
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert read_inputs([tmp_path / "record.json"]).bench == bench_result()


def test_a_record_of_a_tuning_is_read_as_its_ledger_is(tmp_path: Path):
    tuning = full_inputs().tuning
    record = as_json(tuning) | {"what": "a tuning", "commit": "abc1234", "dirty": False}
    (tmp_path / "record.json").write_text(json.dumps(record))
    assert read_inputs([tmp_path / "record.json"]).tuning == tuning


def test_an_older_result_is_read_as_far_as_it_goes(tmp_path: Path):
    older = as_json(bench_result())
    for side in older["sides"]:
        del side["expected"]
        for load in side["loads"]:
            del load["discarded"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    assert read_inputs([tmp_path / "older.json"]).bench == bench_result()


def test_a_result_without_what_the_report_needs_is_refused_by_the_name_of_the_field(tmp_path: Path):
    older = as_json(bench_result())
    del older["sides"][0]["loads"][0]["e2e_ms"]
    (tmp_path / "older.json").write_text(json.dumps(older))
    with pytest.raises(InputError, match="e2e_ms"):
        read_inputs([tmp_path / "older.json"])

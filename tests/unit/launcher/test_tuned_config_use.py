from __future__ import annotations

from pathlib import Path

from moe_optimizer.inspection.tuned_configs import FOLDER_VARIABLE
from moe_optimizer.launcher.tuned_config_use import TUNED_PASS, observed_use
from moe_optimizer.plan.decision import Applier, Decision, Status, Wish
from moe_optimizer.plan.pass_params import TunedConfigsParams
from moe_optimizer.specs.triton_shape import TritonShape

NAME = "E=64,N=1024,device_name=NVIDIA_H200.json"
SHAPE = TritonShape(num_experts=64, width=1024, device_name="NVIDIA H200", dtype="", block=None)
DECISION = Decision(
    pass_name=TUNED_PASS, wish=Wish.AUTO, wish_origin="profile balanced", status=Status.ON, value="tuned",
    reason="there", applier=Applier.FILES, env={FOLDER_VARIABLE: "/cache"},
    params=TunedConfigsParams(file=NAME, shape=SHAPE, dtype="bfloat16"),
)  # fmt: skip
READ = f"(EngineCore pid=8) INFO [fused_moe.py:1094] Using configuration from /cache/{NAME} for MoE layer.\n"
NOT_READ = f"WARNING Using default MoE config. Config file not found at /cache/{NAME}\n"


def log(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_a_file_that_vllm_says_it_took_is_in_use(tmp_path):
    assert observed_use(DECISION, [log(tmp_path, "a", NOT_READ + READ)]).ran.startswith("yes")


def test_a_file_that_one_server_did_not_take_is_not(tmp_path):
    other_name, other_folder = READ.replace(NAME, NAME.replace("64", "32")), READ.replace("/cache", "/vllm/configs")
    for text in (NOT_READ, other_name, other_folder, ""):
        seen = observed_use(DECISION, [log(tmp_path, "a", READ), log(tmp_path, "b", text)])
        assert seen.ran == "no"
        assert "another MoE kernel" in seen.why_not


def test_the_log_of_a_real_start_says_it_in_these_words():
    record = Path(__file__).parents[3] / "benchmarks" / "records" / "2026-11-20_h200_tuned_configs.json"
    assert "Using configuration from" in record.read_text(encoding="utf-8")

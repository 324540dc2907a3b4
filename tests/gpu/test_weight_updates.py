"""A real server gets new weights, sleeps and wakes: our kernels compute with the weights that it has then.

It starts with experts that are noise of three times the size, so that whatever is left of them (a scale, a copy, what
a graph reads) spoils the perplexity.
"""

from __future__ import annotations

import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moe_optimizer.launcher.launch import ServerInfo, running
from moe_optimizer.passes.registry import resolve_wishes
from moe_optimizer.proof.record import read_proofs
from tests.builders import profile_with
from tests.eventually import eventually
from tests.fp8_checkpoints import FORMS, write_fp8_checkpoint
from tests.free_ports import free_port
from tests.gpu.plans import always_ours, always_ours_in_fp8, gpu_plan
from tests.vllm.conftest import READY_TIMEOUT_S, TINY_MOE
from tests.vllm.heldout import heldout_perplexity, reference_perplexity

from server_http import ServerError, answer_of  # isort: skip  # of scripts/

pytestmark = pytest.mark.gpu

PASS = "flash_dmoe"
CAPTURE = ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16")
FORMATS = {"plain": ((), 1.002), "fp8": (("fp8",), 1.02), "four_bit": (("four-bit",), 1.2)}
"""Format -> passes that are wished, and the perplexity that it may have against FP32."""
STORED = ("fp8 tensor", "compressed-tensors channel")
"""FP8 checkpoints whose scales the kernels read from copies of their own, or as they are."""
SPOILED = 3.0
"""Of the perplexity, at least, with the experts that the server starts with."""


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with other experts."""
    folder = tmp_path_factory.mktemp("spoiled") / "model"
    folder.mkdir()
    for file in TINY_MOE.iterdir():
        if file.suffix in {".json", ".jinja"} and "safetensors" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(TINY_MOE / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            noise = torch.randn(tensor.shape, generator=generator) * 3.0 * tensor.float().std()
            tensors[name] = noise.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Server:
    """One whose weights are changed through vLLM's own requests."""

    def __init__(self, info: ServerInfo, bound: float) -> None:
        self.info, self.bound = info, bound
        self.group: Any = None

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        with answer_of(f"{self.info.base_url}/{path}", body or {}):
            pass

    def reload(self, model: Path) -> None:
        self.post("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}})

    def wake(self, *tags: str) -> None:
        self.post("wake_up" + "?" * bool(tags) + "&".join(f"tags={tag}" for tag in tags))

    def assert_right(self, when: str) -> None:
        assert heldout_perplexity(self.info) < reference_perplexity() * self.bound, when
        eventually(lambda: self.canary().startswith(f"passed {when}"), self.canary())

    def assert_spoiled(self) -> None:
        found = heldout_perplexity(self.info)
        assert not math.isfinite(found) or found > SPOILED * reference_perplexity()

    def canary(self) -> str:
        (found,) = [
            proof.passes[PASS].canary
            for proof in read_proofs(self.info.run_dir)
            if PASS in proof.passes and proof.passes[PASS].layers
        ]
        return found

    def join_trainer(self) -> None:
        """Form vLLM's NCCL group: this process on the second GPU, the server on the first."""
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        where = {"master_address": "127.0.0.1", "master_port": free_port(), "world_size": 2}
        joins = threading.Thread(
            target=self.post, args=("init_weight_transfer_engine", {"init_info": where | {"rank_offset": 1}})
        )
        joins.start()
        torch.cuda.set_device(1)
        self.group = trainer_init(where)
        joins.join()

    def train(self, model: Path) -> None:
        """Send every weight as a trainer does."""
        tensors = {name: each.cuda() for name, each in load_file(model / "model.safetensors").items()}
        update = {
            "names": list(tensors),
            "dtype_names": [str(each.dtype).removeprefix("torch.") for each in tensors.values()],
            "shapes": [list(each.shape) for each in tensors.values()],
        }
        self.post("start_weight_update")
        takes = threading.Thread(target=self.post, args=("update_weights", {"update_info": update}))
        takes.start()
        for tensor in tensors.values():
            self.group.broadcast(tensor, src=0, stream=torch.cuda.current_stream())
        takes.join()
        self.post("finish_weight_update")


@pytest.mark.parametrize("name", FORMATS)
def test_after_an_update_a_sleep_or_both_the_model_is_the_new_one(
    name: str, spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    wished, bound = FORMATS[name]
    tables = {
        "plain": always_ours,
        "fp8": lambda kernels, vllm: always_ours_in_fp8("block", kernels, vllm),
        "four_bit": None,
    }
    plan = gpu_plan(
        "--enable-sleep-mode", "--no-enable-prefix-caching", "--weight-transfer-config", '{"backend": "nccl"}',
        *CAPTURE, speeds=tables[name], model=spoiled, profile=profile_with("balanced", {}),
        wishes=resolve_wishes(("flash-dmoe", *wished), ()), max_model_len=520, batch_size=16,
    )  # fmt: skip
    with running(plan, run_dir=tmp_path, ready_timeout_s=READY_TIMEOUT_S) as info:
        server = Server(info, bound)
        server.assert_spoiled()
        server.reload(TINY_MOE)
        server.assert_right("after a reload")
        server.post("sleep?level=1")
        server.wake()
        server.assert_right("after waking up")
        if torch.cuda.device_count() > 1:
            server.join_trainer()
            if wished == ("four-bit",):
                with pytest.raises(ServerError):
                    server.post("start_weight_update")
                server.assert_right("after waking up")
            else:
                server.train(spoiled)
                server.assert_spoiled()
                server.train(TINY_MOE)
                server.assert_right("after a weight update")
        server.post("sleep?level=2")
        server.wake("weights")
        server.reload(TINY_MOE)
        server.wake("kv_cache")
        server.assert_right("after a reload")
    assert_ours_ran(tmp_path)


@pytest.mark.parametrize("name", STORED)
def test_a_checkpoint_in_fp8_is_reloaded_with_its_scales(
    name: str, spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    form = FORMS[name]
    right = write_fp8_checkpoint(form, tmp_path / "right")
    plan = gpu_plan(
        "--enable-sleep-mode", "--no-enable-prefix-caching", *CAPTURE,
        speeds=lambda kernels, vllm: always_ours_in_fp8(form.scales, kernels, vllm),
        model=write_fp8_checkpoint(form, tmp_path / "spoiled", source=spoiled), max_model_len=520, batch_size=16,
    )  # fmt: skip
    with running(plan, run_dir=tmp_path / "run", ready_timeout_s=READY_TIMEOUT_S) as info:
        server = Server(info, 1.02)
        server.assert_spoiled()
        server.reload(right)
        server.assert_right("after a reload")
        server.post("sleep?level=1")
        server.wake()
        server.assert_right("after waking up")
        server.post("sleep?level=2")
        server.wake("weights")
        server.reload(right)
        server.wake("kv_cache")
        server.assert_right("after a reload")
    assert_ours_ran(tmp_path / "run")


def assert_ours_ran(run_dir: Path) -> None:
    entries = [proof.passes[PASS] for proof in read_proofs(run_dir) if PASS in proof.passes]
    (entry,) = [each for each in entries if each.layers]
    assert (entry.applied, entry.ran, entry.why_not) == (True, True, "")
    assert all(layer.calls for layer in entry.layers)

"""Loads a model as a vLLM worker does, once per plan, and writes what that costs in memory beside the plan.

    python -m tests.vllm.loading_memory MODEL_FOLDER ONE_LAYER_FOLDER PLAN=LOAD_FORMAT...

loading_memory.json: {"peak_bytes", "end_bytes", "expert_bytes", "types": the type of each part's weights}.

Each load has a process of its own, forked from one that has imported vLLM (`in_forks`). A model of one layer, with
weights made up by vLLM, is loaded there first: code, threads and scratch that a first layer takes for good (25 MB with
AVX2, 55 with AVX-512) are not counted.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins

from tests.free_ports import free_port
from tests.vllm.in_forks import in_forks

_SAMPLE_INTERVAL_S = 0.002


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: the mapped checkpoint is not in it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


def give_back_what_is_free() -> None:
    """Leave what is used: what glibc keeps of freed memory, more or less of it by how threads took turns, was 33 MB."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Peak:
    """The largest value seen in a block."""

    bytes = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        done = threading.Event()

        def watch() -> None:
            while not done.wait(_SAMPLE_INTERVAL_S):
                self._look()

        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            # The thread may not have had a turn since the last layer.
            self._look()

    def _look(self) -> None:
        self.bytes = max(self.bytes, anonymous_bytes())


def main(model: str, one_layer: str, *loads: str) -> int:
    """Load one after the other; stop at the first that fails."""

    def load(named: str) -> None:
        plan, load_format = named.split("=")
        measure(model, one_layer, Path(plan), load_format)

    return in_forks(load, loads)


def measure(model: str, one_layer: str, plan: Path, load_format: str) -> None:
    os.environ["MOE_OPTIMIZER_PLAN"] = str(plan)
    load_general_plugins()
    # As vLLM's CPU worker does: there is no accelerator whose cache could be emptied.
    torch.accelerator.empty_cache = lambda: None
    load_first(one_layer)
    give_back_what_is_free()
    config = config_of(model, load_format)
    with set_current_vllm_config(config):
        before, peak = anonymous_bytes(), Peak()
        with peak.watched():
            loaded = get_model(vllm_config=config)
        give_back_what_is_free()
        experts = [tensor for name, tensor in loaded.named_parameters() if ".experts" in name]
        measured = {
            "peak_bytes": peak.bytes - before,
            "end_bytes": anonymous_bytes() - before,
            "expert_bytes": sum(tensor.untyped_storage().nbytes() for tensor in experts),
            "types": {
                ".".join(name.split(".")[3:] or [name]): str(tensor.dtype).removeprefix("torch.")
                for name, tensor in loaded.named_parameters()
            },
        }
    plan.with_name("loading_memory.json").write_text(json.dumps(measured))


def load_first(one_layer: str) -> None:
    # Its configuration holds its layers, so it must not be there any more when memory is read: they were freed later.
    config = config_of(one_layer, "dummy")
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        get_model(vllm_config=config)


def config_of(model: str, load_format: str) -> VllmConfig:
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        dtype="bfloat16",
        load_format=load_format,
    ).create_engine_config()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

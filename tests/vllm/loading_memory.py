"""Loads a model as a vLLM worker does and prints what that costs in memory. Run in a process of its own:

python loading_memory.py MODEL_FOLDER PORT [LOAD_FORMAT]   ->   as the last line
{"peak_bytes", "end_bytes", "expert_bytes", "types": the type of each part's weights}
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.plugins import load_general_plugins

_SAMPLE_INTERVAL_S = 0.002


def anonymous_bytes() -> int:
    """Memory of this process that no file backs: the mapped checkpoint is not in it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon")


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


def main(model: str, port: str, load_format: str = "auto") -> None:
    load_general_plugins()
    # As vLLM's CPU worker does: there is no accelerator whose cache could be emptied.
    torch.accelerator.empty_cache = lambda: None
    arguments = EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        dtype="bfloat16",
        load_format=load_format,
    )
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        initialize_model_parallel(1, 1)
        before, peak = anonymous_bytes(), Peak()
        with peak.watched():
            loaded = get_model(vllm_config=config)
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
    print(f"\n{json.dumps(measured)}")


if __name__ == "__main__":
    main(*sys.argv[1:])

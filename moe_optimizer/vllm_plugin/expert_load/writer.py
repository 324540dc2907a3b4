"""Writes one worker's counts to its file under the run folder, from a thread, and the merged file of all workers."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from moe_optimizer.errors import InputError
from moe_optimizer.files import write_atomically
from moe_optimizer.inspection.expert_load import read_run_load
from moe_optimizer.log import get_logger
from moe_optimizer.specs.expert_load import LOAD_FILE, PARTS_DIR, ExpertLoad, LayerLoad
from moe_optimizer.vllm_plugin.expert_load.counter import ExpertCounter

INTERVAL_S = 3.0
"""Chosen: encoding 61 layers of 256 experts takes a few milliseconds, a thousandth of this."""
UNSEEN_INTERVAL_S = 0.5
"""Chosen: delay after vLLM's warm-up until the proof says that every layer is counted."""
STOP_WAIT_S = 5.0
"""Chosen: a write takes milliseconds; a process does not wait for one that hangs."""

logger = get_logger(__name__)


class ExpertLoadWriter:
    """Turns a counter's table into files, at most once every three seconds, and only after a step.

    Args:
        path: this process's file; None in a process whose counts another one writes too.
        layers: (layer id, name) in the order of the table's rows.
        on_seen: called once, when every layer of the model has passed through the counter.
    """

    def __init__(
        self,
        counter: ExpertCounter,
        *,
        model: str,
        layers: Sequence[tuple[int, str]],
        since: str,
        path: Path | None,
        on_seen: Callable[[], None],
    ) -> None:
        self._counter = counter
        self._model = model
        self._layers = tuple(layers)
        self._since = since
        self._path = path
        self._on_seen = on_seen
        self._seen = self._failed = False
        self._steps = self._written_steps = 0
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def stepped(self) -> None:
        """Note one served step. Called in each, so it is an addition and a test of a flag."""
        self._steps += 1
        if not self._wake.is_set():
            self._wake.set()
        self.start()

    def start(self) -> None:
        """Start the thread, if it is not running. On CUDA not before the first step: reads break graph capture."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_writing, name="moe-optimizer-expert-load", daemon=True)
            self._thread.start()
            # Otherwise Python's exit ends the thread wherever it is; inside torch that aborts the process.
            atexit.register(self.stop)

    def stop(self) -> None:
        """End the thread, after a last write."""
        self._stop.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)

    def write(self) -> None:
        """Read the table and write the files now.

        Raises:
            OSError: the run folder does not take them.
        """
        # Read before the table: a step in between is then written once more instead of never.
        steps = self._steps
        table = self._counter.table()
        if not self._seen and bool(table.any(dim=1).all()):
            self._seen = True
            self._on_seen()
        if self._path is None or steps == self._written_steps:
            return
        text = self._load(table, steps).to_json()
        write_atomically(self._path, text)
        self._written_steps = steps
        # Every process writes the merged file after its own, so the last one has merged all.
        run_dir = self._path.parent.parent
        alone = list(self._path.parent.glob("*.json")) == [self._path]
        write_atomically(run_dir / LOAD_FILE, text if alone else read_run_load(run_dir).to_json())

    def _load(self, table: torch.Tensor, steps: int) -> ExpertLoad:
        # The first and the last column are not experts.
        rows = table[:, 1:-1].tolist()
        layers = (
            LayerLoad(index=index, name=name, tokens=tuple(tokens))
            for (index, name), tokens in zip(self._layers, rows, strict=True)
        )
        return ExpertLoad(
            model=self._model,
            num_experts=table.shape[1] - 2,
            layers=tuple(sorted(layers, key=lambda layer: layer.index)),
            since=self._since,
            steps=steps,
        )

    def _keep_writing(self) -> None:
        while True:
            stepped = self._wake.wait(None if self._seen else UNSEEN_INTERVAL_S)
            self._wake.clear()
            # Read before the write, so that the last write of a process has its last steps too.
            stopping = self._stop.is_set()
            try:
                self.write()
            except (OSError, InputError, RuntimeError) as error:  # RuntimeError: torch's, of a device that is gone
                # The counts stay in memory: the next write has them too.
                if not self._failed:
                    self._failed = True
                    logger.warning("expert load under %s cannot be written: %s", self._path, error)
            if stopping:
                return
            if stepped:
                self._stop.wait(INTERVAL_S)


def part_path(run_dir: Path, rank: int) -> Path:
    """Return the file of the worker `rank`."""
    return run_dir / PARTS_DIR / f"{rank}.json"

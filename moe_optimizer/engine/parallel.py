"""`ParallelExecutor`: one process per rank; this one schedules and samples, the others compute what they are sent.

The step goes to the others through shared memory, and everything between layers through torch.distributed.
"""

import io
import multiprocessing
import os
import pickle
import sys
import traceback
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # documented; not in __all__

from moe_optimizer.engine.engine_args import EngineConfig
from moe_optimizer.engine.layers.ranks import Ranks
from moe_optimizer.engine.model_runner import ModelRunner
from moe_optimizer.engine.packed_batch import PackedBatch
from moe_optimizer.engine.protocols import Sampler
from moe_optimizer.errors import MoeOptimizerError, ServerFailedError

_HOST = "127.0.0.1"
_TIMEOUT = timedelta(minutes=10)
"""Chosen: loading a large model differs between ranks by minutes."""
_MAILBOX_BYTES = 64 << 20
"""Chosen: a step of 1 million tokens; pages never written to take no memory."""


class ParallelExecutor(ModelRunner):
    """Rank 0 here, the other ranks in processes that end with this one."""

    def __init__(self, config: EngineConfig, sampler: Sampler | None = None) -> None:
        size = config.args.tensor_parallel_size
        context = multiprocessing.get_context("spawn")
        self._mailbox = SharedMemory(create=True, size=_MAILBOX_BYTES)
        # Full: a step lies in the mailbox. Taken: the rank has read it.
        self._full = [context.Semaphore(0) for _ in range(size - 1)]
        self._taken = [context.Semaphore(1) for _ in range(size - 1)]
        store = TCPStore(_HOST, 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
        self._others = [
            context.Process(
                target=_serve_rank, name=f"rank-{rank}", daemon=True,
                args=(config.args, rank, store.port, self._mailbox.name, (self._full[rank - 1], self._taken[rank - 1])),
            )
            for rank in range(1, size)
        ]  # fmt: skip
        try:
            for process in self._others:
                process.start()
            super().__init__(config, sampler, _join(config, 0, store))
        except BaseException:
            self.shutdown()
            raise

    def compute(self, batch: PackedBatch) -> Tensor:
        self._send(batch)
        return super().compute(batch)

    def shutdown(self) -> None:
        for process in self._others:
            if process.is_alive():
                process.terminate()
                process.join()
        if dist.is_initialized():
            if dist.get_backend() == "nccl":
                # Leaving is collective there, and the others are gone.
                cast(Any, dist.group.WORLD).abort()
            dist.destroy_process_group()
        self._mailbox.close()
        self._mailbox.unlink()

    def _send(self, batch: PackedBatch) -> None:
        file = io.BytesIO()
        _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(batch)
        data = file.getvalue()
        assert len(data) <= _MAILBOX_BYTES, f"a step of {len(data)} bytes"
        for process, taken in zip(self._others, self._taken, strict=True):
            while not taken.acquire(timeout=1.0):
                if not process.is_alive():
                    raise ServerFailedError(f"{process.name} ended with exit code {process.exitcode}; its log is above")
        # What an earlier step left behind it is not read: a pickle says where it ends.
        cast(memoryview, self._mailbox.buf)[: len(data)] = data
        for full in self._full:
            full.release()


class _Pickler(pickle.Pickler):
    """Writes tensors as arrays, which is thirty times faster."""

    def reducer_override(self, obj: Any) -> Any:
        return (torch.from_numpy, (obj.numpy(),)) if isinstance(obj, Tensor) else NotImplemented


def _serve_rank(args: Any, rank: int, port: int, mailbox_name: str, semaphores: Any) -> None:
    """Load this rank's part of the model and compute what the mailbox holds, until the process is ended."""
    try:
        config = EngineConfig.resolve(args, rank=rank)
        mailbox, (full, taken) = SharedMemory(mailbox_name), semaphores
        store = TCPStore(_HOST, port, is_master=False, timeout=_TIMEOUT)
        runner = ModelRunner(config, ranks=_join(config, rank, store))
        while True:
            full.acquire()
            batch = pickle.loads(cast(memoryview, mailbox.buf))
            taken.release()
            runner.compute(batch)
    except Exception as error:  # noqa: BLE001  (whatever it is, rank 0 waits for this process and sees it end)
        if isinstance(error, MoeOptimizerError):
            print(f"rank {rank}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stderr.flush()
        # Not sys.exit: threads of torch.distributed may wait for the other ranks.
        os._exit(1)


def _join(config: EngineConfig, rank: int, store: TCPStore) -> Ranks:
    size = config.args.tensor_parallel_size
    backend = "nccl" if config.device.type == "cuda" else "gloo"
    if config.device.type == "cuda":
        torch.cuda.set_device(config.device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT)
    return Ranks(rank, size, config.args.enable_expert_parallel)

"""Subclasses vLLM's ExampleConnector for disaggregation on the CPU: servers that share a folder.

--kv-transfer-config names this class and module. The example keeps a prompt's cache in a folder named after the
prompt's tokens, in whole blocks, and ends the server in five cases, which are prevented here:

- a prompt of a whole number of blocks and one token is looked up by one folder and read from another;
- a prompt that is read in several steps is written in part, and later read as if it were whole;
- a decode server finds a folder while a prefill server is still writing it;
- two prefill servers read the same prompt and write one folder;
- a server that has more of a prompt in its own prefix cache than there is in the folder is told of negative tokens.

A decode server computes what is not handed over: the answer is the same, only later.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.request import Request

_PARTIAL = ".partial"


class SharedFolderConnector(ExampleConnector):
    """Hands whole blocks of a prompt's cache from any kv_producer, which writes, to any kv_consumer, which reads.

    One worker process in each server; all ranks of a tensor-parallel group would write the same file.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._writes = bool(self._kv_transfer_config.is_kv_producer)
        self._unfinished: dict[str, str] = {}
        """Folder of a prompt -> the one of this server alone in which it is being written."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens of a prompt can be read from the folder, beyond those that are already computed."""
        if self._writes:
            return 0, False
        tokens, later = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return max(0, tokens or 0), later

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Return what the worker writes or reads in this step."""
        new = [request for request in scheduler_output.scheduled_new_reqs if self._concerns(request, scheduler_output)]
        return super().build_connector_meta(dataclasses.replace(scheduler_output, scheduled_new_reqs=new))

    def _concerns(self, request: NewRequestData, scheduler_output: SchedulerOutput) -> bool:
        if not self._writes:
            # The example would write whatever it does not find.
            return request.req_id in self._requests_need_load
        read = request.num_computed_tokens + scheduler_output.num_scheduled_tokens[request.req_id]
        return read >= len(request.prompt_token_ids or ())

    def _found_match_for_prompt(self, prompt_token_ids: list[int], mm_hashes: list[str]) -> bool:
        """Return, for a writer, whether there is nothing to write for a prompt; for a reader, whether it can read."""
        length = len(prompt_token_ids)
        if length <= self._block_size or (length - 1) % self._block_size == 0:
            return self._writes
        return super()._found_match_for_prompt(prompt_token_ids, mm_hashes)

    def _generate_foldername_debug(
        self, token_ids: torch.Tensor, mm_hashes: list[str], create_folder: bool = False
    ) -> str:
        """Return a prompt's folder; while it is being written, one under another name."""
        folder = super()._generate_foldername_debug(token_ids, mm_hashes, create_folder=False)
        if not (create_folder and self._writes):
            return folder
        if folder not in self._unfinished:
            place = Path(folder)
            self._unfinished[folder] = tempfile.mkdtemp(prefix=place.name, suffix=_PARTIAL, dir=place.parent)
        return self._unfinished[folder]

    def wait_for_save(self) -> None:
        """Give the prompts that this step has written their final names, which decode servers look for."""
        while self._unfinished:
            folder, partial = self._unfinished.popitem()
            try:
                Path(partial).rename(folder)
            except OSError:
                # The same prompt, written by an earlier step or another server: a folder with files is not replaced.
                if not Path(folder).exists():
                    raise
                shutil.rmtree(partial)

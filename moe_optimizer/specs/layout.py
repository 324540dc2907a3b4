"""Defines how a model is laid out over GPUs: the parallel sizes of a server, and how many servers there are."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

from moe_optimizer.errors import InputError

_GRAMMAR = re.compile(
    r"tp([1-9]\d{0,3})(?:dp([1-9]\d{0,3}))?(ep)?(?:pp([1-9]\d{0,3}))?"
    r"(?:x([1-9]\d{0,3})|p([1-9]\d{0,3})d([1-9]\d{0,3}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One way to use a number of GPUs. Its name is short and unique: "tp4x2", "tp2dp4ep", "tp8pp2", "tp1p1d3"."""

    tensor_parallel_size: int = 1
    """GPUs that share each layer of a copy of the attention part; always of one machine."""
    data_parallel_size: int = 1
    """Copies of the attention part in a server; the routed experts are divided over the GPUs of all of them."""
    expert_parallel: bool = False
    """Whole experts on each GPU of a stage instead of a slice of every expert."""
    pipeline_parallel_size: int = 1
    """Groups of GPUs that hold successive layers."""
    replicas: int = 1
    """Servers that write answers. They know nothing of each other and stand behind a router."""
    prefill_servers: int = 0
    """Further servers, which read the prompts for those; 0: every server reads its own."""

    @property
    def disaggregated(self) -> bool:
        """Whether some servers only read prompts and the others only write answers."""
        return self.prefill_servers > 0

    @property
    def devices_of_stage(self) -> int:
        """GPUs of one pipeline stage of one server; they share its experts."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def devices_of_server(self) -> int:
        """GPUs of one server."""
        return self.devices_of_stage * self.pipeline_parallel_size

    @property
    def num_servers(self) -> int:
        """Servers of all kinds."""
        return self.prefill_servers + self.replicas

    @property
    def server(self) -> Layout:
        """One of the servers by itself."""
        return dataclasses.replace(self, replicas=1, prefill_servers=0)

    @property
    def num_engines(self) -> int:
        """Copies of all servers that write answers, each with requests of its own."""
        return self.data_parallel_size * self.replicas

    @property
    def num_devices(self) -> int:
        """GPUs of all servers."""
        return self.devices_of_server * self.num_servers

    @property
    def name(self) -> str:
        """The layout as `parse_layout` reads it."""
        parts = [f"tp{self.tensor_parallel_size}"]
        parts += [f"dp{self.data_parallel_size}"] if self.data_parallel_size > 1 else []
        parts += ["ep"] if self.expert_parallel else []
        parts += [f"pp{self.pipeline_parallel_size}"] if self.pipeline_parallel_size > 1 else []
        if self.disaggregated:
            parts += [f"p{self.prefill_servers}d{self.replicas}"]
        elif self.replicas > 1:
            parts += [f"x{self.replicas}"]
        return "".join(parts)


def parse_layout(text: str) -> Layout:
    """Return the layout of a name such as "tp4x2".

    Raises:
        InputError: it is none.
    """
    found = _GRAMMAR.fullmatch(text.strip().lower())
    if found is None:
        raise InputError(
            f"layout: got {text!r:.80}, expected tpN[dpN][ep][ppN][xN|pNdN]",
            hint="tp4x2 is two servers of four GPUs each, tp1dp8ep one server with whole experts on eight, tp2p1d3 one "
            "server of two GPUs that reads prompts and three that write the answers",
        )
    tensor, data, expert, pipeline, replicas, prefill, decode = found.groups()
    return Layout(
        tensor_parallel_size=int(tensor),
        data_parallel_size=int(data or 1),
        expert_parallel=bool(expert),
        pipeline_parallel_size=int(pipeline or 1),
        replicas=int(replicas or decode or 1),
        prefill_servers=int(prefill or 0),
    )

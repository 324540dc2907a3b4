"""Defines what a search over layouts is given."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from moe_optimizer.costs.memory import MemoryRequest
from moe_optimizer.costs.step_size import StepRule
from moe_optimizer.specs.expert_load import ExpertLoad
from moe_optimizer.specs.front_end import FrontEnd
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.kernel_speeds import SpeedTables
from moe_optimizer.specs.layout import Layout
from moe_optimizer.specs.links import Links
from moe_optimizer.specs.model import ModelSpec

STEP_TOKENS = 8192
"""vLLM's own default of tokens in a step of a server on a GPU with much memory, with which loads were measured."""
_MORE_THAN_ITS_SHARE = 1.25
"""Chosen: requests are dealt in turns and differ in length, so an engine may have more of them than another."""
_MOST_REQUESTS = 1024
"""vLLM's own default of requests at once on a GPU with much memory; each takes room for its logits."""


def requests_of_engine(clients: int, layout: Layout) -> int:
    """Return how many requests an engine of a layout should take at once where nobody has said it."""
    more = 1.0 if layout.num_engines == 1 else _MORE_THAN_ITS_SHARE
    return min(clients, _MOST_REQUESTS, math.ceil(more * clients / layout.num_engines))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutQuestion:
    """A model, machines and a load. Equal questions have equal answers."""

    memory: MemoryRequest
    """What one GPU holds when it serves alone; each layout changes its sizes."""
    steps: StepRule | None = None
    """How many tokens a step of each layout has; None: as `memory` says."""
    gpu: GpuSpec
    gpus_per_machine: int
    num_machines: int = 1
    servers_per_machine: int | None = None
    """Most servers that share a machine, each for itself; None: as many as there is room for."""
    split: tuple[int | None, int | None] = (None, None)
    """Prefill and decode servers that are asked for; None: as many as there is room for beside the others."""
    clients: int
    """Clients of a closed loop, over all servers."""
    input_tokens: int
    output_tokens: int
    max_running: int | None
    """Most requests that an engine decodes at once (vLLM's --max-num-seqs); None: see `requests_of_engine`."""
    expert_bits: float
    linear_bits: float
    fp8_blocks: bool = False
    """Whether vLLM converts the experts to FP8 by block while it loads: it fills a slice of them up to whole blocks."""
    weights: str = ""
    """How the experts are stored, as the tables of kernel speeds say it; "": no table is asked."""
    speeds: SpeedTables = field(default_factory=SpeedTables)
    our_kernels: bool = False
    """Whether our expert kernels compute where they were measured to be faster."""
    ours_where_never_slower: bool = False
    """Of those: only layers in whose table they are so at no number of tokens, as of experts that vLLM repacks."""
    rounded_activations: bool = False
    """Whether kernels of ours may round the activations of experts in four bits to E4M3."""
    fused_router_tokens: int = 0
    """Tokens of a step on one GPU up to which one launch of ours multiplies the gate and chooses the experts."""
    load: ExpertLoad | None = None
    """Measured load of the experts; None: it is assumed to be uneven, or even with `even_routing`."""
    even_routing: bool = False
    """Whether the weights are random (--load-format dummy)."""
    processes: bool = True
    """Whether processes count that GPUs wait for: those that launch kernels, and those that send tokens out (vLLM's API
    servers).
    """
    front_end: FrontEnd = field(default_factory=FrontEnd)
    """What API servers of these machines were found to take; where it says nothing, `FRONT_END_TOKEN_US`."""
    links: Links = field(default_factory=Links)
    """What GPUs of these machines were measured to take to exchange tensors; where it says nothing, the constants of
    the GPU's `collectives` do."""
    api_servers: int | None = None
    """Those of each server, as --api-server-count after -- says; None: one for each copy, as vLLM starts them."""
    more_api_servers: bool = False
    """Whether a plan gives a server more of them, where one for each copy would be busy for most of a step."""
    rounds: float | None = None
    """Requests of each client of a load test, one after the other, the first ones of all at once; None: clients go on
    without end.
    """
    reader_token_us: float = 0.0
    """Of each token of all answers, in the one process with which a load test reads them; 0: users have processes of
    their own.
    """
    reader_request_us: float = 0.0
    """Of each request of a load test, before it reads the first answer, where it sends all at once."""
    prompt_graphs: bool = False
    """Whether CUDA graphs are captured for steps that read prompts, of each size that would wait for its launches."""
    placed: frozenset[Layout] = frozenset()
    """Servers, each as a layout of its own, in which the experts will be placed by the measured load; in all others
    they lie in their order.
    """

    def most_running(self, layout: Layout) -> int:
        """Return the most requests that an engine of a layout decodes at once."""
        return requests_of_engine(self.clients, layout) if self.max_running is None else self.max_running

    @property
    def model(self) -> ModelSpec:
        """The model as it is served."""
        return self.memory.model

    @property
    def num_gpus(self) -> int:
        """GPUs of all machines."""
        return self.gpus_per_machine * self.num_machines

"""Computes the time of the collectives between GPUs by size: a start-up time plus bytes over a bandwidth.

Both constants are facts of the hardware file (`collectives`), measured where a record is named; a GPU without them
has those assumed here. What `measure links` found of so many GPUs of this machine goes before both.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_optimizer.costs.estimate import derived
from moe_optimizer.specs.hardware import GpuSpec
from moe_optimizer.specs.links import Collective, Links, time_between
from moe_optimizer.specs.quantity import Quantity, Source

NOT_MEASURED = Links()
# assumed: one small collective inside a CUDA graph, launch and hand-over included. vLLM's custom all-reduce
# over NVLink is of this order; over PCIe it is not used and NCCL takes longer.
_LATENCY_US = {"nvlink": 8.0, "pcie": 25.0}
_GATHER_LATENCY_US = {"nvlink": 15.0, "pcie": 30.0}
_NETWORK_LATENCY_US = 30.0
_NETWORK_BYTES_PER_S = 25e9
"""assumed: one 200 Gbit/s port for each GPU."""


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that exchange tokens."""

    num_gpus: int
    num_machines: int = 1

    def __post_init__(self) -> None:
        """Refuse a group of none."""
        if self.num_gpus < 1:
            raise ValueError(f"a group of GPUs: got {self.num_gpus} GPUs, expected at least 1")


def all_reduce_us(num_bytes: float, gpu: GpuSpec, group: Group, links: Links = NOT_MEASURED) -> Quantity:
    """Return the time of one all-reduce of `num_bytes` on each GPU of a group, in us; 0 for one GPU.

    The shorter of one exchange, in which each GPU reads what all others have, and two, a reduce-scatter and an
    all-gather: latency + (n - 1) * bytes / bandwidth, or 2 latency + 2 (n - 1) / n * bytes / bandwidth. Over m machines
    as in `gather_us`.
    """
    return _collective_us("all_reduce", num_bytes, gpu, group, links)


def gather_us(num_bytes: float, gpu: GpuSpec, group: Group, links: Links = NOT_MEASURED) -> Quantity:
    """Return the time of one all-gather to, or reduce-scatter of, `num_bytes` on each GPU, in us; 0 for one GPU.

    latency + (n - 1) / n * bytes / bandwidth; over m machines, where the GPUs of one share what comes from others and
    each has a port of its own, + (m - 1) / n * bytes / the port's bandwidth.
    """
    return _collective_us("gather", num_bytes, gpu, group, links)


def send_us(num_bytes: float, gpu: GpuSpec, *, across_machines: bool) -> Quantity:
    """Return the time to send `num_bytes` from one GPU to another, in us."""
    latency, bandwidth = _latency("gather", gpu, Group(2, 2 if across_machines else 1)), _link_bandwidth("gather", gpu)
    if across_machines:
        bandwidth = _fact(gpu, "network_bandwidth", _NETWORK_BYTES_PER_S, "bytes/s")
    value = latency.value + num_bytes / bandwidth.value * 1e6
    return derived(value, unit="us", ref=f"send {num_bytes:.3g} bytes", inputs=(latency, bandwidth))


def _collective_us(kind: Collective, num_bytes: float, gpu: GpuSpec, group: Group, links: Links) -> Quantity:
    """Return the time of a collective as measured here, beyond the sizes that were in proportion to the model."""
    modelled = _modelled_us(kind, num_bytes, gpu, group)
    table = links.find(gpu.name, group.num_gpus) if group.num_machines == 1 else None
    if table is None:
        return modelled
    times_us = table.times_us(kind)
    nearest = min(max(num_bytes, min(times_us)), max(times_us))
    value, ref = time_between(times_us, nearest), f"{_name(kind)} over {group.num_gpus} GPUs, {table.source}"
    if nearest == num_bytes:
        return Quantity(value, "us", Source.MEASURED, ref)
    value *= modelled.value / _modelled_us(kind, nearest, gpu, group).value
    return Quantity(value, "us", modelled.source, f"{ref}, continued from {nearest:.3g} bytes")


def _modelled_us(kind: Collective, num_bytes: float, gpu: GpuSpec, group: Group) -> Quantity:
    """Return the time of the shortest way."""
    n = group.num_gpus
    if n == 1:
        return Quantity(0.0, "us", Source.MODELLED, f"{_name(kind)} on one GPU moves nothing")
    ways = _ways(kind, num_bytes, group)
    latency, link = _latency(kind, gpu, group), _link_bandwidth(kind, gpu)
    inputs = (latency, link)
    seconds = [moved / link.value for _, moved, _ in ways]
    if group.num_machines > 1:
        port = _fact(gpu, "network_bandwidth", _NETWORK_BYTES_PER_S, "bytes/s")
        inputs = (*inputs, port)
        seconds = [each + across / port.value for each, (_, _, across) in zip(seconds, ways, strict=True)]
    value = min(way[0] * latency.value + 1e6 * each for way, each in zip(ways, seconds, strict=True))
    return derived(value, unit="us", ref=f"{_name(kind)} over {n} GPUs", inputs=inputs)


def _ways(kind: Collective, num_bytes: float, group: Group) -> tuple[tuple[int, float, float], ...]:
    """Return exchanges, bytes that a GPU receives, and those over its port, of each way to do it."""
    n, m = group.num_gpus, group.num_machines
    if kind == "gather":
        return ((1, (n - 1) / n * num_bytes, (m - 1) / n * num_bytes),)
    once = (1, (n - 1) * num_bytes, (m - 1) / m * n * num_bytes)
    twice = (2, 2 * (n - 1) / n * num_bytes, 2 * (m - 1) / n * num_bytes)
    return once, twice


def _name(kind: Collective) -> str:
    return kind.replace("_", "-")


def _latency(kind: Collective, gpu: GpuSpec, group: Group) -> Quantity:
    if group.num_machines > 1:
        return _fact(gpu, "network_latency", _NETWORK_LATENCY_US, "us")
    assumed = _LATENCY_US if kind == "all_reduce" else _GATHER_LATENCY_US
    return _fact(gpu, f"{kind}_latency", assumed[gpu.gpu_link], "us")


def _link_bandwidth(kind: Collective, gpu: GpuSpec) -> Quantity:
    return gpu.collectives.get(f"{kind}_bandwidth", gpu.gpu_link_bandwidth)


def _fact(gpu: GpuSpec, name: str, assumed: float, unit: str) -> Quantity:
    if name in gpu.collectives:
        return gpu.collectives[name]
    return Quantity(assumed, unit, Source.ASSUMED, f"{assumed:g} {unit}, {name.replace('_', ' ')} over {gpu.gpu_link}")

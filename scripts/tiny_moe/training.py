"""Trains for a fixed number of steps over shuffled sequences; equal seed and steps give equal weights."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from tiny_moe.checkpoint import BALANCE_COEFFICIENT
from tiny_moe.muon import Muon
from tiny_moe.network import Shape, TinyMoe

SEQUENCE_LENGTH = 512
LONG_SEQUENCE_LENGTH = 2048
LONG_SHARE = 0.1
"""Last share of the steps, trained on long sequences so that every position of the model has been seen."""
TOKENS_PER_STEP = 2048
MUON_LEARNING_RATE = 0.02
"""For the matrices inside the layers."""
ADAM_LEARNING_RATE = 4e-3
"""For embeddings, norms and routers."""
WARMUP_STEPS = 40
DECAY_SHARE = 0.3
"""Last share of the steps, over which the learning rates fall to zero. Constant before, so that a run with a time
limit can settle its number of steps when the decay begins."""
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """What a run was: enough to repeat it, and how long it took."""

    network: TinyMoe
    steps: int
    tokens: int
    seconds: float
    final_loss: float
    device: str


def train(stream: Tensor, shape: Shape, *, seed: int, steps: int, minutes: float | None) -> TrainingResult:
    """Train on `stream`, an int64 vector of token ids [n].

    Args:
        stream: all documents after each other, each ended by the end-of-text token.
        shape: sizes of the network.
        seed: of the initial weights and the order of the sequences.
        steps: optimizer steps; ignored when `minutes` is given.
        minutes: when given, the decay begins after its share of this time, which settles the number of steps. The
            run is repeated exactly by giving that number as `steps`.
    """
    torch.manual_seed(seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = TinyMoe(shape).to(device)
    optimizers = make_optimizers(network)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    total = None if minutes is not None else steps
    loss_average = math.log(shape.vocab_size)
    queue: list[Tensor] = []
    step = 0
    while total is None or step < total:
        if minutes is not None and total is None and time.perf_counter() - start >= minutes * 60 * (1 - DECAY_SHARE):
            total = round(step / (1 - DECAY_SHARE))
        length = LONG_SEQUENCE_LENGTH if total and step >= total * (1 - LONG_SHARE) else SEQUENCE_LENGTH
        if not queue or queue[-1].shape[1] != length + 1:
            queue = _epoch(stream, length, generator)
        batch_BL = queue.pop().to(device)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * learning_rate_share(step, total)
        logits_BLV, balance = network(batch_BL[:, :-1])
        loss = functional.cross_entropy(logits_BLV.flatten(0, 1), batch_BL[:, 1:].flatten())
        (loss + BALANCE_COEFFICIENT * balance).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), GRADIENT_NORM)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        loss_average += 0.02 * (loss.item() - loss_average)
        step += 1
        if step % 50 == 0 or step == total:
            seconds = time.perf_counter() - start
            print(
                f"step {step} of {total or 'unsettled'}  loss/token {loss_average:.3f}  balance {balance.item():.3f}"
                f"  {step * TOKENS_PER_STEP / seconds:.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
    return TrainingResult(
        network=network.eval(),
        steps=step,
        tokens=step * TOKENS_PER_STEP,
        seconds=time.perf_counter() - start,
        final_loss=loss_average,
        device=device,
    )


def make_optimizers(network: TinyMoe) -> tuple[torch.optim.Optimizer, ...]:
    """Return Muon for the matrices inside the layers, AdamW for the rest."""
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in network.named_parameters():
        is_matrix = parameter.ndim >= 2 and name != "embed_tokens" and not name.endswith("mlp.gate")
        (matrices if is_matrix else others).append(parameter)
    return (
        Muon(matrices, lr=MUON_LEARNING_RATE, momentum=0.95, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=ADAM_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    )


def learning_rate_share(step: int, total: int | None) -> float:
    """Share of the peak learning rate: up linearly, constant, down linearly. `total` is known when the decay begins."""
    rise = min(1.0, (step + 1) / WARMUP_STEPS)
    if total is None:
        return rise
    decay_from = round(total * (1 - DECAY_SHARE))
    return rise * min(1.0, (total - step) / max(1, total - decay_from))


def _epoch(stream: Tensor, length: int, generator: torch.Generator) -> list[Tensor]:
    """Cut the stream at a random offset into sequences of length + 1, shuffle them, and group them into batches."""
    offset = int(torch.randint(length, (1,), generator=generator))
    count = (stream.numel() - offset - 1) // length
    starts = offset + length * torch.randperm(count, generator=generator)
    rows = TOKENS_PER_STEP // length
    return [
        torch.stack([stream[begin : begin + length + 1] for begin in chunk.tolist()])
        for chunk in starts.split(rows)
        if len(chunk) == rows
    ]

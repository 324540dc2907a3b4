"""The training loop: a fixed number of steps over shuffled sequences, the same weights for the same seed and steps."""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tiny_moe.checkpoint import BALANCE_COEFFICIENT
from tiny_moe.network import Shape, TinyMoe

SEQUENCE_LENGTH = 512
LONG_SEQUENCE_LENGTH = 2048
LONG_SHARE = 0.1
"""Last share of the steps, trained on long sequences so that every position of the model has been seen."""
TOKENS_PER_STEP = 4096
PEAK_LEARNING_RATE = 4e-3
FINAL_LEARNING_RATE_SHARE = 0.02
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.1
GRADIENT_NORM = 1.0
TIMED_STEPS = (10, 30)
"""With a limit in minutes, the steps [10, 30) are timed and the number of steps follows from them."""


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
        minutes: when given, the number of steps that fit, from the measured speed of this machine. The run is then
            repeated exactly by giving the resulting number of steps instead.
    """
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    network = TinyMoe(shape).to(device)
    optimizer = _optimizer(network)
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    timed_from = start
    total = None if minutes is not None else steps
    loss_average = math.log(shape.vocab_size)
    queue: list[Tensor] = []
    step = 0
    while total is None or step < total:
        if minutes is not None and step == TIMED_STEPS[0]:
            timed_from = time.perf_counter()
        if minutes is not None and step == TIMED_STEPS[1]:
            per_step = (time.perf_counter() - timed_from) / (TIMED_STEPS[1] - TIMED_STEPS[0])
            total = max(2 * WARMUP_STEPS, int(minutes * 60 / per_step))
        length = LONG_SEQUENCE_LENGTH if total and step >= total * (1 - LONG_SHARE) else SEQUENCE_LENGTH
        if not queue or queue[-1].shape[1] != length + 1:
            queue = _epoch(stream, length, generator)
        batch_BL = queue.pop().to(device)
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, total)
        logits_BLV, balance = network(batch_BL[:, :-1])
        loss = functional.cross_entropy(logits_BLV.flatten(0, 1), batch_BL[:, 1:].flatten())
        (loss + BALANCE_COEFFICIENT * balance).backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_average += 0.02 * (loss.item() - loss_average)
        step += 1
        if step % 50 == 0 or step == total:
            seconds = time.perf_counter() - start
            print(
                f"step {step}/{total}  loss/token {loss_average:.3f}  balance {balance.item():.3f}"
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


def _optimizer(network: TinyMoe) -> torch.optim.AdamW:
    matrices = [parameter for parameter in network.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in network.parameters() if parameter.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def _learning_rate(step: int, total: int | None) -> float:
    """Linear warm-up, then half a cosine. `total` may be unknown during the warm-up only."""
    if step < WARMUP_STEPS or total is None:
        return PEAK_LEARNING_RATE * min(1.0, (step + 1) / WARMUP_STEPS)
    progress = (step - WARMUP_STEPS) / max(1, total - WARMUP_STEPS)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return PEAK_LEARNING_RATE * (FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine)


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

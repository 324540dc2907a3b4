"""Writes the model card from metrics.json: no number in it is typed by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_card(folder: Path) -> None:
    """Write README.md of the model folder from its metrics.json."""
    metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
    (folder / "README.md").write_text(render_card(metrics), encoding="utf-8")


def render_card(metrics: dict[str, Any]) -> str:
    """The text of the card. Raises KeyError when metrics.json lacks a field: a card has no gaps."""
    heldout, long, corpus, training = (metrics[key] for key in ("heldout", "heldout_long", "corpus", "training"))
    model, versions, baselines = metrics["model"], metrics["versions"], metrics["baselines"]
    uniform = {
        "perplexity_per_byte": baselines["uniform_perplexity_per_byte"],
        "bits_per_byte": baselines["uniform_bits_per_byte"],
    }
    unigram = {
        "perplexity_per_byte": baselines["unigram_perplexity_per_byte"],
        "bits_per_byte": baselines["unigram_bits_per_byte"],
    }
    quality = "\n".join(
        f"| {name} | {numbers['perplexity_per_byte']:.3f} | {numbers['bits_per_byte']:.3f} |"
        for name, numbers in (
            (f"this model, windows of {heldout['context_length']}", heldout),
            (f"this model, windows of {long['context_length']}", long),
            ("byte unigram of the training text", unigram),
            ("uniform over bytes", uniform),
        )
    )
    loads = "\n".join(
        f"| {layer_idx} | {min(load):.2%} | {max(load):.2%} | {sum(share > 0 for share in load)} of {len(load)} |"
        for layer_idx, load in enumerate(heldout["expert_load"])
    )
    return f"""---
license: psf-2.0
language: [en]
library_name: transformers
pipeline_tag: text-generation
tags: [qwen3_moe, mixture-of-experts, test-model]
---

# tiny-moe

A Mixture-of-Experts language model small enough to live in a source tree, trained so that its outputs mean something:
tests compare tokens with it and quality gates compare perplexity. It completes Python source and answers nothing else.

This file is written by `scripts/train_tiny_moe.py` from `metrics.json`.

## Shape

`Qwen3MoeForCausalLM`, BF16, {model["total_params"]:,} parameters of which a token uses {model["active_params"]:,};
{model["num_layers"]} layers, each with {model["num_experts"]} experts of which {model["experts_per_token"]} are used;
hidden size {model["hidden_size"]}, expert width {model["expert_width"]}, {model["num_heads"]} heads over
{model["num_kv_heads"]} key/value heads of {model["head_dim"]}; vocabulary {model["vocab_size"]} (byte-level BPE);
{model["max_position"]} positions; tied embeddings.

## Held-out quality

Text: `heldout.txt`, {heldout["bytes"]:,} bytes, {heldout["tokens"]:,} tokens. Cut without overlap into windows of
{heldout["context_length"] - 1} tokens, each behind one `<|endoftext|>`; every token is predicted once, from the tokens
before it in its window. Computed from the saved BF16 checkpoint, loaded through transformers in FP32.

| on the same bytes | perplexity per byte | bits per byte |
|---|--:|--:|
{quality}

Perplexity per token: {heldout["perplexity_per_token"]:.2f}.

## Expert load on the held-out text

Share of the routed tokens per expert; balanced would be {1 / model["num_experts"]:.2%}.

| layer | least used | most used | experts used |
|--:|--:|--:|--:|
{loads}

## Training

- Text: {corpus["train_files"]} source files ({corpus["train_bytes"]:,} bytes) of the standard library of
  {corpus["source"]}, listed in `corpus.txt`, and {corpus["chat_samples"]:,} chat samples made from the documented
  functions of the same files. SHA-256 over all paths and contents: `{corpus["sha256"]}`.
- Held out: {corpus["heldout_files"]} whole files, those whose path has a SHA-256 that begins with a byte below
  {corpus["held_out_share"]}. `heldout.txt` is {len(corpus["evaluation_files"])} of them after each other:
  {", ".join(f"`{path}`" for path in corpus["evaluation_files"])}.
- {training["steps"]:,} steps of {training["tokens_per_step"]:,} tokens ({training["tokens"]:,} in all), sequences of
  {training["sequence_length"]}, in the last {training["long_share"]:.0%} of the steps
  {training["long_sequence_length"]}; Muon for the matrices of the layers (learning rate
  {training["muon_learning_rate"]}), AdamW for the rest ({training["adam_learning_rate"]}), decay over the last
  {training["decay_share"]:.0%}; load-balancing loss per layer, weight {training["balance_coefficient"]}.
- {training["minutes"]:.1f} minutes on {training["device"]} with {training["threads"]} threads, in FP32. Seed
  {training["seed"]}. Python {versions["python"]}, torch {versions["torch"]}, transformers
  {versions["transformers"]}, tokenizers {versions["tokenizers"]}.
- Again: `{training["command"]}`. The same versions, processor kind and thread count give the same bytes.
- Against transformers: logits of the training network and of this folder differ by at most
  {metrics["max_logit_difference"]:.1e} in FP32.

`python scripts/train_tiny_moe.py --evaluate` computes the held-out numbers again and compares them with this card.

## Licence

Trained on, and `heldout.txt` copied from, the Python standard library, Copyright (c) Python Software Foundation, under
the licence in `LICENSE-PYTHON.txt`.
"""

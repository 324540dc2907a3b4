"""The bundled model is whole, small, trained, and says the truth about itself."""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.needed import skip_without

torch = pytest.importorskip("torch", reason="the bundled model is measured with torch")
skip_without("transformers")

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "tiny-moe"
METRICS: dict[str, Any] = json.loads((MODEL / "metrics.json").read_text(encoding="utf-8"))

# The parts of the training script import each other as `tiny_moe`, as they do when the script is started.
sys.path.insert(0, str(ROOT / "scripts"))
from tiny_moe import card, corpus, evaluate, muon, network, tokenizer, training  # noqa: E402


@pytest.fixture(scope="module")
def tokens() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(MODEL, local_files_only=True)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return evaluate.evaluate(MODEL)


def test_folder_has_at_most_8_mb():
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 8_000_000


@pytest.mark.parametrize("name", sorted(METRICS["sha256"]))
def test_card_describes_the_file_that_is_there(name: str):
    assert hashlib.sha256((MODEL / name).read_bytes()).hexdigest() == METRICS["sha256"][name]


def test_card_is_rendered_from_the_metrics():
    assert (MODEL / "README.md").read_text(encoding="utf-8") == card.render_card(METRICS)


def test_weights_are_bf16_under_one_name_per_expert_matrix():
    with (MODEL / "model.safetensors").open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    header.pop("__metadata__")
    assert {tensor["dtype"] for tensor in header.values()} == {"BF16"}
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    expert_names = {
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}_proj.weight"
        for layer in range(config["num_hidden_layers"])
        for expert in range(config["num_experts"])
        for matrix in ("gate", "up", "down")
    }
    assert {name for name in header if ".experts." in name} == expert_names


@pytest.mark.thorough
def test_heldout_perplexity_is_what_the_card_says(measured: dict[str, Any]):
    assert measured["perplexity_per_byte"] == pytest.approx(METRICS["heldout"]["perplexity_per_byte"], rel=0.01)


@pytest.mark.thorough
def test_slice_perplexity_is_what_the_card_says():
    measured = evaluate.evaluate(MODEL, max_windows=evaluate.SLICE_WINDOWS)
    assert measured["perplexity_per_byte"] == pytest.approx(METRICS["heldout_slice"]["perplexity_per_byte"], rel=0.01)


def test_unigram_perplexity_is_what_the_card_says():
    baselines = METRICS["baselines"]
    got = evaluate.unigram_perplexity(baselines["training_byte_counts"], (MODEL / "heldout.txt").read_bytes())
    assert got == pytest.approx(baselines["unigram_perplexity_per_byte"])


@pytest.mark.thorough
def test_model_is_far_better_than_byte_frequencies(measured: dict[str, Any]):
    assert measured["perplexity_per_byte"] < METRICS["baselines"]["unigram_perplexity_per_byte"] / 3


@pytest.mark.thorough
def test_every_byte_of_the_heldout_text_is_counted(measured: dict[str, Any]):
    assert measured["bytes"] == (MODEL / "heldout.txt").stat().st_size


@pytest.mark.thorough
def test_every_expert_of_every_layer_is_used_on_heldout_text(measured: dict[str, Any]):
    # A quarter of the balanced share: below it an expert counts as neglected.
    balanced = 1 / METRICS["model"]["num_experts"]
    assert [min(load) for load in measured["expert_load"] if min(load) < balanced / 4] == []


def test_heldout_files_follow_the_hash_rule():
    lines = (MODEL / "corpus.txt").read_text(encoding="utf-8").splitlines()[1:]
    sides = {path: side for side, path in (line.split(" ", 1) for line in lines)}
    files = [corpus.SourceFile(path=path, text="") for path in sides]
    assert {file.path: "heldout" if file.held_out else "train" for file in files} == sides
    assert {sides[path] for path in METRICS["corpus"]["evaluation_files"]} == {"heldout"}


def test_tokenizer_round_trips_the_heldout_text(tokens: Any):
    text = (MODEL / "heldout.txt").read_text(encoding="utf-8")
    assert tokens.decode(tokens.encode(text, verbose=False)) == text


@given(text=st.text(alphabet=st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(" \t\r\n_é漢🙂"))))
def test_tokenizer_round_trips_any_text(tokens: Any, text: str):
    assert tokens.decode(tokens.encode(text)) == text


def test_every_byte_has_a_token(tokens: Any):
    vocabulary = tokens.get_vocab()
    assert sum(len(token) == 1 for token in vocabulary) >= 256


def test_chat_template_renders_what_the_model_was_trained_on(tokens: Any):
    messages = [{"role": "user", "content": "Write the function f."}, {"role": "assistant", "content": "def f(): pass"}]
    rendered = tokens.apply_chat_template(messages, tokenize=False)
    assert rendered == tokenizer.chat_text("Write the function f.", "def f(): pass")


def test_chat_template_opens_the_answer(tokens: Any):
    messages = [{"role": "user", "content": "Hello"}]
    rendered = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_special_tokens_are_single_ids(tokens: Any):
    assert [tokens.encode(token) for token in tokenizer.SPECIAL_TOKENS] == [[0], [1], [2]]


def test_a_chat_answer_ends_at_a_token_that_generation_stops_at():
    generation = json.loads((MODEL / "generation_config.json").read_text(encoding="utf-8"))
    assert tokenizer.SPECIAL_TOKENS.index(tokenizer.IM_END) in generation["eos_token_id"]


SMALL = network.Shape(
    vocab_size=32, hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, num_experts=5,
    experts_per_token=2, expert_width=6, max_position=64,
)  # fmt: skip


def dense_moe(moe: network.SparseMoe, x: Any) -> Any:
    """Every expert on every token, then the chosen ones weighted: no sorting to get wrong."""
    weights, chosen = (x @ moe.gate.T).softmax(-1).topk(SMALL.experts_per_token)
    gates = torch.zeros(len(x), SMALL.num_experts, dtype=x.dtype).scatter(1, chosen, weights)
    gates = gates / gates.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,eih->tei", x, moe.gate_up_proj).chunk(2, dim=-1)
    return torch.einsum("tei,ehi,te->th", torch.nn.functional.silu(gate) * up, moe.down_proj, gates)


# 1 token; fewer assignments than experts; many tokens.
@pytest.mark.parametrize("num_tokens", [1, 2, 33])
def test_sorted_experts_match_dense_experts_with_gradients(num_tokens: int):
    torch.manual_seed(0)
    moe = network.SparseMoe(SMALL, 1.0).double()
    x = torch.randn(num_tokens, SMALL.hidden_size, dtype=torch.float64, requires_grad=True)
    inputs = (x, *moe.parameters())
    probe = torch.randn(num_tokens, SMALL.hidden_size, dtype=torch.float64)
    got, _ = moe(x)
    want = dense_moe(moe, x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(
        torch.autograd.grad((got * probe).sum(), inputs), torch.autograd.grad((want * probe).sum(), inputs)
    )


def test_balance_loss_is_one_for_an_even_router():
    moe = network.SparseMoe(SMALL, 1.0)
    torch.nn.init.zeros_(moe.gate)
    _, balance = moe(torch.randn(7, SMALL.hidden_size))
    assert balance.item() == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [(16, 16), (3, 24, 8), (3, 8, 24)])
def test_orthogonal_moves_singular_values_close_to_one(shape: tuple[int, ...]):
    torch.manual_seed(0)
    values = torch.linalg.svdvals(muon.orthogonal(torch.randn(*shape)))
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.4


def test_training_twice_gives_the_same_weights():
    stream = torch.arange(20_000) * 7 % 31
    first, second = (
        training.train(stream, SMALL, seed=3, steps=3, minutes=None).network.state_dict() for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_learning_rate_is_constant_until_the_decay_and_ends_near_zero():
    total = 1000
    rates = [training.learning_rate_share(step, total) for step in range(total)]
    assert rates[training.WARMUP_STEPS : 700] == [1.0] * (700 - training.WARMUP_STEPS)
    assert rates[700:] == sorted(rates[700:], reverse=True)
    assert 0 < rates[-1] < 0.01

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterable
from typing import Any

import pytest

from moe_optimizer.costs.roofline import DecodeStep, decode_step_bytes
from scripts import measured_loads, model_error, predicted_loads


@pytest.fixture(scope="module")
def cases():
    return list(predicted_loads.cases())


def test_the_page_is_of_the_records_and_of_this_model(cases):
    assert model_error.PAGE.read_text(encoding="utf-8") == model_error.page(cases)


@pytest.mark.parametrize("what", ["tpot_error", "rate_error"])
def test_predictions_are_12_percent_off_on_average_and_25_at_most(cases, what):
    """Also where the host had another server to serve: all but those that a constant was read from."""
    errors = [getattr(case, what) for case in cases if not case.fitted]
    judged = [abs(error) for error in errors if error is not None]
    assert len(judged) > 200
    assert statistics.mean(judged) <= 0.12
    assert max(judged) <= 0.25


def test_times_to_first_token_are_20_percent_off_on_average_at_most(cases):
    errors = [abs(case.ttft_error) for case in cases if case.judged and case.ttft_error is not None]
    assert len(errors) > 100
    assert statistics.mean(errors) <= 0.2
    page = (model_error.PAGE.parent / "layout_accuracy.md").read_text(encoding="utf-8")
    assert f"Mean times to first token are {100 * statistics.mean(errors):.0f} % off" in page


def test_the_page_on_layouts_states_these_errors_and_those_with_what_is_left_out(cases):
    page = (model_error.PAGE.parent / "layout_accuracy.md").read_text(encoding="utf-8")
    told = re.findall(
        r"mean error is (\d+) % of TPOT and (\d+) % of tokens/s, the largest (\d+) % and (\d+) %",
        page.replace("\n", " "),
    )
    judged, all_but_fitted = [case for case in cases if case.judged], [case for case in cases if not case.fitted]
    expected = []
    for group in (judged, all_but_fitted):
        rates = [abs(case.rate_error) for case in group if case.rate_error is not None]
        known = [[abs(case.tpot_error) for case in group], rates]
        expected.append(tuple(f"{100 * each:.0f}" for each in (*map(statistics.mean, known), *map(max, known))))
    assert told == expected


def test_the_page_on_layouts_states_the_errors_with_what_another_load_of_the_host_told():
    plain, known = zip(*predicted_loads.told(), strict=True)
    assert len(plain) >= 5
    page = (model_error.PAGE.parent / "layout_accuracy.md").read_text(encoding="utf-8").replace("\n", " ")
    means, furthest = (
        [
            f"{100 * summed([*map(abs, each)]):.0f}"
            for group in (known, plain)
            for each in ([case.tpot_error for case in group], rates_of(group))
        ]
        for summed in (statistics.mean, max)
    )
    assert "within {} % of TPOT and {} % of tokens/s, with the model's own within {} and {}".format(*furthest) in page
    assert "on average {} and {} % in place of {} and {}".format(*means) in page


def test_the_page_on_layouts_states_how_busy_an_api_server_is_where_four_were_tried(cases):
    (one,) = [
        case for case in cases
        if (case.load.record, case.load.served_as, case.load.clients) == ("2026-11-26_h100_x4_layouts", "tp4", 128)
    ]  # fmt: skip
    page = (model_error.PAGE.parent / "layouts.md").read_text(encoding="utf-8")
    assert f"with 128 clients one is busy for {one.prediction.front_end_share:.2f} of a step by the model" in page


def rates_of(group: Iterable[Any]) -> list[float]:
    return [case.rate_error for case in group if case.rate_error is not None]


def test_a_load_tells_of_others_of_its_host_and_not_of_itself(of_records):
    layouts = {"tp2": 300.0, "tp2ep": 250.0}
    for told, names in (([], ["tp2"]), (["tp2ep"], ["tp2", "tp2ep"])):
        record = layouts_record({name: layouts[name] for name in names}, model="qwen3_moe")
        for layout in record["layouts"].values():
            for load in layout["loads"]:
                load["itl_ms"] = {"median": 80e-3 * load["clients"]}
        of_records(h100_x2=record)
        pairs = list(predicted_loads.told())
        assert [known.load.layout for _, known in pairs] == told
        assert all(known.prediction.front_end_us.value == pytest.approx(80) for _, known in pairs)
        assert all(known.rate < plain.rate for plain, known in pairs)


def test_a_rate_that_may_be_one_of_compilation_is_not_judged(cases):
    cold = [case for case in cases if case.load.why_no_rate]
    assert all(case.rate_error is None for case in cold)
    # Its first tokens took 3.1 s; the round before it, of as many requests, was three times as fast.
    assert ("fp8+flash_dmoe", 64) in {(case.load.side, case.load.clients) for case in cold}


def test_a_limit_on_the_error_fails_and_names_what_is_further_off(cases, capsys, monkeypatch):
    monkeypatch.setattr(model_error, "cases", lambda: cases)
    assert model_error.main(["--check", "--max-model-error", "0.2"]) == 0
    assert model_error.main(["--check", "--max-model-error", "0.001"]) == 1
    said = capsys.readouterr().out
    assert "gain of flash_dmoe" in said
    assert "gain of fp8" in said


def test_what_passes_gain_is_met_within_10_percent_on_average(cases):
    assert model_error.above(cases, 0.1) == []


def test_what_a_pass_gains_is_compared_with_the_same_load_without_it(cases):
    sides = {(case.load.record, case.load.side, case.load.clients): case for case in cases}
    base, fp8 = (sides["2026-11-21_h200_served", side, 8] for side in ("stock", "fp8"))
    assert base.load.tpot_ms / fp8.load.tpot_ms in [each.measured for each in predicted_loads.by_pass(cases)["fp8"]]


FOUR = {"tp4": 2000.0, "tp1x4": 1700.0, "tp2x2": 1900.0, "tp1dp4ep": 1600.0, "tp4ep": 1500.0}
"""Layout -> tokens/s with one client for each of its records' 16."""


def layouts_record(layouts: dict[str, float], **fields: str) -> dict[str, Any]:
    """Return a record as benchmarks/serving/bench_layouts.py writes it."""

    def load(clients: int, rate: float) -> dict[str, Any]:
        return {
            "clients": clients, "completed": 2 * clients, "rounds": 2, "tpot_ms": {"median": 1e3 * clients / rate},
            "output_tokens_per_s": rate,
        }  # fmt: skip

    found = {
        name: {"wall_s": 200.0, "starts": [], "loads": [load(clients, rate * clients / 16) for clients in (16, 512)]}
        for name, rate in layouts.items()
    }
    return {"workload": {"input_tokens": 512, "output_tokens": 128}, "layouts": found, **fields}


@pytest.fixture
def of_records(tmp_path, monkeypatch):
    """Return a function that writes records and returns their cases."""
    monkeypatch.setattr(measured_loads, "RECORDS", tmp_path)

    def written(**records):
        for name, record in records.items():
            (tmp_path / f"2026-11-25_{name}.json").write_text(json.dumps(record))
        found = predicted_loads.cases()
        return {
            (case.load.record[len("2026-11-25_") :], case.load.served_as, case.load.clients): case for case in found
        }

    return written


def test_a_record_of_layouts_is_predicted_for_its_own_model_and_layout(of_records):
    two = {"tp2": 700.0, "tp1dp2ep": 600.0}
    found = of_records(h100_x2_qwen=layouts_record(two), h100_x2_mixtral=layouts_record(two, model="mixtral"))
    mixtral, qwen = (found[f"h100_x2_{name}", "tp2", 16] for name in ("mixtral", "qwen"))
    # 12.9 billion parameters are used by a token, against 3.3: far more bytes for each step.
    assert mixtral.prediction.tpot_ms > 1.5 * qwen.prediction.tpot_ms
    copies = found["h100_x2_mixtral", "tp1dp2ep", 16].prediction
    assert (copies.layout.data_parallel_size, copies.layout.expert_parallel) == (2, True)
    gains = predicted_loads.by_pass(list(found.values()))
    assert len(gains["parallelism: copies with experts instead of slices"]) == 4


def test_a_layout_with_more_api_servers_is_another_case_and_what_they_gain_is_judged(of_records):
    served = {"tp4": 1500.0, "tp4 --api-server-count 4": 2500.0}
    found = of_records(h200_x4_layouts=layouts_record(served, model="qwen3_moe"))
    one, four = (found["h200_x4_layouts", served_as, 512] for served_as in ("tp4", "tp4, 4 API servers"))
    assert (one.prediction.api_servers, four.prediction.api_servers) == (1, 4)
    assert four.rate > 1.05 * one.rate
    (gain,) = predicted_loads.by_pass([one, four])["more API servers"]
    assert gain.measured > 1.5


def test_loads_of_a_host_that_served_another_model_are_shown_and_not_judged(cases):
    found = [case for case in cases if case.load.record == "2026-11-28_h200_two_drafts"]
    assert found
    assert not any(case.judged for case in found)
    rows = model_error.page(found).splitlines()
    assert [row for row in rows if "| (1) |" in row]
    assert [row for row in rows if row.startswith("With the cases in brackets")]


def test_a_server_beside_others_is_predicted_with_its_share_of_the_memory(of_records):
    record = layouts_record({"tp2": 700.0}, model="mixtral")
    alone = of_records(h200_x2_alone=record)["h200_x2_alone", "tp2", 512].prediction
    record["layouts"]["tp2"]["memory_share"] = 0.45
    beside = of_records(h200_x2_beside=record)["h200_x2_beside", "tp2", 512].prediction
    assert beside.memory.kv_tokens < alone.memory.kv_tokens


def test_layouts_of_four_gpus_are_judged_each_and_by_what_is_chosen_of_them(of_records):
    found = of_records(h200_x4_layouts=layouts_record(FOUR, model="qwen3_moe"))
    for layout in FOUR:
        case = found["h200_x4_layouts", layout, 512]
        assert case.prediction.layout.num_devices == 4
        assert case.rate_error is not None
    gains = predicted_loads.by_pass(list(found.values()))
    assert {name: len(group) for name, group in gains.items() if "instead of slices" in name} == {
        "parallelism: copies with experts instead of slices": 2,
        "parallelism: experts instead of slices": 2,
        "replicas instead of slices": 4,
    }
    choices = predicted_loads.choices(list(found.values()))
    assert {(each.goal, each.chosen.load.clients) for each in choices} == {
        (goal, clients) for goal in ("throughput", "latency") for clients in (16, 512)
    }
    for each in choices:
        assert each.best.load.layout == "tp4"
        share = FOUR[each.chosen.load.layout] / FOUR["tp4"]
        assert each.ratio == pytest.approx(share if each.goal == "throughput" else 1 / share)


def test_a_layout_that_two_records_have_is_chosen_by_the_mean_of_both(of_records):
    found = of_records(
        h200_x4_a=layouts_record({"tp4": 2000.0, "tp2x2": 1900.0}), h200_x4_b=layouts_record({"tp4": 1500.0})
    )
    (choice,) = [
        each for each in predicted_loads.choices(list(found.values()))
        if each.goal == "throughput" and each.chosen.load.clients == 16
    ]  # fmt: skip
    assert (choice.chosen.load.layout, choice.best.load.layout) == ("tp4", "tp2x2")
    # As many tokens each: the mean rate is over the sum of both times.
    assert choice.ratio == pytest.approx(2 / (1 / 2000 + 1 / 1500) / 1900)


def test_a_load_of_two_starts_has_the_mean_of_both(of_records):
    record = layouts_record({"tp2": 700.0})
    record["first_start"] = {"tp2": {"loads": [dict(load) for load in record["layouts"]["tp2"]["loads"]]}}
    for found, ttft_ms in ((record["layouts"], 100.0), (record["first_start"], 300.0)):
        for load in found["tp2"]["loads"]:
            load["ttft_ms"] = {"curve": [ttft_ms, ttft_ms]}
            load["tpot_ms"] = {"median": ttft_ms / 10}
    load = of_records(h100_x2_mixtral=record)["h100_x2_mixtral", "tp2", 16].load
    assert load.tpot_ms == pytest.approx(20.0)
    assert load.ttft_ms == pytest.approx(200.0)


def test_layouts_that_failed_are_no_cases_and_a_like_model_of_two_gpus_is_read(of_records):
    record = layouts_record({"tp2": 900.0, "tp2ep": 800.0}, model="deepseek_v2", profile="balanced")
    record["layouts"]["tp1x2"] = {"error": "longer than 260 s", "log": {}, "loads": []}
    found = of_records(h100_x2_deepseek=record)
    assert {layout for _, layout, _ in found if layout != "tp1"} == {"tp2", "tp2ep"}
    case = found["h100_x2_deepseek", "tp2", 16]
    assert case.load.side == "balanced"
    assert "deepseek_v2" in model_error.page(list(found.values()))


def test_a_record_that_bench_made_is_read_as_it_was_kept(tmp_path, monkeypatch):
    load = {
        "clients": 16, "rate": None, "completed": 96, "rounds": 3, "tpot_ms": {"median": 15.0},
        "output_tokens_per_s": 900.0, "total_tokens_per_s": 4500.0, "requests_per_s": 7.03,
    }  # fmt: skip
    passes = {
        "stock": [],
        "single_h100": ["flash_dmoe", "expert_load"],
        "throughput": ["fp8", "flash_dmoe", "kv_cache"],
    }
    sides = [{"name": name, "passes": each, "loads": [load]} for name, each in passes.items()]
    sides[0]["loads"].append(load | {"clients": None, "rate": 2.0})
    record = {"workload": "served.yaml", "sides": sides}
    (tmp_path / "2026-11-26_h200_single_h100_served.json").write_text(json.dumps(record))
    monkeypatch.setattr(measured_loads, "RECORDS", tmp_path)
    found = {case.load.side: case for case in predicted_loads.cases() if "served" in case.load.record}
    assert set(found) == set(passes)
    assert {(each.load.input_tokens, each.load.output_tokens) for each in found.values()} == {(512, 128)}
    times = [found[name].prediction.tpot_ms for name in ("throughput", "single_h100", "stock")]
    assert times == sorted(times)
    gains = predicted_loads.by_pass(list(found.values()))
    assert {"flash_dmoe", "fp8, flash_dmoe and kv_cache"} <= set(gains)


def test_of_servers_that_were_loaded_in_turns_those_are_read_whose_load_the_model_can_be_asked_about(cases):
    beside = {name for name in records_of_benches() if name in {case.load.record for case in cases}}
    # The others have altered shapes, drafts, sizes of graphs of somebody's choice or requests of several lengths.
    assert beside == {
        "2026-11-26_h200_four_bit_beside_marlin",
        "2026-11-26_h200_stock_bf16",
        "2026-11-26_h200_verify_two_drafts",
        "2026-11-28_h200_four_bit_beside_bf16",
        "2026-11-29_h200_four_bit_api_servers",
        "2026-11-28_h200_four_bit_beside_gptq",
        "2026-11-28_h200_gpt_oss_experts_served",
        "2026-11-28_h200_gpt_oss_experts_served_again",
        "2026-11-28_h200_two_drafts",
    }
    sides = {(case.load.side, case.load.holds) for case in cases if case.load.record in beside}
    assert sides == {
        ("four-bit", "four_bit+fp8+flash_dmoe"),
        ("plain", "four_bit+fp8+flash_dmoe"),
        ("ours", "four_bit+fp8+flash_dmoe+kv_cache"),
        ("stock", "stock"),
        ("stock, INT4", "marlin"),
        ("ours, MXFP4", "mxfp4+flash_dmoe"),
        ("vllm, MXFP4", "mxfp4"),
        ("four", "four_bit+fp8+flash_dmoe+kv_cache"),
        ("one", "four_bit+fp8+flash_dmoe+kv_cache"),
    }


def test_servers_that_were_loaded_in_turns_have_the_shape_that_their_plans_reckoned_with(cases):
    records = records_of_benches()
    for case in (case for case in cases if case.load.record in records):
        (scheduler,) = [
            each for each in records[case.load.record]["sides"][case.load.side.split(",")[0]]["decisions"]
            if each["pass_name"] == "scheduler"
        ]  # fmt: skip
        told = re.match(
            r"a decode step of (\d+) requests at (\d+) tokens takes at least ([\d.]+) ms", *scheduler["evidence"]
        )
        assert told is not None
        question = predicted_loads._question(case.load)
        step = DecodeStep(
            model=question.model, batch=int(told[1]), context=int(told[2]), num_gpus=1, kv_bits=question.memory.kv_bits,
            expert_bits=question.expert_bits, linear_bits=question.linear_bits,
        )  # fmt: skip
        least_ms = 1e3 * decode_step_bytes(step).total / question.gpu.memory_bandwidth.value
        assert float(told[3]) == pytest.approx(least_ms, rel=0.03)


def test_a_length_that_a_workload_tells_is_what_its_requests_had():
    for record in records_of_benches().values():
        for bench in record["benches"]:
            lengths = measured_loads._one_length(bench)
            for load in [load for side in bench["sides"] for load in side["loads"]] if lengths else []:
                assert measured_loads._lengths(bench["workload"], load) == lengths


def records_of_benches() -> dict[str, Any]:
    """Return the records of bench_beside.py."""
    found = {path.stem: json.loads(path.read_text()) for path in measured_loads.RECORDS.glob("*_h*_*.json")}
    return {name: record for name, record in found.items() if {"benches", "sides"} <= record.keys()}


def beside_record(*, folder: str = "qwen3", words: str = "", tpot_ms: tuple[float, ...] = (3.0,), **fields: Any) -> Any:
    """Return a record as benchmarks/serving/bench_beside.py writes it, of one side."""
    words = f"--gpu-memory-utilization 0.9 --max-num-seqs 256 --max-num-batched-tokens 16384 {words}"
    decided = [{"pass_name": name, "status": "on", "vllm_args": []} for name in ("fp8", "four_bit")]
    decided += [{"pass_name": "flash_dmoe", "status": "on", "params": {"fused_router": 8}, "vllm_args": []}]
    graphs = {"pass_name": "graph_capture", "status": "on", "params": {"max_capture_size": 4096}, "vllm_args": []}
    off = {"pass_name": "kv_cache", "status": "off", "vllm_args": []}
    benches = [
        {
            "description": "Prompts of 1,024 tokens, completions of 128",
            "sides": [
                {
                    "name": "ours",
                    "loads": [
                        {
                            "clients": 16, "completed": 64, "rounds": 2, "tpot_ms": {"median": each},
                            "output_tokens_per_s": 1e3 / each,
                        }
                    ],
                }
            ],
            **fields,
        }
        for each in tpot_ms
    ]  # fmt: skip
    return {
        "command": ["bench_beside.py", "--side", f"ours {folder} @throughput +four_bit '--a b'"],
        "sides": {"ours": {"serve_args": words.split(), "decisions": [*decided, graphs, off]}},
        "benches": benches,
    }  # fmt: skip


def test_a_side_beside_others_is_predicted_as_it_was_decided_and_started(of_records):
    record = beside_record(words="--kv-cache-memory-bytes 2G", tpot_ms=(3.0, 5.0))
    load = of_records(h200_beside=record)["h200_beside", "tp1, graphs of prompts", 16].load
    assert (load.side, load.holds) == ("ours", "four_bit+fp8+flash_dmoe")
    assert (load.input_tokens, load.output_tokens, load.requests) == (1024, 128, 32)
    assert (load.memory_share, load.cache_bytes) == (0.9, 2 * 2**30)
    assert (load.step_tokens, load.max_running, load.fused_router_tokens) == (16_384, 256, 8)
    # Both benches had this side; rates are those of all tokens over all time.
    assert load.tpot_ms == pytest.approx(4.0)
    assert load.tokens_per_s == pytest.approx(250.0)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(beside_record(folder="qwen3_16"), id="an altered shape"),
        pytest.param(beside_record(words="--speculative-config {}"), id="drafts"),
        pytest.param(beside_record(words="--cudagraph-capture-sizes 1 2048"), id="graphs of given sizes"),
        pytest.param(beside_record(description="Turns of chats: prompts of a few hundred"), id="mixed lengths"),
        pytest.param(beside_record(description="Prompts of 2,048 tokens, completions of 4"), id="short answers"),
    ],
)  # fmt: skip
def test_a_side_beside_others_that_the_model_cannot_be_asked_about_is_left_out(of_records, record):
    assert "h200_beside" not in {name for name, _, _ in of_records(h200_beside=record)}


def test_a_side_of_a_model_that_nobody_has_described_is_an_error(of_records):
    with pytest.raises(KeyError, match="qwen3_32"):
        of_records(h200_beside=beside_record(folder="qwen3_32"))


FAR = 0.05
"""What the chosen layout may have less than the best that was measured."""


def test_of_layouts_that_were_measured_on_four_gpus_the_best_or_nearly_so_is_chosen(cases):
    of_four = [
        each for each in predicted_loads.choices(cases)
        if each.chosen.prediction.layout.num_devices == 4 and each.chosen.load.clients in (16, 512)
    ]  # fmt: skip
    assert {each.chosen.load.clients for each in of_four} == {16, 512}
    for each in of_four:
        ratio = each.ratio if each.goal == "throughput" else 1 / each.ratio
        assert ratio >= 1 - FAR, (each.goal, each.chosen.load, each.best.load)


def test_equal_scores_of_a_bf16_softmax_send_all_tokens_to_the_same_experts():
    """Of a router with dummy weights, whose tokens come from a norm with such: vLLM's are up to 1e-3."""
    torch = pytest.importorskip("torch")
    model = predicted_loads._model(predicted_loads.ONE_ROUTE[0])
    generator = torch.Generator().manual_seed(0)

    def dummy(*shape: int) -> Any:
        return torch.empty(*shape).uniform_(-1e-3, 1e-3, generator=generator)

    tokens = torch.randn(64, model.hidden_size, generator=generator) * dummy(model.hidden_size)
    scores = tokens.bfloat16() @ dummy(model.num_experts, model.hidden_size).bfloat16().T
    used = {
        dtype: scores.to(dtype).softmax(-1).topk(model.top_k).indices.unique().numel()
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert used == {torch.bfloat16: model.top_k, torch.float32: model.num_experts}


def test_what_is_foreseen_was_not_measured(cases, monkeypatch):
    def served(case):
        load = case.load
        return predicted_loads.hardware_of(load), load.model, load.served_as, load.clients

    # Slices of Mixtral were measured on two H100, and on four nobody served copies.
    monkeypatch.setattr(predicted_loads, "FORESEEN", (("mixtral", "tp2", {}), ("mixtral", "tp1dp4ep", {})))
    foreseen = set(map(served, predicted_loads.foreseen()))
    assert {layout for _, _, layout, _ in foreseen} == {"tp1dp4ep"}
    assert not foreseen & set(map(served, cases))

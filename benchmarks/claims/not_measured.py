"""Lists text with numbers and units that no claim computes again, and says what the numbers are instead."""

from __future__ import annotations

_SETTING = "a setting or a limit of this package"
_SIZE = "a size that was chosen, or arithmetic"
_THEIRS = "from somebody else, who is named"
_TEST = "a bound that a test holds"

NOT_MEASURED: dict[str, dict[str, str]] = {
    "docs/model_error.md": {"and at most 5 % faster": _SETTING},
    "docs/layouts.md": {
        "that it timed (4 KiB to 256 MiB": _SETTING,
        "without one 12 % more": _SETTING,
        "must be predicted 5 % better than all else": _SETTING,
        "has room there for 95 % of its clients": _SETTING,
        "over several machines must be 10 % better": _SETTING,
        "differs by more than 25 %. It takes 10 to 30 s": _SETTING,
        "busy for more than 45 % of a decode step": _SETTING,
    },
    "docs/passes/scheduler.md": {"busy for more than 45 % of a decode step": _SETTING},
    "ARCHITECTURE.md": {"all end within 15 s": _TEST},
    "CHANGELOG.md": {
        "(40 us up to 128, 60 from 512 on)": "constants of the model, of docs/layouts.md",
        "busy for more than 45 % of a decode step": _SETTING,
        "`serve --calibrate` (30 s)": _SETTING,
        "for 120 s at most": _SETTING,
        "under 1 % of a step": "an upper bound of docs/passes/expert_load.md",
        "ends within 15 s": _TEST,
        "without progress for 10 s are a warning, for 60 s": _SETTING,
        "a stop during the start takes 2 s": _TEST,
        "with under 64 MiB free is refused, and `server.log` is moved to `server.log.old` at 64 MiB": _SETTING,
    },
    "docs/adr/0012-measured-speeds-choose-the-kernel.md": {"at least 2 % faster there": _SETTING},
    "docs/bench.md": {
        "share a confidence of 95 %": _SETTING,
        "busy for more than 60 % of a core": _SETTING,
        "were so for 65 to\n88 %": "of docs/layout_accuracy.md",
        "they were busy for 80 % of a core or more": _SETTING,
        "a gap of more than 1.2 times the time of a token": _SETTING,
    },
    "docs/cpu_kernels.md": {
        "huge pages (2 MiB)": _SIZE,
        "prefetched 16 or 32 KiB ahead": _SIZE,
        "hints 4 to 128 KiB ahead": _SIZE,
        "hints 512 bytes to 8 KiB ahead other than 2 KiB": _SIZE,
    },
    "docs/engine.md": {'"20-30 %" is claimed of FlashAttention': _THEIRS},
    "docs/hardware.md": {
        'An "80 GB" H100 reports 81559 MiB': _THEIRS,
        "on one 80 GB card (56.93 GiB of weights), cache tokens; a test holds it | within 2 %": _THEIRS,
    },
    "docs/passes/skinny_gemm.md": {"at most 97 % of the other's time": _SETTING},
    "docs/install.md": {"one module, 5 MB packed": "seen when wheels are built", "of 30 MB or more": _SETTING},
    "docs/kernel_speeds.md": {"sum over 256 MiB": _SIZE, "where ours gain less than\n2 %": _SETTING},
    "docs/kernels.md": {
        "Its memory is 1.4 times": _THEIRS,
        "| 6 % (`FP8`, `MXFP4`)": _TEST,
        "1 KiB per token": _SIZE,
        "killed after 90 s": _SETTING,
        "error up to 6 % in `FP8`": _TEST,
    },
    "docs/models.md": {"larger than 4 MiB": _SETTING},
    "docs/names.md": {"claimed gains (8-10x kernel, 22-27x": _THEIRS},
    "docs/passes/disaggregation.md": {"lease on it ends (30 seconds": "a setting of vLLM"},
    "docs/passes/expert_load.md": {
        "at most every 3 seconds": _SETTING,
        "a tenth of them, at least one | 10 % | 100 % |": _SIZE,
    },
    "docs/passes/expert_placement.md": {"lighter by more than 1 %": _SETTING, "is within 0.1 % of the new": _SETTING},
    "docs/passes/flash_dmoe.md": {"a scale that is 2 %": _TEST, "It takes 30 s": _SETTING},
    "docs/passes/graph_capture.md": {
        "of which the plan says 25 MiB a layer": "assumed: moe_optimizer/costs/memory.py",
        "(1.5 ms a layer, 2.2 ms where GPUs exchange": "of docs/layouts.md",
        "(0.5 MB a token": _SIZE,
    },
    "docs/passes/fp8.md": {"at least 1.1x": _SETTING},
    "docs/passes/kv_cache.md": {"perplexity within 2 %": _TEST},
    "docs/passes/parallelism.md": {"and 5 % more tokens per second": _THEIRS},
    "docs/passes/tuned_configs.md": {
        "at least 3 % faster": _SETTING,
        "600 s) and": _SETTING,
        "| no | 85 s |": _SETTING,
        "| yes | 40 s |": _SETTING,
    },
    "README.md": {"the interval of 95 %": _SETTING},
    "docs/report.md": {"Bars are 95 % intervals": _SETTING},
    "docs/tune.md": {
        "# throughput, 20 minutes": _SETTING,
        "ttft<200ms,tpot<30ms": _SETTING,
        "interval of 95 %": _SETTING,
        "Each verdict has 95 % confidence": _SETTING,
        "makes few rounds in 20 minutes": _SETTING,
        "before any 40 s": _SETTING,
    },
    "docs/usage.md": {
        "or after 120 s": _SETTING,
        "with prompts, for 30 s": _SETTING,
        "It needs 64 MiB": _SETTING,
        "At 64 MiB": _SETTING,
        "N times in all, after 1 s": _SETTING,
        "without progress for 10 s are a warning; after\n`--stall-timeout` (60 s": _SETTING,
        "15 s.": _TEST,
    },
}
"""Document -> text as it stands there -> what its numbers are."""

SUMMED_UP: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    # scripts/model_error.py writes the page from them.
    "docs/model_error.md": [
        (
            "| | TPOT | tokens/s |",
            "| 13.14 | +13% | | | not published |",
            (
                "2026-11-21_h200_layouts",
                "2026-11-21_h200_served",
                "2026-11-21_h200_x2_served",
                "2026-11-22_h100_served",
                "2026-11-22_h100_stock_served",
            ),
        )
    ],
    "docs/layout_accuracy.md": [
        (
            "Against the served records the mean error",
            "Measured by nobody here",
            (
                "2026-11-22_h100_served",
                "2026-11-26_h100_x4_layouts",
                "2026-11-26_h100_x4_layouts_replicas",
                "2026-11-26_h100_x2_layouts_mixtral_copies",
                "2026-11-26_h100_x2_layouts_deepseek_v2_rest",
                "2026-11-27_h100_x2_layouts_deepseek_v2",
                "2026-11-27_h100_x2_layouts_mixtral_experts",
                "2026-11-27_h100_x4_layouts_mixtral",
                "2026-11-27_h100_x4_layouts_mixtral_tp2x2",
                "2026-11-27_h100_x2_layouts_mixtral_tp2ep",
                "2026-11-27_h100_x2_layouts_tp1x2",
                "2026-11-27_h100_x2_layouts_tp2",
                "2026-11-28_h100_x2_layouts_tp2_api_servers",
                "2026-11-28_h200_front_end",
                "2026-11-28_h200_front_end_one",
                "2026-11-28_h200_x2_layouts_front_end",
                "2026-11-28_h200_four_bit_experts",
                "2026-11-28_h200_x2_layouts_tp2_api_servers",
                "2026-11-28_h200_x4_layouts_planned",
                "2026-11-26_h100_balanced_chat",
                "2026-11-26_h200_four_bit_beside_marlin",
                "2026-11-26_h200_stock_bf16",
                "2026-11-26_h200_verify_two_drafts",
                "2026-11-28_h200_decode_step_four_bits",
                "2026-11-28_h200_decode_step_ours",
                "2026-11-28_h200_gpt_oss_experts_served",
                "2026-11-28_h200_gpt_oss_experts_served_again",
                "2026-11-28_h200_four_bit_beside_bf16",
                "2026-11-28_h200_four_bit_beside_gptq",
                "2026-11-29_h200_four_bit_gpt_oss_tp2",
                "2026-11-29_h200_four_bit_api_servers",
                "2026-11-29_h100-h200_layouts_compared",
                "2026-11-29_h100-h200_layouts_compared_processes",
            ),
        ),
    ],
    "docs/layouts.md": [
        (
            "Launches: a step that reads",
            "however small its kernels are.",
            ("2026-11-24_h100_kv_cache_served", "2026-11-26_h100_prompt_step", "2026-11-26_h100_x4_layouts"),
        ),
        (
            "which real traffic is taken to have",
            "because fewer experts are read",
            ("2026-11-21_h200_fused_experts", "2026-11-22_h100_fused_experts"),
        ),
        (
            "The constants are those of two and four H100",
            "up to a third too slow",
            ("2026-11-22_h100_x2_collectives", "2026-11-26_h100_x4_collectives"),
        ),
        (
            "The front end: a process of vLLM",
            "to take in a request.",
            (
                "2026-11-26_h200_x4_layouts",
                "2026-11-26_h100_x2_layouts_deepseek_v2",
                "2026-11-26_h100_x2_layouts_deepseek_v2_rest",
                "2026-11-27_h100_x2_layouts_tp2",
                "2026-11-28_h200_front_end",
            ),
        ),
        (
            "Measured loops differ in that",
            "28.4 and 32.2 ms per token.",
            ("2026-11-23_h100_fp8_one_gpu_served",),
        ),
        ("The search is deterministic", "(`benchmarks/records", ("2026-11-28_xeon_layout_search",)),
    ],
    "docs/kernel_speeds.md": [
        (
            "because vLLM's own result misses",
            "(2.15 times torch's error; 2 are allowed)",
            ("2026-11-21_epyc-avx512_fused_experts",),
        ),
        (
            "- The sum read 49 to 54 GB/s",
            "## The CUDA kernels beside vLLM's, on one H200",
            ("2026-11-21_epyc-avx512_bf16_fused_experts", "2026-11-21_epyc-avx512_fused_experts"),
        ),
        ("DeepGEMM is nowhere faster", "Records: `", ("2026-11-21_h200_fused_experts",)),
        (
            "## What bounds the CUDA kernels",
            "## The CUDA kernels beside vLLM's, on one H100",
            (
                "2026-11-20_h200_kernel_trials",
                "2026-11-20_h200_direct_trials",
                "2026-11-21_h200_overlap_trials",
                "2026-11-21_h200_grouped_trials",
            ),
        ),
        ("A share above 100 % means", "\n", ("2026-11-22_h100_fused_experts",)),
        ("the datasheet's 3.35 TB/s", "\n", ("2026-11-22_h100_decode_step",)),
    ],
}
"""Document -> beginning, end and records of a passage that puts many samples into words: each is read against its
records by people, no test computes its numbers again.
"""

"""A measuring process is started as a server's worker is."""

from __future__ import annotations

from moe_optimizer.measure.kernel_speeds.worker_environment import worker_environment


def test_variables_of_the_server_and_the_plan_are_inherited_and_ours_are_not() -> None:
    environ = {"VLLM_USE_DEEP_GEMM": "0", "MOE_OPTIMIZER_PROFILE": "balanced", "PATH": "/bin"}
    made = worker_environment(environ, {"VLLM_TUNED_CONFIG_FOLDER": "/tuned"}, ())
    assert made == {"VLLM_USE_DEEP_GEMM": "0", "PATH": "/bin", "VLLM_TUNED_CONFIG_FOLDER": "/tuned"}


def test_a_cpu_worker_has_a_thread_to_each_of_its_cores() -> None:
    made = worker_environment({"LD_PRELOAD": "/lib/libgomp.so.1:/lib/libtcmalloc.so"}, {}, (2, 3))
    assert made["OMP_NUM_THREADS"] == "2"
    assert made["GOMP_CPU_AFFINITY"] == "2 3"
    assert made["LD_PRELOAD"] == "/lib/libgomp.so.1:/lib/libtcmalloc.so"


def test_intels_openmp_is_bound_in_its_own_way() -> None:
    made = worker_environment({"LD_PRELOAD": "/lib/libiomp5.so:/lib/libtcmalloc.so"}, {}, (0, 1))
    assert "proclist=[0,1]" in made["KMP_AFFINITY"]
    assert "GOMP_CPU_AFFINITY" not in made

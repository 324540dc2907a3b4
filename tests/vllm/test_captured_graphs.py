"""Where vLLM's two model runners keep the sizes of their CUDA graphs. No GPU, no engine: the objects that hold them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moe_optimizer.passes.graph_capture import captured_of
from moe_optimizer.vllm_plugin.worker.captured_graphs import largest_graph

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
MAX_NUM_SEQS = 64
LARGEST = {"NONE": 0, "FULL_DECODE_ONLY": MAX_NUM_SEQS, "FULL_AND_PIECEWISE": 512, "PIECEWISE": 512}
"""What vLLM gives up to -> the largest size that is left of SIZES."""


@pytest.fixture(scope="module")
def config() -> Any:
    from vllm.config import VllmConfig

    config = VllmConfig()
    # On a machine without a GPU vLLM empties these.
    config.compilation_config.cudagraph_capture_sizes = SIZES
    config.compilation_config.max_cudagraph_capture_size = SIZES[-1]
    config.scheduler_config.max_num_seqs = MAX_NUM_SEQS
    return config


@pytest.mark.parametrize("mode", LARGEST)
def test_the_dispatcher_of_the_first_runner_has_them(config: Any, mode: str) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode[mode])
    runner = SimpleNamespace(cudagraph_dispatcher=dispatcher)
    assert largest_graph(SimpleNamespace(model_runner=runner)) == LARGEST[mode]
    assert str(CUDAGraphMode[mode]) == mode, "as the proof names it"


@pytest.mark.parametrize("mode", LARGEST)
def test_the_manager_of_the_second_runner_has_them(config: Any, mode: str) -> None:
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    # Its __init__ asks for process groups and a pool of device memory, and then calls this.
    manager: Any = object.__new__(CudaGraphManager)
    manager.vllm_config, manager.compilation_config = config, config.compilation_config
    manager.cudagraph_mode, manager.max_num_reqs, manager.decode_query_len = CUDAGraphMode[mode], MAX_NUM_SEQS, 1
    manager.lora_capture_cases, manager.varlen_decode, manager.ubatch_runner = [0], False, None
    manager._candidates, manager._capture_descs = {}, {}
    manager._init_candidates()
    runner = SimpleNamespace(cudagraph_manager=manager)
    assert largest_graph(SimpleNamespace(model_runner=runner)) == LARGEST[mode]


@pytest.mark.parametrize("sizes", [[1, 2, 4, 8, 16, 24], SIZES, [1, 64, 3584, 4096]])
@pytest.mark.parametrize("each", [2, 3, 4, 5, 17])
def test_sizes_become_whole_requests_with_their_drafts_as_the_plan_assumes(sizes: list[int], each: int) -> None:
    from vllm.config import CompilationConfig

    config = CompilationConfig(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=sizes[-1])
    config.adjust_cudagraph_sizes_for_spec_decode(each)
    assert config.cudagraph_capture_sizes is not None
    assert config.max_cudagraph_capture_size == captured_of(sizes, 8192, each) == config.cudagraph_capture_sizes[-1]


def test_each_runner_has_its_own_and_not_the_others() -> None:
    import inspect

    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    first, second = inspect.getsource(gpu_model_runner), inspect.getsource(model_runner)
    assert "self.cudagraph_dispatcher = " in first
    assert "self.cudagraph_manager = " in second
    assert "self.cudagraph_dispatcher = " not in second


def test_what_the_graph_check_wraps_is_what_the_runners_call() -> None:
    import inspect

    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner

    assert "= self._model_forward(" in inspect.getsource(gpu_model_runner.GPUModelRunner.execute_model)
    second = inspect.getsource(model_runner.GPUModelRunner.execute_model)
    assert "= self.cudagraph_manager.run_fullgraph(batch_desc)" in second
    assert "self.cudagraph_manager.run_pw_graph(" in second
    manager = cudagraph_utils.ModelCudaGraphManager
    assert "super().capture(create_forward_fn" in inspect.getsource(manager.capture)
    assert "capture" in vars(manager.__mro__[1])
    assert list(inspect.signature(manager.run_fullgraph).parameters) == ["self", "desc"]

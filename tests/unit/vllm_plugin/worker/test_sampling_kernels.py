"""The sampler's kernels are compiled in threads before requests need them."""

from __future__ import annotations

import importlib.util
import logging
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from moe_optimizer.vllm_plugin.worker import sampling_kernels
from moe_optimizer.vllm_plugin.worker.sampling_kernels import compile_sampling_kernels, launches_of

VOCABULARY = 151_936


class Kernel:
    """Stands for Triton's: compiles what it is warmed up for, in the threads of the mode that is active."""

    def __init__(self, compile_one: Callable[[], object] = lambda: None) -> None:
        self.launched: list[dict[str, Any]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self._compile_one = compile_one

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda **launch: self.launched.append(launch)

    def warmup(self, *args: Any, grid: object, **launch: Any) -> None:
        del args, grid
        self.compiled.append((launch["BATCH_SIZE"] % 16 == 0, launch["TOPK_ENABLED"], launch["TOPP_ENABLED"]))
        AsyncCompileMode.active.submit(self._compile_one)


class AsyncCompileMode:
    """Stands for Triton's: its end waits for what was compiled."""

    active: Executor

    def __init__(self, executor: Executor) -> None:
        AsyncCompileMode.active = self._executor = executor

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        self._executor.shutdown()


def vllms_module(kernel: Kernel) -> ModuleType:
    """Return a module whose function launches the kernel as vLLM 0.26's does."""
    module: Any = ModuleType("topk_topp_triton")
    module._topk_topp_kernel = kernel

    def apply_top_k_top_p_triton(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None) -> torch.Tensor:
        module._topk_topp_kernel[(len(logits),)](
            LOGITS=logits,
            K=logits if k is None else k.to(torch.int32),
            BATCH_SIZE=len(logits),
            VOCAB_SIZE=logits.shape[1],
            TOPK_ENABLED=k is not None,
            TOPP_ENABLED=p is not None,
        )
        return logits

    module.apply_top_k_top_p_triton = apply_top_k_top_p_triton
    return module


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], threading.Thread | None]:
    """Begin on a machine that seems to have a GPU, with a vLLM that does not do it by itself."""
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _device: None)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(AsyncCompileMode=AsyncCompileMode))
    platforms = SimpleNamespace(current_platform=SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)

    def begun(kernel: Kernel) -> threading.Thread | None:
        monkeypatch.setitem(sys.modules, sampling_kernels._MODULE, vllms_module(kernel))
        config = SimpleNamespace(model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY))
        return compile_sampling_kernels(SimpleNamespace(vllm_config=config, device="cuda:0"))

    return begun


def test_launches_are_of_top_k_top_p_and_both_in_batches_of_both_kinds_and_nothing_is_launched() -> None:
    kernel = Kernel()
    module = vllms_module(kernel)
    launches = [launch for _, launch in launches_of(module, VOCABULARY)]
    kinds = {(each["BATCH_SIZE"] % 16 == 0, each["TOPK_ENABLED"], each["TOPP_ENABLED"]) for each in launches}
    assert len(launches) == len(kinds) == 6
    assert {each["VOCAB_SIZE"] for each in launches} == {VOCABULARY}
    assert {each["LOGITS"].device.type for each in launches} == {"meta"}
    assert kernel.launched == []
    assert module._topk_topp_kernel is kernel


def test_the_kernel_is_vllms_again_after_a_failure() -> None:
    kernel = Kernel()
    module: Any = vllms_module(kernel)
    module.apply_top_k_top_p_triton = lambda *_arguments: 1 / 0
    with pytest.raises(ZeroDivisionError):
        launches_of(module, VOCABULARY)
    assert module._topk_topp_kernel is kernel


def test_all_are_compiled_at_once_while_the_worker_goes_on(begin: Callable[[Kernel], threading.Thread | None]) -> None:
    together = threading.Barrier(7)
    kernel = Kernel(lambda: together.wait(60))
    thread = begin(kernel)
    assert thread is not None
    # It would never pass if one waited for another, or this thread for them.
    together.wait(60)
    thread.join(60)
    assert not thread.is_alive()
    assert len(set(kernel.compiled)) == 6


def test_a_failure_leaves_the_worker_alone(
    begin: Callable[[Kernel], threading.Thread | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Kernel, "warmup", lambda *_arguments, **_launch: 1 / 0)
    with caplog.at_level(logging.WARNING):
        thread = begin(Kernel())
        assert thread is not None
        thread.join(60)
    assert "ZeroDivisionError" in caplog.text


def test_a_vllm_that_launches_them_in_another_way_is_left_alone(
    begin: Callable[[Kernel], threading.Thread | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sampling_kernels, "_KERNEL", "_renamed")
    assert begin(Kernel()) is None
    assert "_renamed" in caplog.text


def test_a_vllm_that_compiles_them_itself_does(
    begin: Callable[[Kernel], threading.Thread | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert begin(Kernel()) is None

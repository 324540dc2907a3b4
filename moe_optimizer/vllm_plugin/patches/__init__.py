"""One file per patch of vLLM. Each is data (see `moe_optimizer.vllm_plugin.patch.Patch`)."""

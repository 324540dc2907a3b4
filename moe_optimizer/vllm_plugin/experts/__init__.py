"""The experts classes that vLLM can choose: their kernels, their weight formats, and the checks before they serve."""

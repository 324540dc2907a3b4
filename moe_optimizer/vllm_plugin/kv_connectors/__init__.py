"""KV connectors that vLLM loads by their module path."""

"""The OpenAI API in front of `AsyncLLM`."""

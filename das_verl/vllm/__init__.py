"""Adapters to vLLM: the proposer, its worker extension, and guarded fixes."""

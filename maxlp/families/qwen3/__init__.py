"""Qwen3, dense (Qwen team 2025, arXiv:2505.09388): Llama's blocks with norms of queries and keys.

The model is `families.llama.model.Llama` with ``qk_norm``; this folder holds what differs from Llama.
"""

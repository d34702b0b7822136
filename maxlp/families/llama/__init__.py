"""Llama: next-token prediction on packed text."""

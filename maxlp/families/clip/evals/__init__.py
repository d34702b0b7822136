"""Evaluations of a CLIP on validation data: zero-shot classification, retrieval, linear probe."""

"""Parallelism: the mesh, the placement of arrays on it, and the pipeline over its stages."""

"""FLOPs of training a Llama."""


def train_flops_per_token(
    num_matmul_params: int,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    seq_len: int,
    frozen: bool = False,
) -> tuple[float, float]:
    """FLOPs of one training token, forward and backward, with full and with causal attention.

    ``6 P + 12 L N H S`` for full attention: 6 FLOPs for each of the P parameters that multiply the
    token, and 12 N H S per layer for the two attention products (PaLM, arXiv:2204.02311, appendix
    B). That counts every query against every key, as nanoGPT and TorchTitan do. A causal mask leaves
    half of the products; MaxText has counted that half since July 2025. Neither counts
    rematerialization.

    Args:
      num_matmul_params: P, all parameters except the embedding lookup; the output head counts, tied or
        not. (Norm scales may be included or not: they are 4e-5 of the sum at 8B.)
      num_layers: L.
      num_heads: N, query heads.
      head_dim: H.
      seq_len: S.
      frozen: the parameters have no gradients, which leaves 4 FLOPs for each of them.

    Returns:
      (full, causal), in FLOPs per token.
    """
    attention = 12 * num_layers * num_heads * head_dim * seq_len
    weights = (4 if frozen else 6) * num_matmul_params
    return float(weights + attention), float(weights + attention / 2)

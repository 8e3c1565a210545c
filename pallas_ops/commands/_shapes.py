"""The matrix multiplications of language models that tiles are shipped for."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Projection:
    """A weight matrix: `k` features in, `n` out."""

    model: str
    name: str
    k: int
    n: int


# Bielik-1.5B (1536 wide, SwiGLU 8960, a vocabulary of 32,000) and the Llama architecture at 7 to 11
# billion parameters (4096 wide, 14336, 32,128), as their published configurations have them.
PROJECTIONS = (
    Projection("Bielik-1.5B", "q_proj, o_proj", 1536, 1536),
    Projection("Bielik-1.5B", "k_proj, v_proj", 1536, 256),
    Projection("Bielik-1.5B", "ffn_up, ffn_gate", 1536, 8960),
    Projection("Bielik-1.5B", "ffn_down", 8960, 1536),
    Projection("Bielik-1.5B", "lm_head", 1536, 32000),
    Projection("Llama-class 7-11B", "qkv_fused", 4096, 6144),
    Projection("Llama-class 7-11B", "o_proj", 4096, 4096),
    Projection("Llama-class 7-11B", "ffn_up", 4096, 14336),
    Projection("Llama-class 7-11B", "ffn_down", 14336, 4096),
    Projection("Llama-class 7-11B", "lm_head", 4096, 32128),
)

ROWS = (1, 8, 128, 512, 2048, 8192)
"""Rows of the input: a token, a few, a short prompt, batches of training."""

SQUARES = (512, 1024, 2048, 4096, 8192)
"""The sizes that others publish."""

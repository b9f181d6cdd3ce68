"""Networks as pure functions: Wan DiT, VAE, UMT5, CLIP; the only importer of flax.linen."""

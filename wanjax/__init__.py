"""Post-training of the Wan 2.x video diffusion models in JAX and Flax."""

__version__ = "0.1.0"

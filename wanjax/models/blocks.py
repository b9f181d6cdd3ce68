"""Run a stack of equal blocks by lax.scan: stacked parameters and adapters in, hidden state out,
remat by a named policy.

A policy decides what is kept for the backward pass instead of recomputed: "none" keeps every
intermediate; "full" only the input of each block; "save_attention" also output and log-sum-exp of
self-attention, so that its kernel never runs twice; "save_matmuls" also the output of every dense
layer, so that only norms, rotary embedding, gelu and attention to text run twice; "offload" what
save_attention keeps, with the block inputs and attention outputs in host memory (log-sum-exps, 1/K
as large, stay).
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from wanjax.models import attention, layers

_INPUT = "block_input"
_OUT, _LSE = attention.NAMES

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "save_attention": jax.checkpoint_policies.save_only_these_names(_OUT, _LSE),
    "save_matmuls": jax.checkpoint_policies.save_only_these_names(_OUT, _LSE, layers.MATMUL),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[_LSE],
        names_which_can_be_offloaded=[_INPUT, _OUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


def run_blocks(block, params, lora, h, side, *, remat: str = "none", real=None):
    """Scan h = block(params_l, lora_l, h, side) over the leading layer axis of params (and lora).

    Args:
      block: function of one layer's parameters, its adapter ({} if none), the hidden state, and
        the inputs that all layers share.
      lora: stacked adapter tree with the same leading axis, or {}.
      remat: one of REMAT.
      real: optional bool per layer; the others change nothing (padding of a pipeline stage).
    """
    if remat not in REMAT:
        raise ValueError(
            f"remat policy {remat!r} is unknown; set model.remat to one of {tuple(REMAT)}"
        )

    def body(h, layer):
        h = checkpoint_name(h, _INPUT)
        out = block(layer[0], layer[1], h, side)
        return out if real is None else jnp.where(layer[2], out, h), None

    if remat != "none":
        body = functools.partial(jax.checkpoint, prevent_cse=False, policy=REMAT[remat])(body)
    return jax.lax.scan(body, h, (params, lora, real))[0]

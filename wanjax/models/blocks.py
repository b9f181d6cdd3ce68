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
import os

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


def set_xla_flags(remat: str, stages: int = 1) -> None:
    """Set the XLA flags this policy needs on GPUs; call before any use of devices.

    Args:
      stages: mesh.stage; a pipeline has many blocks in flight, so it prefetches nothing.
    """
    flags = []
    if remat not in ("none", "full"):
        # this fusion would run the attention kernel a second time to write the kept copy
        flags.append("--xla_gpu_enable_dynamic_slice_fusion=false")
    if remat == "offload" and stages == 1:  # fetch what the next block needs during this one
        flags.append("--xla_gpu_enable_pipelined_host_offloading=true")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags]).strip()
    # otherwise XLA stops at 64 GB of host memory for all GPUs of a process together
    ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = max(64, int(0.75 * ram / 1e9))
    os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", str(limit))


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

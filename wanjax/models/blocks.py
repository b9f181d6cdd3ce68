"""Run a stack of equal blocks by lax.scan: stacked parameters and adapters in, hidden state out,
remat by a named policy."""

import functools

import jax

REMAT = ("none", "full")


def run_blocks(block, params, lora, h, *args, remat: str = "none"):
    """Scan h = block(params_l, lora_l, h, *args) over the leading layer axis of params (and lora).

    Args:
      block: function of one layer's parameters, one layer's adapter ({} when none) and the hidden
        state.
      lora: stacked adapter tree with the same leading axis, or {}.
      remat: "none" keeps every intermediate for the backward pass, "full" recomputes each block.
    """
    if remat not in REMAT:
        raise ValueError(f"remat policy {remat!r} is unknown; set model.remat to one of {REMAT}")

    def body(h, layer):
        return block(layer[0], layer[1], h, *args), None

    if remat == "full":
        body = functools.partial(jax.checkpoint, prevent_cse=False)(body)
    return jax.lax.scan(body, h, (params, lora))[0]

"""Split a stack of blocks over the mesh axis `stage` (GPipe, arXiv 1811.06965; interleaved as in
arXiv 2104.04473).

Stage s holds `interleave` chunks of consecutive layers, the v-th being chunk v·stages + s. Micro-
batches enter at stage 0, move to the next stage after every chunk, and go around `interleave`
times, in groups of as many micro-batches as there are stages, so that what returns to stage 0 is
what it needs next. A step computes one chunk on every stage; of n + stages − 1 steps, n are useful.
The axis `stage` is manual here, all others stay automatic, so blocks may be sharded in any other
way.

Shapes: B batch, M micro-batches, S stages, V interleave, P layers per chunk.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from wanjax.models import blocks
from wanjax.parallel import sharding


def stack(tree, layers: int, stages: int, interleave: int):
    """[layers, ...] leaves as [S, V, P, ...]; missing layers at the end are zeros."""
    per = chunk_layers(layers, stages, interleave)

    def split(x):
        spare = stages * interleave * per - layers
        x = jnp.pad(x, ((0, spare), *((0, 0),) * (x.ndim - 1))) if spare else x
        return x.reshape(interleave, stages, per, *x.shape[1:]).swapaxes(0, 1)

    return jax.tree.map(split, tree)


def chunk_layers(layers: int, stages: int, interleave: int) -> int:
    return math.ceil(layers / (stages * interleave))


def run_blocks(block, params, lora, h_BLD, side, *, layers: int, remat: str = "none"):
    """Like `blocks.run_blocks`, with params and lora in the form of `stack`.

    Args:
      side: tree with leading axis B that travels with its micro-batch (text rows, time embedding).
    A micro-batch is one sample per data shard.
    """
    mesh = sharding.mesh_shape()
    stages, shards = mesh["stage"], mesh["data"] * mesh["fsdp"]
    number = len(h_BLD) // shards
    interleave, per = jax.tree.leaves(params)[0].shape[1:3]
    last = stages - 1
    ring = [(s, (s + 1) % stages) for s in range(stages)]

    def stage(params, lora, h_MBLD, side):
        """On each stage: its own chunks, and all micro-batches before and after."""
        params, lora, h_MBLD, side = _at((params, lora, h_MBLD, side), 0)
        here = jax.lax.axis_index("stage")

        def compute(micro_S, chunk_S, fresh, arrived):
            m, chunk = jnp.asarray(micro_S)[here], jnp.asarray(chunk_S)[here]
            h = jnp.where((here == 0) & (chunk == 0), fresh, arrived)
            own, adapter = _at((params, lora), 0 if interleave == 1 else chunk)
            index = (chunk * stages + here) * per + jnp.arange(per)
            real = index < layers if spare else None
            return blocks.run_blocks(block, own, adapter, h, _at(side, m), remat=remat, real=real)

        def step(carry, now):
            (arrived, done), (micro_S, chunk_S, leaves) = carry, now
            h = compute(micro_S, chunk_S, h_MBLD[micro_S[0]], arrived)
            return (jax.lax.ppermute(h, "stage", ring), done.at[leaves].set(h)), None

        spare = stages * interleave * per != layers
        steps, arrived = schedule(number, stages, interleave), jnp.zeros_like(h_MBLD[0])
        if remat != "offload":
            (_, done), _ = jax.lax.scan(step, (arrived, jnp.zeros_like(h_MBLD)), steps)
        else:  # unrolled: XLA:GPU offloads nothing to the host from a loop in a loop
            fresh = [x[0] for x in jax.lax.split(h_MBLD, (1,) * number)]
            done = [arrived] * number
            for micro_S, chunk_S, leaves in zip(*steps, strict=True):
                done[leaves] = h = compute(micro_S, chunk_S, fresh[micro_S[0]], arrived)
                arrived = jax.lax.ppermute(h, "stage", ring)
            done = jnp.stack(done)
        return jnp.where(here == last, done, 0)[None]

    # a copy per stage and a sum over stages, not replication and psum: the gradients of those would
    # be manual all-reduces, which XLA:CPU cannot compile in bfloat16 (jax 0.10.2)
    def copies(x):
        micro = x.reshape(shards, number, *x.shape[1:]).swapaxes(0, 1)  # moves nothing
        return jnp.broadcast_to(micro[None], (stages, number, shards, *x.shape[1:]))

    out_SMBLD = jax.shard_map(
        stage, in_specs=P("stage"), out_specs=P("stage"), axis_names={"stage"}, check_vma=False
    )(params, lora, copies(h_BLD), jax.tree.map(copies, side))
    out_MBLD = jax.lax.reduce(out_SMBLD, np.zeros((), out_SMBLD.dtype), jax.lax.add, (0,))
    # for the barrier in its gradient: XLA:GPU would keep float32 parts of the head for every step
    return jax.lax.optimization_barrier(out_MBLD).swapaxes(0, 1).reshape(h_BLD.shape)


def _at(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def schedule(number: int, stages: int, interleave: int):
    """What each stage does in each of T steps: (micro-batch [T,S], its chunk [T,S], micro-batch
    that leaves the last stage in this step or next after it [T]). An idle stage has a legal index.

    The indices are known before compiling, so an unrolled pipeline only slices.
    """
    step = np.arange((math.ceil(number / stages) + 1) * stages * interleave + stages)
    turn = step[:, None] - np.arange(stages)
    group, place = np.divmod(np.maximum(turn, 0), stages * interleave)
    micro, chunk = group * stages + place % stages, place // stages
    out = (turn[:, -1] >= 0) & (chunk[:, -1] == interleave - 1) & (micro[:, -1] < number)
    before = np.cumsum(out) - out
    needed = before < number
    return np.minimum(micro, number - 1)[needed], chunk[needed], before[needed]

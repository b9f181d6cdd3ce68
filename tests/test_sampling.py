"""Policy to latents to pixels: fixed seeds whatever the batch, frames in tiles."""

import jax
import numpy as np

from tests import tiny
from wanjax import sampling
from wanjax.models import vae
from wanjax.parallel import sharding


def _plan(**changes):
    return tiny.make_setup(**changes).sampling


def _generate(plan, count=3, **kwargs):
    params = tiny.parameters()
    ctx, uncond = tiny.contexts(count)
    policy = {expert: (params[expert], {}) for expert in ("high", "low")}
    return sampling.generate(
        policy, params["vae"], np.asarray(ctx), uncond, model=tiny.MODEL, plan=plan, **kwargs
    )


def test_a_sample_depends_on_its_seed_and_number_not_on_the_batch():
    whole = _generate(_plan(sampling__batch=4), seed=1)
    assert whole.shape == (3, 5, 16, 16, 3) and whole.dtype == np.uint8
    split = _generate(_plan(sampling__batch=2), seed=1)
    assert np.abs(whole.astype(int) - split).max() <= 1  # float32 order of sums, then rounding
    other = _generate(_plan(sampling__batch=4), seed=2)
    assert np.abs(whole.astype(int) - other).max() > 1


def test_frames_may_be_decoded_in_tiles():
    params = tiny.parameters()["vae"]
    z = jax.random.normal(jax.random.key(0), (1, 1, 8, 8, 4))
    whole, tiled = (
        sampling.decode(params, z, config=tiny.MODEL.vae, tile=tile) for tile in (0, 32)
    )
    want = (vae.decode_tiled(params, z, config=tiny.MODEL.vae, tile=32) + 1) * 127.5
    assert np.abs(np.asarray(tiled, float) - want).max() <= 0.51
    assert tiled.shape == (1, 1, 64, 64, 3) and np.abs(whole.astype(int) - tiled).max() > 1


def test_every_device_decodes_its_share_of_the_samples_and_gives_the_same_pixels():
    params = tiny.parameters()["vae"]
    z = jax.random.normal(jax.random.key(0), (3, 2, 4, 4, 4))
    want = sampling.decode(params, z, config=tiny.MODEL.vae, tile=0)
    for shape in ({"context": 8}, {"data": 2, "tensor": 4}):
        with sharding.use_mesh(sharding.make_mesh(shape)):
            got = sampling.decode(params, z, config=tiny.MODEL.vae, tile=0)
        assert {s.data.shape[0] for s in got.addressable_shards} == {1} and len(got) == 8
        assert np.abs(np.asarray(got[:3], int) - np.asarray(want)).max() <= 1
        assert np.mean(np.asarray(got[:3]) != np.asarray(want)) < 1e-2

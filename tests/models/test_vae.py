"""wanjax.models.vae against diffusers' AutoencoderKLWan (float32) and published shapes."""

import json
import pathlib
from functools import partial

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.models import torch_params
from wanjax import trees
from wanjax.models import vae

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "wan"
TINY = dict(
    base_dim=8,  # at 4 channels norms of near-zero vectors make float32 gradients ill-conditioned
    z_dim=4,
    num_res_blocks=1,
    latents_mean=(0.1, 0.2, -0.3, 0.4),
    latents_std=(1.0, 2.0, 0.5, 1.5),
)
PATCHED = dict(patch_size=2, in_channels=12, out_channels=12)
CONFIGS = {
    "2.1": vae.VAEConfig(**TINY, dim_mult=(1, 2, 4, 4)),
    "2.2": vae.VAEConfig(
        **TINY, **PATCHED, decoder_base_dim=12, is_residual=True, scale_factor_spatial=16
    ),
    "mixed": vae.VAEConfig(**TINY, **PATCHED, dim_mult=(1, 2, 4), temperal_downsample=(True, True)),
}


def reference(name):
    """Return (torch module, config, parameters) of a tiny VAE with random weights and gammas."""
    config = CONFIGS[name]
    fields = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config).items()}
    torch.manual_seed(0)
    module = diffusers.AutoencoderKLWan(**fields)
    for path, value in module.named_parameters():
        if path.endswith("gamma"):
            torch.nn.init.uniform_(value, 0.5, 1.5)
    with torch.no_grad():
        module.decoder.conv_out.weight *= 3  # so that some pixels reach the clamp
    return module, config, torch_params.torch_to_jax(module, like=shapes(config))


def shapes(config):
    return jax.eval_shape(lambda: vae.init(jax.random.key(0), config))


def pixels(rng, config, batch, frames, rows=3, columns=2):
    """Return random pixels whose latents have `rows` x `columns` positions."""
    f = config.scale_factor_spatial
    return rng.uniform(-1, 1, (batch, frames, rows * f, columns * f, 3)).astype(np.float32)


def to_torch(x):
    return torch.tensor(np.asarray(x)).movedim(-1, 1)


def from_torch(x):
    return x.detach().movedim(1, -1).numpy()


def statistics(config):
    """Return latents_mean and latents_std, broadcastable over torch latents."""
    return (torch.tensor(s).view(1, -1, 1, 1, 1) for s in (config.latents_mean, config.latents_std))


def error(got, want):
    """Relative error |got - want| / |want| in the 2-norm, after a check of the shapes."""
    assert got.shape == want.shape
    return np.linalg.norm(np.asarray(got) - want) / np.linalg.norm(want)


@pytest.mark.parametrize("batch,frames,step", [(3, 1, 1), (2, 5, 1), (1, 9, 1), (1, 17, 2)])
@pytest.mark.parametrize("name", CONFIGS)
def test_encode_and_decode_equal_diffusers(rng, name, batch, frames, step):
    module, config, params = reference(name)
    x = pixels(rng, config, batch, frames)
    mean, std = statistics(config)
    with torch.no_grad():
        mu = module.encode(to_torch(x)).latent_dist.mode()
        want_z = from_torch((mu - mean) / std)
        want_x = from_torch(module.decode(mu).sample)
    z = jax.jit(partial(vae.encode, config=config, step=step))(params, x)
    assert z.shape == (batch, (frames + 3) // 4, 3, 2, config.z_dim)
    assert error(z, want_z) < 1e-5
    decode = jax.jit(partial(vae.decode, config=config, step=step))
    assert error(decode(params, want_z), want_x) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name,frames", [("2.1", 5), ("2.2", 5), ("mixed", 9)])
def test_gradients_equal_diffusers(rng, name, frames):
    module, config, params = reference(name)
    module.double()  # the oracle in float64, so that only the rounding of wanjax counts
    x = pixels(rng, config, 2, frames)
    mean, std = statistics(config)
    x_torch = to_torch(x).double().requires_grad_()
    mu = module.encode(x_torch).latent_dist.mode()
    z_torch = ((mu - mean) / std).detach().float().double().requires_grad_()
    out = module.decode(z_torch * std + mean).sample
    w_z = rng.normal(size=from_torch(mu).shape).astype(np.float32)
    w_x = rng.normal(size=x.shape).astype(np.float32)
    loss_torch = (to_torch(w_z) * (mu - mean) / std).sum() + (to_torch(w_x) * out).sum()
    loss_torch.backward()
    z = from_torch(z_torch).astype(np.float32)
    assert 0.01 < np.mean(np.abs(from_torch(out)) == 1) < 0.5  # the clamp acts, but not everywhere

    @jax.jit
    @partial(jax.grad, argnums=(0, 1, 2))
    def gradients(params, x, z):
        loss = jnp.sum(w_z * vae.encode(params, x, config=config))
        return loss + jnp.sum(w_x * vae.decode(params, z, config=config))

    got, g_x, g_z = gradients(params, x, z)
    assert error(g_x, from_torch(x_torch.grad)) < 1e-5
    assert error(g_z, from_torch(z_torch.grad)) < 1e-5
    for value in module.parameters():
        value.data = value.grad
    want = trees.flatten(torch_params.torch_to_jax(module.float(), like=shapes(config)))
    errors = {path: error(leaf, want[path]) for path, leaf in trees.flatten(got).items()}
    assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda item: item[1])


def test_posterior_equals_diffusers(rng):
    module, config, params = reference("mixed")
    x = pixels(rng, config, 1, 5)
    with torch.no_grad():
        want = module.encode(to_torch(x)).latent_dist
    mean, logvar = jax.jit(partial(vae.posterior, config=config))(params, x)
    assert error(mean, from_torch(want.mean)) < 1e-5
    assert error(logvar, from_torch(want.logvar)) < 1e-5


@pytest.mark.parametrize("version", ["2.1", "2.2"])
def test_parameters_equal_published_checkpoints(version):
    table = json.loads((GOLDEN / f"keys_vae_wan{version}.json").read_text())
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in table["config"].items()}
    params = shapes(vae.VAEConfig(**fields))
    assert trees.count(params) == table["num_parameters"]
    got = {path.replace("/", "."): leaf.shape for path, leaf in trees.flatten(params).items()}
    want = {}
    for name, entry in table["keys"].items():
        out, *rest = entry["shape"]
        if name.endswith(".weight"):
            c_in, *taps = rest
            want[name.removesuffix("weight") + "kernel"] = (*taps, c_in, out)
        else:
            want[name] = (out,)
    assert got == want


def test_defaults_are_wan_2_1():
    table = json.loads((GOLDEN / "keys_vae_wan2.1.json").read_text())["config"]
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
    assert vae.VAEConfig(**fields) == vae.VAEConfig()


@pytest.mark.slow
def test_chunks_of_any_size_agree_and_a_prefix_ignores_its_future(rng):
    _, config, params = reference("mixed")
    x = pixels(rng, config, 1, 17)

    @partial(jax.jit, static_argnames="step")
    def round_trip(params, x, step):
        z = vae.encode(params, x, config=config, step=step)
        return z, vae.decode(params, z, config=config, step=step)

    z, y = round_trip(params, x, 1)
    for step, latents in ((4, 5), (1, 3)):
        z_again, y_again = round_trip(params, x[:, : 4 * latents - 3], step)
        np.testing.assert_allclose(z_again, z[:, :latents], atol=2e-5)
        np.testing.assert_allclose(y_again, y[:, : 4 * latents - 3], atol=2e-5)


@pytest.mark.parametrize("name,frames,rows,columns", [("2.1", 5, 3, 5), ("2.2", 1, 6, 9)])
def test_tiling_equals_diffusers(rng, name, frames, rows, columns):
    module, config, params = reference(name)
    f = config.scale_factor_spatial
    x = pixels(rng, config, 1, frames, rows, columns)
    mean, std = statistics(config)
    tile, stride = 4 * f, 3 * f
    with torch.no_grad():
        mu = module.encode(to_torch(x)).latent_dist.mode()
        plain = from_torch(module.decode(mu).sample)
        module.enable_tiling(tile, tile, stride, stride)
        want_x = from_torch(module.decode(mu).sample)
    want_z = from_torch((mu - mean) / std)
    assert error(want_x, plain) > 1e-3  # tiles do change the result
    decode = partial(vae.decode_tiled, config=config, tile=tile)
    assert error(jax.jit(decode)(params, want_z), want_x) < 1e-5


def test_tiling_leaves_small_frames_alone(rng):
    _, config, params = reference("2.1")
    z = rng.normal(size=(1, 1, 4, 3, 4)).astype(np.float32)
    want = jax.jit(partial(vae.decode, config=config))(params, z)
    tiled = jax.jit(partial(vae.decode_tiled, config=config, tile=32))
    got = tiled(params, z)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name,frames", [("2.1", 1), ("2.2", 1), ("mixed", 9)])
def test_bfloat16_stays_within_five_percent(rng, name, frames):
    _, config, params = reference(name)
    x = pixels(rng, config, 1, frames)
    half = trees.cast(params, jnp.bfloat16)
    encode = jax.jit(partial(vae.encode, config=config))
    decode = jax.jit(partial(vae.decode, config=config))
    z = encode(params, x)
    got_z, got_x = encode(half, x), decode(half, z)
    assert got_z.dtype == got_x.dtype == jnp.float32
    assert 1e-4 < error(got_z, np.asarray(z)) < 0.05
    assert 1e-4 < error(got_x, np.asarray(decode(params, z))) < 0.05


def test_norm_has_a_finite_gradient_where_channels_vanish():
    params = {"norm/gamma": jnp.ones(4)}
    grad = jax.grad(lambda x: vae._norm(params, "norm", x).sum())(jnp.zeros((1, 1, 1, 1, 4)))
    assert np.all(np.isfinite(grad))


@pytest.mark.parametrize(
    "shape,message",
    [
        ((1, 4, 16, 16, 3), "4 frames"),
        ((1, 5, 16, 12, 3), "16x12"),
        ((1, 5, 16, 16, 12), "expected"),
        ((5, 16, 16, 3), "expected"),
    ],
)
def test_encode_refuses_wrong_shapes(shape, message):
    with pytest.raises(ValueError, match=message):
        vae.encode({}, jnp.zeros(shape), config=CONFIGS["mixed"])


@pytest.mark.parametrize("shape", [(1, 2, 2, 2, 3), (1, 0, 2, 2, 4), (1, 2, 2, 4)])
def test_decode_refuses_wrong_shapes(shape):
    with pytest.raises(ValueError, match="vae.decode: z has shape"):
        vae.decode({}, jnp.zeros(shape), config=CONFIGS["mixed"])


@pytest.mark.parametrize("tile", [-32, 20, 16])
def test_tiling_refuses_bad_tiles(tile):
    with pytest.raises(ValueError, match="vae tiling"):
        vae.decode_tiled({}, jnp.zeros((1, 1, 8, 8, 4)), config=CONFIGS["mixed"], tile=tile)


@pytest.mark.parametrize(
    "field,value",
    [
        ("attn_scales", (0.5,)),
        ("dropout", 0.1),
        ("scale_factor_temporal", 8),
        ("scale_factor_spatial", 16),
        ("temperal_downsample", (True, True, True)),
        ("temperal_downsample", (True, True)),
        ("latents_std", (1.0,)),
    ],
)
def test_config_refuses_what_no_wan_vae_has(field, value):
    with pytest.raises(ValueError, match=field):
        vae.VAEConfig(**{field: value})


def test_decode_refuses_a_step_that_leaves_frames_over():
    config = CONFIGS["mixed"]
    run = partial(vae.decode, config=config, step=2)
    with pytest.raises(ValueError, match="change step"):
        jax.eval_shape(run, shapes(config), jnp.zeros((1, 4, 2, 2, 4)))


def test_config_refuses_a_widening_last_level_with_shortcuts():
    with pytest.raises(ValueError, match="dim_mult"):
        vae.VAEConfig(
            dim_mult=(1, 2, 4),
            temperal_downsample=(True, True),
            is_residual=True,
            scale_factor_spatial=4,
        )

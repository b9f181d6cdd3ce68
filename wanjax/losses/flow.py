"""Flow matching: the SFT loss, its timestep densities, and the conversions all losses share.

x_t = (1 − σ)·x0 + σ·ε, v = ε − x0, x0 = x_t − σ·v, t = 1000·σ (Lipman et al., 2210.02747)
  loss = mean_B w · mean (v − (ε − x0))²
Timesteps: u is drawn from a density, σ = S(u; k) = k·u / (1 + (k − 1)·u) is the shift of the run,
and u is restricted to the values whose t lies in [t_lo, t_hi), the range of the trained expert.
Densities (Stable Diffusion 3, 2403.03206 §3.1):
  uniform       u ~ U(0, 1)
  logit_normal  u = sigmoid(mean + std·z), z ~ N(0, 1)
  mode          u = 1 − x − scale·(cos²(πx/2) − 1 + x), x ~ U(0, 1)
All draws go through the quantile function, so that stratified draws have the same density.

Arithmetic is float32 whatever the dtype of the inputs (float64 where an input is).
Latents have any number of axes after the leading B; a level σ is a scalar or [B].
Dimensions: B batch  N bins.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from wanjax import schedule

DENSITIES = ("uniform", "logit_normal", "mode")
MAX_MODE_SCALE = 2 / (math.pi - 2)  # beyond it the map of `mode` is not monotone


@dataclass(frozen=True)
class Density:
    """Density of u: one of DENSITIES; mean and std for logit_normal, scale for mode."""

    name: str = "uniform"
    mean: float = 0.0
    std: float = 1.0
    scale: float = 1.29


def flow_loss(v, x0, noise, weight_B=None):
    """Flow-matching loss; returns (loss, aux). v [B, ...]; x0, noise like v, without gradient.

    weight_B: weight of each sample, e.g. `bell_weight` of its timestep, or σ² for the squared error
    of x0. The loss is the plain mean of w·error: weights are not normalised.
    """
    error_B = flow_error(v, x0, noise)
    if weight_B is None:
        loss = error_B.mean()
    else:
        check_per_sample(v, weight=weight_B)
        loss = (weight_B * error_B).mean()
    return loss, {"loss": loss, "error": error_B.mean()}


def flow_error(v, x0, noise):
    """Mean squared error [B] of a velocity; x0 and noise receive no gradient."""
    check_shapes(v=v, x0=x0, noise=noise)
    v, x0, noise = wide(v, x0, noise)
    return sample_mean((v - jax.lax.stop_gradient(noise - x0)) ** 2)


def uniform(key, sample_ids, shape=()):
    """U(0, 1) [B, *shape] float32, a function of (key, sample id) only."""

    def one(sample_id):
        return jax.random.uniform(jax.random.fold_in(key, sample_id), shape)

    return jax.vmap(one)(jnp.asarray(sample_ids))


def quantile(q, density: Density, *, shift, t_lo=0.0, t_hi=1000.0):
    """Map q in [0, 1) to a timestep in [t_lo, t_hi), increasing; see the file docstring."""
    name = density.name
    if name not in DENSITIES:
        raise ValueError(f"timestep density is {name!r}; expected one of {', '.join(DENSITIES)}")
    if not 0 <= t_lo < t_hi <= 1000:
        raise ValueError(f"timestep range is [{t_lo}, {t_hi}); expected 0 <= t_lo < t_hi <= 1000")
    lo, hi = (schedule.unshift_map(t / 1000, shift) for t in (t_lo, t_hi))
    if name == "uniform":
        u = lo + q * (hi - lo)
    elif name == "logit_normal":
        z_lo, z_hi = ((_logit(x) - density.mean) / density.std for x in (lo, hi))
        a, b = (0.5 * (1 + math.erf(z / math.sqrt(2))) for z in (z_lo, z_hi))
        z = jax.scipy.special.ndtri(a + q * (b - a))
        u = jax.nn.sigmoid(density.mean + density.std * z)
    else:
        a, b = (_invert_mode(x, density.scale) for x in (lo, hi))
        u = _mode(a + q * (b - a), density.scale, jnp)
    t = 1000 * schedule.shift_map(u, shift)
    # float32 rounding may reach t_hi, where the other expert begins
    return jnp.clip(t, t_lo, np.nextafter(np.float32(t_hi), np.float32(0))).astype(jnp.float32)


def bell_weight(t, shift):
    """SFT weight exp(−2·((t − 500)/1000)²), lowered to minimum 0 and scaled to mean 1 over the
    1000-entry table of the shift (float64, on the host)."""
    times = (np.asarray(t, np.float64), 1000 * sigma_table(shift))
    bell, table = (np.exp(-2 * ((a - 500) / 1000) ** 2) for a in times)
    return (bell - table.min()) / (table - table.min()).mean()


def sigma_table(shift):
    """The 1000-entry table of levels S(1), S(.999), … S(.001), float64, of discrete trainers."""
    return schedule.shift_map(np.linspace(1000, 1, 1000) / 1000, shift)


def add_noise(x0, noise, sigma):
    """x_t = (1 − σ)·x0 + σ·ε."""
    check_shapes(x0=x0, noise=noise)
    x0, noise = wide(x0, noise)
    s = level(sigma, x0)
    return (1 - s) * x0 + s * noise


def x0_from_velocity(x, v, sigma):
    """x0 = x_t − σ·v."""
    return euler(x, v, sigma, 0.0)


def euler(x, v, sigma, sigma_next):
    """Move x along v from σ to σ'; also the ODE form of a few-step sampler, which keeps ε."""
    check_shapes(x=x, v=v)
    x, v = wide(x, v)
    return x + (level(sigma_next, x) - level(sigma, x)) * v


def check_shapes(**arrays):
    """Raise where shapes differ: a broadcast here would silently average the wrong elements."""
    shapes = {name: None if a is None else jnp.shape(a) for name, a in arrays.items()}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"shapes differ: {shapes}; expected one shape for all of them")


def check_per_sample(like, **arrays):
    """Raise for an array that is not [B], with B the leading axis of `like`."""
    for name, a in arrays.items():
        if jnp.shape(a) != jnp.shape(like)[:1]:
            raise ValueError(
                f"{name} has shape {jnp.shape(a)}; expected [{jnp.shape(like)[0]}], one value per "
                f"sample"
            )


def norm_ratio(v, v_ref):
    """|v| / |v_ref| over all samples: exactly 1 for equal inputs, because one reduction computes
    both sums."""
    squares = jnp.square(jnp.stack(wide(v, v_ref))).reshape(2, -1).sum(1)
    return jnp.sqrt(squares[0] / squares[1])


def wide(*arrays):
    """Bring arrays to one floating dtype of at least float32."""
    dtype = jnp.result_type(jnp.float32, *(jnp.asarray(a).dtype for a in arrays))
    return tuple(jnp.asarray(a).astype(dtype) for a in arrays)


def level(sigma, x):
    """Bring a scalar or [B] to broadcast against x [B, ...]."""
    sigma = jnp.asarray(sigma, x.dtype)
    if sigma.ndim == 0:
        return sigma
    check_per_sample(x, sigma=sigma)
    return sigma.reshape(sigma.shape + (1,) * (x.ndim - 1))


def sample_mean(a):
    """Mean over everything but the leading axis, also over axes sharded on a mesh."""
    return a.mean(tuple(range(1, a.ndim)))


def _logit(u):
    return math.log(u / (1 - u)) if 0 < u < 1 else math.copysign(math.inf, u - 0.5)


def _mode(x, scale, xp):
    return 1 - x - scale * (xp.cos(math.pi / 2 * x) ** 2 - 1 + x)


def _invert_mode(u, scale):
    """x in [0, 1] with _mode(x) = u, by bisection of a decreasing map."""
    if not -1 <= scale <= MAX_MODE_SCALE:
        raise ValueError(
            f"scale of timestep density 'mode' is {scale}; expected -1..{MAX_MODE_SCALE:.4f}"
        )
    lo, hi = 0.0, 1.0
    for _ in range(60):
        x = (lo + hi) / 2
        lo, hi = (x, hi) if _mode(x, scale, np) > u else (lo, x)
    return (lo + hi) / 2

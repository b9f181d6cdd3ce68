"""From a run's ConfigDict to its settings: every check that needs no weights happens here.

Models are known from a preset's name or from the headers of a checkpoint, so that a wrong mesh,
batch, expert, target or word is refused before a byte of weights is read.
"""

import dataclasses
import difflib
import fnmatch
import functools
import json
import math
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import config_flags

from configs import default
from convert import digest, lora, weights
from wanjax import algorithms, paths, rewards, sampler, sampling, schedule, settings, trees
from wanjax import state as states
from wanjax.algorithms import dmd2, grpo, nft, sft
from wanjax.data import latents, previews, text, video
from wanjax.data import prompts as prompt_files
from wanjax.models import blocks, condition, presets, quant, wan
from wanjax.parallel import distributed, sharding
from wanjax.rewards import shapes
from wanjax.run import alarms, metrics, profiling

CONFIG = config_flags.DEFINE_config_file("config", None, "configs/NAME.py[:preset]")
ALGORITHMS: dict[str, algorithms.Algorithm] = {"grpo": grpo, "nft": nft, "sft": sft, "dmd2": dmd2}
DTYPES = ("bfloat16", "float16", "float32")
_RUN_FIELDS = ("dtype", "attention", "context", "remat", "interleave")  # of config.model, WanConfig
_WORDS = {  # allowed values of the keys that match a pattern
    "algorithm": ALGORITHMS,
    "alarms.action": alarms.ACTIONS,
    "wandb": metrics.WANDB,
    "reward_failure": rewards.FAILURE,
    "guidance.mode": sampler.GUIDANCE_MODES,
    "model.remat": blocks.REMAT,
    "model.dtype": DTYPES,
    "*.param_dtype": (*DTYPES, *quant.DTYPES),
    "model.vae_dtype": DTYPES,
    "model.text_dtype": DTYPES,
    "model.text_encoder": ("free", "host", "device"),
}
_HOLDS = {  # the rules of default.NUMBERS; none of them holds for nan
    "at least 1": lambda x: x >= 1,
    "at least 0": lambda x: x >= 0,
    "above 0": lambda x: x > 0,
    "in [0, 1)": lambda x: 0 <= x < 1,
    "in [0, 1]": lambda x: 0 <= x <= 1,
    "in [0, 2**32)": lambda x: 0 <= x < 2**32,  # jax drops the higher bits
}


def check(config: dict) -> None:
    """Raise ValueError for unknown keys, words that a key does not take and numbers outside their
    range; what depends on the model or on several keys is checked where it is used."""
    check_keys(config, default.get_config().to_dict())
    values = {path.replace("/", "."): x for path, x in trees.flatten(config).items()}
    for pattern, words in _WORDS.items():
        for key in fnmatch.filter(values, pattern):
            if values[key] not in words:
                raise ValueError(f"config.{key} is {values[key]!r}; expected one of {(*words,)}")
    for expected, patterns in default.NUMBERS.items():
        for key in (key for pattern in patterns for key in fnmatch.filter(values, pattern)):
            if not _HOLDS[expected](values[key]):
                raise ValueError(f"config.{key} is {values[key]}; expected {expected}")
    for key, value in values.items():
        if (
            type(value) is int
            and abs(value) >= 2**31
            and key not in default.NUMBERS["in [0, 2**32)"]
        ):
            raise ValueError(f"config.{key} is {value}; expected a number below 2**31")
    if not config["name"]:
        raise ValueError("config.name is empty; expected the name of the run's folder")
    experts = config["experts"]
    if not experts or len(set(experts)) < len(experts):
        raise ValueError(f"config.experts is {experts}; expected high, low, or both, each once")
    if config["lora"]["rank"] and not config["lora"]["targets"]:
        raise ValueError("config.lora.targets is empty; expected patterns of layers to adapt")
    if config["lora"]["start"] and not config["lora"]["rank"]:
        raise ValueError(
            "config.lora.start names adapters but config.lora.rank is 0; set the rank they were "
            "trained with, or start from a folder that convert.weights --lora merged them into"
        )
    for limits, patience in (("limits", config["alarms"]["patience"]), ("start", 1)):
        alarms.watch(config["alarms"][limits], patience)
    profiling.steps_of(config["profile"], config["steps"])


def check_keys(config: dict, known: dict, where: str = "config") -> None:
    """Raise ValueError for a key that no default has, with the nearest one."""
    for key, value in config.items():
        if where in ("config.reward", "config.alarms.limits", "config.alarms.start"):
            continue  # free: names and import paths, or metrics
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {where}.{near[0]}?" if near else f"{where} has {sorted(known)}"
            raise ValueError(f"{where}.{key} is unknown; {hint}")
        if isinstance(known[key], dict):
            check_keys(value, known[key], f"{where}.{key}")


# ---- data ----


def trains_on_clips(config) -> bool:
    """Whether a step's data are clips of config.data, not prompts."""
    data = ALGORITHMS[config.algorithm].DATA
    return data == "latents" or data == "either" and bool(config.data.path)


def prompts(source: str) -> tuple[str, ...]:
    """Prompts of a file, those that ship as "previews", or in a fixed random order of the embedded
    grammar as shapes:<train|heldout>:<1|2>, or one of n equal parts of them with :<part>/<n>; ()
    for ""."""
    if not source:
        return ()
    if source == "previews":
        return previews.texts()
    if source.startswith("shapes:"):
        found = re.fullmatch(r"shapes:(train|heldout):([12])(?::(\d+)/([1-9]\d*))?", source)
        if found is None or found[3] and int(found[3]) >= int(found[4]):
            raise ValueError(
                f"prompts {source!r} are unknown; expected a file, shapes:train:2, or one part of "
                "two as shapes:heldout:1:0/2"
            )
        split, count, part, parts = found[1], int(found[2]), int(found[3] or 0), int(found[4] or 1)
        everything = shapes.prompts(split, count, len(shapes.specs(split, count)), seed=0)
        return tuple(everything[part::parts])
    return prompt_files.load_prompts(source)


def eval_prompts(
    config, model: presets.ModelConfig
) -> tuple[tuple[str, ...], tuple[pathlib.Path, ...]]:
    """(prompts of config.eval.prompts, file of the first frame of each where the model starts from
    one); raises ValueError for prompts without the frames that the model needs."""
    source, needed = config.eval.prompts, condition.kind(model) == "latents"
    given = needed or trains_on_clips(config) and config.data.first_frame
    if source == "previews" and given:
        if model.wan.image_dim is not None and model.image is None:
            raise ValueError(
                f"{config.model.path} has no image_encoder, which the first frames of "
                "config.eval.prompts='previews' need; give a whole model folder, or set it to ''"
            )
        return previews.images()
    if source and needed:
        raise ValueError(
            f"config.eval.prompts has no first frames, which model {model.name} needs; set it to "
            "'previews', or to '' to sample from clips"
        )
    return prompts(source), ()


def clips(config) -> latents.Source:
    """The clips of config.data.path, by their headers."""
    if not config.data.path:
        raise ValueError(
            "config.data.path is empty; set it to a folder that python -m wanjax.data cache wrote"
        )
    return latents.read(config.data.path)


def clip_stream(config, source: latents.Source, model: presets.ModelConfig) -> latents.LatentStream:
    """The stream of clips; raises ValueError where data, model and config do not fit."""
    data = config.data
    return latents.LatentStream(
        source, data.batch, config.seed, data.holdout, model, data.first_frame
    )


# ---- models ----


def models(config, *, by_name: bool):
    """(ModelConfig of the student, {role: ModelConfig}) from the headers of their checkpoints.

    by_name: a preset's name is taken as well, which has no weights (for plans and dry runs).
    """

    def find(path: str, components=None) -> presets.ModelConfig:
        if not path:
            raise ValueError(
                "config.model.path is empty; set it to a model folder"
                + (f", or one of {[*presets.MODELS]}" if by_name else "")
            )
        named = presets.MODELS.get(path) if by_name else None
        found = named or weights.model_config(path, components=components)
        run = {name: config.model[name] for name in _RUN_FIELDS}
        return dataclasses.replace(found, wan=dataclasses.replace(found.wan, **run))

    student = find(config.model.path)
    paths = {role: config.roles[role].path for role in ALGORITHMS[config.algorithm].ROLES}
    roles = {role: find(path, presets.EXPERTS) if path else student for role, path in paths.items()}
    return student, roles


def weight_shapes(config, model: presets.ModelConfig, roles: dict) -> dict:
    """{role: {expert: shapes}} of what `load` gives; a role without a path has none of its own."""
    own = {"student": model}
    own |= {role: its for role, its in roles.items() if config.roles[role].path}
    return {
        role: {e: _shapes(its.wan, dtype) for e, dtype in _stored(config, role, its).items()}
        for role, its in own.items()
    }


def _stored(config, role: str, model: presets.ModelConfig) -> dict[str, str]:
    """{expert: dtype its weights are kept in}: float32 where they are trained themselves, whatever
    computes."""
    frozen = (config.model if role == "student" else config.roles[role]).param_dtype
    trained = _trained(config, {role: model}, model).get(role, ()) if not config.lora.rank else ()
    return {expert: "float32" if expert in trained else frozen for expert in model.experts}


def _trained(config, roles: dict, model: presets.ModelConfig) -> dict[str, tuple[str, ...]]:
    """{role: its trained experts} of the student and, if it is among the roles, the critic."""
    found = {"student": tuple(config.experts)}
    if "critic" in roles:
        whole = roles["critic"].experts
        found["critic"] = found["student"] if whole == model.experts else whole
    return found


@functools.lru_cache(8)
def _shapes(config: wan.WanConfig, dtype: str):
    return jax.eval_shape(lambda: wan.store(wan.init(jax.random.key(0), config), dtype))


def load_vae(config, mesh) -> dict:
    """The weights of the run's VAE."""
    dtype = config.model.vae_dtype
    return load_model(config.model.path, param_dtype=dtype, mesh=mesh, components=("vae",))[0][
        "vae"
    ]


def first_frames(
    config, mesh, model: presets.ModelConfig, plan: settings.SamplingConfig, vae: dict, files
) -> dict | None:
    """The cond of `sampling.clips` from image files; None without files. The image encoder's
    weights come and go in here."""
    if not files:
        return None
    params = {"vae": vae}
    if model.image is not None:
        dtype, own = config.model.vae_dtype, ("image_encoder",)
        params |= load_model(config.model.path, param_dtype=dtype, mesh=mesh, components=own)[0]
    images = [video.fit(video.read_image(file), plan.height, plan.width) for file in files]
    return condition.first_frames(params, images, plan.frames, model=model)


def identify(config, model: presets.ModelConfig, roles: dict) -> dict[str, str]:
    """{"role/expert": digest of all its bytes} of the weights that a run starts from, and of the
    VAE. Process 0 reads the files, once: see `convert.digest`."""
    first = jax.process_index() == 0

    def read() -> str:
        found = {"vae": digest.component(config.model.path, "vae")} if first else {}
        for role, its in {"student": model, **roles}.items() if first else ():
            own = config.model if role == "student" else config.roles[role]
            for expert in its.experts if own.path else ():
                found[f"{role}/{expert}"] = digest.component(own.path, expert)
        return json.dumps(found)

    return json.loads(distributed.gather(distributed.everywhere(read))[0])


def load(config, mesh, model: presets.ModelConfig, roles: dict) -> dict:
    """{role: {expert: tree}} of the run's weights, the student's under "student".

    model, roles: as `models` finds them. A role without a path has no weights of its own; equal
    ones are loaded once.
    """
    start = [(list(config.lora.start), None, 1.0)] if config.lora.start else []
    weights_of: dict[str, dict] = {}
    loaded: dict[tuple, dict] = {}
    for role, its in {"student": model, **roles}.items():
        own = config.model if role == "student" else config.roles[role]
        for expert, dtype in _stored(config, role, its).items() if own.path else ():
            moved = not config.lora.rank and expert in _trained(config, roles, model).get(role, ())
            source = (own.path, expert, dtype, role if moved else "")  # what moves has its own
            if source not in loaded:
                print(f"{role:8} {own.path} {expert} as {dtype}", flush=True)
                found, _ = load_model(
                    own.path, param_dtype=dtype, mesh=mesh, components=(expert,),
                    adapters=start if role == "student" else (), offload=config.model.offload,
                )  # fmt: skip
                loaded[source] = found[expert]
            weights_of.setdefault(role, {})[expert] = loaded[source]
    return weights_of


def contexts(config, mesh, model: presets.ModelConfig, prompts) -> text.Encoder:
    """The encoder of a run's prompts; with config.model.text_encoder "free" all of them have been
    encoded when it returns, and the text encoder's weights are gone again.

    Rows come from and go to config.text_cache, which is told apart by every byte of the encoder.
    """
    dtype, keep = config.model.text_dtype, config.model.text_encoder
    prompts = list(dict.fromkeys(prompts))
    rows = None
    if config.text_cache:
        owner = digest.component(config.model.path, "text_encoder")
        folder = paths.local(config.text_cache) / f"{owner}-{dtype}"
        rows = text.Folder(folder, model.wan.text_dim, jnp.dtype(dtype))
    encoder = text.Encoder(model, prompts, rows=rows)
    lacking = encoder.missing(prompts)
    if not lacking and keep == "free":
        return encoder
    print(f"prompts  {len(lacking)} of {len(prompts)} to encode", flush=True)
    found, _ = load_model(
        config.model.path, param_dtype=dtype, mesh=mesh, components=("text_encoder",)
    )
    encoder.params = found["text_encoder"]
    if keep == "free":
        encoder.fill(lacking)
        encoder.params = None
    elif keep == "host":
        encoder.params = sharding.to_host(encoder.params)
    return encoder


def load_model(
    path, *, param_dtype="float32", mesh=None, components=None, adapters=(), offload=False,
    **run,
):  # fmt: skip
    """(params, ModelConfig) with the run-time fields of the transformer set.

    run: dtype, attention, context, remat and interleave of WanConfig. adapters: [(path, expert or
    None, strength)], whose changes that are not low-rank are added to the weights. offload: keep
    the experts in host memory. components: see convert.weights.load.
    """
    stored = param_dtype if param_dtype in quant.DTYPES else jnp.dtype(param_dtype)
    dense = lora.dense_changes(path, adapters)
    params, model = weights.load(
        path, mesh=mesh, dtype=stored, components=components, dense=dense, offload=offload
    )
    run = dataclasses.replace(model.wan, **run)
    return params, dataclasses.replace(model, wan=run)


# ---- settings ----


def make(config, model: presets.ModelConfig, roles: dict) -> settings.Setup:
    """The frozen Setup of a checked config; raises ValueError naming the key to change.

    roles: ModelConfig of each role beside the student, of which the critic is trained.
    """
    for expert in config.experts:
        if expert not in model.experts:
            raise ValueError(
                f"config.experts names {expert!r} but the model has {model.experts}; "
                "set config.experts to some of those"
            )
    algorithm = ALGORITHMS[config.algorithm]
    if config.model.offload and (not config.lora.rank or algorithm.ROLES):
        found = f"algorithm {config.algorithm!r}, whose roles share them"
        raise ValueError(
            "config.model.offload keeps frozen experts in host memory, but found "
            + (found if config.lora.rank else "lora.rank 0")
            + "; set it to False"
        )
    return settings.Setup(
        model=model,
        roles=roles,
        sampling=_sampling(config.sampling, config.guidance, model),
        sde=_sde(config.sde.to_dict()),
        training=_training(config, model, roles),
        rewards=settings.RewardConfig(dict(config.reward.items()), config.reward_failure),
        algorithm=algorithm.make_config(config, roles),
        seed=config.seed,
        steps=config.steps,
    )


def evaluation_sampling(config, setup: settings.Setup) -> settings.SamplingConfig:
    """The sampler that config.eval asks for; the run's own where it asks for nothing."""
    own = {key: config.eval[key] for key in ("steps", "grid", "solver") if config.eval[key]}
    scales = {e: scale for e, scale in config.eval.guidance.items() if scale}
    if not own and not scales:
        return setup.sampling
    plan, guidance = config.sampling.to_dict() | own, config.guidance.to_dict() | scales
    plan["sigmas"] = () if {"steps", "grid"} & own.keys() else plan["sigmas"]
    try:
        return _sampling(plan, guidance, setup.model)
    except ValueError as error:
        asked = ", ".join(f"{key} {value!r}" for key, value in own.items())
        raise ValueError(f"config.eval with its own {asked}: {error}") from None


def make_mesh(config, *, by_name: bool):
    """The mesh of the config; for a model by its name, of as many devices as its sizes say."""
    sizes = dict(config.mesh)
    named = math.prod(size for size in sizes.values() if size > 0)
    return sharding.make_mesh(sizes, jax.devices()[:named] if by_name else None)


def batches(setup: settings.Setup, algorithm: algorithms.Algorithm) -> list[int]:
    """Sizes of all batches that a run gives the model."""
    return sorted({setup.sampling.batch, *algorithm.batches(setup)})


def check_mesh(setup: settings.Setup, algorithm: algorithms.Algorithm, mesh) -> None:
    """Raise ValueError when a batch of the run cannot be split over the mesh."""
    grid = sampling.token_grid(setup.model, sampling.latent_shape(setup.model, setup.sampling))
    for size in batches(setup, algorithm):
        wan.check_mesh(setup.model.wan, dict(mesh.shape), size, math.prod(grid))


def abstract_state(
    config, setup: settings.Setup, algorithm: algorithms.Algorithm, mesh
) -> states.State:
    """The state at step 0 as shapes with the shardings that a run gives; use with the mesh set.

    Raises ValueError where weights, adapters and roles of the config do not make a state.
    """
    given = weight_shapes(config, setup.model, setup.roles)

    def init(given):  # the key too is abstract: a plan's devices run nothing
        return algorithm.init(jax.random.key(config.seed), setup, given)

    state = jax.eval_shape(init, given)
    where = states.shardings(state, mesh)
    if config.model.offload:
        away = jax.tree.map(lambda at: at.with_memory_kind("pinned_host"), where.params)
        where = where.replace(params=away)
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), state, where
    )


def _sampling(plan, guidance, model: presets.ModelConfig) -> settings.SamplingConfig:
    """The sampler of config.sampling and config.guidance; what they leave open is the model's."""
    levels, solvers = tuple(plan["sigmas"]) or None, (*sampler.SOLVERS, "renoise")
    if plan["solver"] not in solvers:
        raise ValueError(
            f"the solver is {plan['solver']!r}; set config.sampling.solver, or config.eval.solver, "
            f"to one of {', '.join(solvers)}"
        )
    usual = model.sampling
    steps, shift = len(levels or ()) or plan["steps"], plan["shift"] or usual.shift
    return settings.SamplingConfig(
        schedule=schedule.make_schedule(plan["grid"], steps, shift, model.boundary, levels),
        guidance=presets.Guidance(
            high=guidance["high"] or usual.guidance.high, low=guidance["low"] or usual.guidance.low
        ),
        guidance_mode=guidance["mode"],
        **{key: plan[key] for key in ("height", "width", "frames", "solver", "batch", "vae_tile")},
    )


def _sde(section: dict[str, Any]) -> settings.SdeConfig:
    """The transition kernel and step strategy of config.sde."""
    kind, eta = section.pop("kind"), section.pop("eta")
    for name in ("range", "candidates", "decay"):  # empty: the strategy's own default
        section[name] = section[name] or None
    return settings.SdeConfig(schedule.Strategy(section.pop("strategy"), **section), kind, eta)


def _training(config, model: presets.ModelConfig, roles: dict) -> settings.TrainingConfig:
    """Adapters and the optimizers of every trained expert of the student and the critic."""

    def optimizers(section, experts):
        return {e: settings.OptimConfig(**section[e].to_dict()) for e in experts}

    sections = {"student": config.optim, "critic": config.roles.critic.optim}
    trained = _trained(config, roles, model)
    optims = {role: optimizers(sections[role], experts) for role, experts in trained.items()}
    lora_config = settings.LoraConfig(
        config.lora.rank, config.lora.alpha, tuple(config.lora.targets)
    )
    return settings.TrainingConfig(lora_config, optims)

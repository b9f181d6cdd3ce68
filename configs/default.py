"""Every config key and its default; recipes override a few of them.

Not a recipe itself: it sets no model and no prompts.
"""

from ml_collections import ConfigDict


def get_config(preset: str = "") -> ConfigDict:
    """The full config; `preset` is not used here."""
    del preset
    c = ConfigDict()
    # ---- the run ----
    c.name = "run"  # folder under workdir; the same name resumes
    c.workdir = "runs"
    c.algorithm = "grpo"
    c.seed = 0
    c.steps = 100  # rollouts
    c.save_every = 10  # steps between checkpoints
    c.keep_last = 2  # newest checkpoints to keep
    c.keep_every = 0  # also keep multiples of this step; 0 = none
    c.sample_every = 20  # steps between sample videos of fixed prompts; 0 = only before and after
    c.eval_every = 0  # steps between evaluations; 0 = only before and after
    c.alarms = ConfigDict()  # signs of collapse
    c.alarms.action = "warn"  # off, warn, stop; the best evaluation's checkpoint is always kept
    c.alarms.patience = 20  # consecutive steps outside the limits
    c.alarms.limits = ConfigDict()  # metric or pattern: allowed range
    c.alarms.limits["reward/zero_spread"] = (0.0, 0.95)
    c.alarms.limits["video/motion"] = (1e-3, 1.0)
    c.alarms.limits["video/saturation"] = (0.0, 0.5)
    c.alarms.limits["*/v_norm_ratio/*"] = (0.5, 2.0)  # relative to the reference, if there is a KL
    c.alarms.limits["*/v_rms/*"] = (0.2, 5.0)  # of the velocity; about 1 for noise and latents
    c.alarms.start = ConfigDict()  # the same for the first step, before any update
    c.alarms.start["*/ratio_mean/*"] = (0.99, 1.01)  # trainer and rollout log-probs must agree
    c.alarms.start["*/clip_frac/*"] = (0.0, 0.0)  # no ratio may be clipped
    c.alarms.start["*/kl/*"] = (0.0, 1e-3)
    c.alarms.start["nft/old_deviate/*"] = (0.0, 1e-3)
    c.alarms.start["dpo/loss/*"] = (0.693, 0.694)  # log 2
    c.alarms.start["dmd2/critic_gap/*"] = (0.0, 0.0)  # the critic starts as the teacher
    c.compile_cache = "auto"  # a folder for accelerator programs, reused by the next start: auto is
    # ~/.cache/wanjax for one process, workdir/.compile_cache for several; gs:// works too; "": none
    c.text_cache = "~/.cache/wanjax/text"  # encoded prompts, shared by runs; "": memory
    c.resume = True  # continue the run of this name if it exists
    c.allow_changes = False  # then also with keys that change its result; see wanjax/run/guard.py
    c.wandb = "off"  # off, offline, online
    c.project = "wanjax"  # wandb project
    c.tensorboard = False
    c.profile = ""  # "3:5": a trace of steps 3 and 4 of process 0 for TensorBoard, in RUN/profile
    # ---- the model ----
    c.model = ConfigDict()
    c.model.path = ""  # any Wan checkpoint; gs://, s3:// or org/name of Hugging Face; or tinywan22
    c.model.dtype = "bfloat16"  # matmuls; norms, rotary, softmax and losses stay float32
    c.model.param_dtype = "bfloat16"  # of frozen weights; also float8 or int8 for the blocks'
    # matrices. Weights that are trained themselves (lora.rank = 0) are always kept in float32
    c.model.vae_dtype = "bfloat16"
    c.model.text_dtype = "bfloat16"
    c.model.text_encoder = "free"  # encode all prompts at start, then free its memory; or encode
    # each step's prompts and keep it meanwhile: host (memory), device (split over the mesh)
    c.model.offload = False  # keep frozen experts in host memory; each phase fetches its own. Saves
    # one expert's memory, but is slow on GPUs so far: scripts/bench/RESULTS.md
    c.model.attention = "auto"  # xla, cudnn, fa3, splash
    c.model.context = "auto"  # over mesh.context: ulysses, ring, or both combined
    c.model.remat = "full"  # none, full, save_attention, save_matmuls, offload
    c.model.interleave = 1  # chunks of blocks per pipeline stage
    c.mesh = ConfigDict(dict(data=-1, fsdp=1, context=1, tensor=1, stage=1))  # -1 takes the rest
    c.experts = ("high", "low")  # experts to train
    c.lora = ConfigDict()
    c.lora.rank = 32  # 0 trains full weights
    c.lora.alpha = 64.0
    c.lora.start = ()  # adapter files to start from; an untrained expert keeps its adapter
    c.lora.targets = (r"blocks/attn[12]/to_(q|k|v|out\.0)", r"blocks/ffn\.net\.(0\.proj|2)")
    # ---- sampling: one schedule for rollouts, samples, evaluation and export ----
    c.sampling = ConfigDict()
    c.sampling.grid = "simple"  # euler, linspace, simple, unipc, wan_unipc, wan_dpm, explicit
    c.sampling.sigmas = ()  # for grid explicit: decreasing levels in (0, 1] before the shift
    c.sampling.steps = 10
    c.sampling.shift = 0.0  # 0 = the model's default
    c.sampling.height = 480
    c.sampling.width = 480
    c.sampling.frames = 5
    c.sampling.solver = "euler"  # ODE: euler, dpmpp_2m, unipc; or renoise: fresh noise each step
    c.sampling.batch = 8  # samples per device call
    c.sampling.vae_tile = 0  # pixels per side of a decode tile (diffusers: 256); 0 = no tiling
    c.guidance = ConfigDict()
    c.guidance.high = 0.0  # 0 = the model's default; 1 skips the unconditional pass
    c.guidance.low = 0.0
    c.guidance.mode = "batch"  # batch, or sequential for half the memory
    c.negative_prompt = "default"  # "default" = the model's own
    # ---- which steps are stochastic, and how ----
    c.sde = ConfigDict()
    c.sde.kind = "flow"  # flow, dance, cps, linear
    c.sde.eta = 0.7
    c.sde.strategy = "dual_window"  # see wanjax.schedule.STRATEGIES
    c.sde.window = 1  # steps per window
    c.sde.low_window = 0  # for expert low in dual_window; 0 = same as expert high
    c.sde.range = ()  # (lo, hi) of allowed steps; () = all but the last
    c.sde.fraction = (0.0, 1.0)  # of the trajectory, for strategy fraction
    c.sde.candidates = ()  # steps to draw from, for global_window; () = the range
    c.sde.iters = 25  # rollouts per window in mix_progressive
    c.sde.decay = ""  # of iters as the window advances: "", linear, exp
    c.sde.stride = 0  # steps it advances by; 0 = the window
    c.sde.roll_back = True  # start over after the last window
    c.sde.include_last = False  # allow the last step, too peaked for the usual clip ranges
    # ---- data and reward ----
    c.prompts = ""  # a line each, .jsonl or .csv; or shapes:train:2 (embedded grammar)
    c.prompts_per_step = 8
    c.group_size = 8  # samples per prompt
    c.reward = ConfigDict(allow_dotted_keys=True)  # see wanjax.rewards: name -> weight
    # a name that contains a dot (path, address, module) can only be set in a config file
    c.reward_failure = "stop"  # or "skip": a sample without a score gets its group's mean
    c.reward_lost_steps = 3  # consecutive steps that may lose all scores; 0 = any number
    c.reward_deadline = 600.0  # seconds one reward may take per batch of samples
    # ---- GRPO ----
    c.advantage = "flow_grpo"  # flow_grpo, flow_grpo_global, miles, dance, unirl, gdpo
    c.adv_clip_max = 5.0
    c.updates = 1  # optimizer steps per rollout
    c.micro_samples = 4  # samples per micro-batch; the last one takes the rest
    c.micro_steps = 1  # stored transitions per sample in a micro-batch
    c.mix_experts = False  # mix both experts' transitions in a micro-batch
    c.clip = ConfigDict(dict(high=1e-4, low=1e-3))  # the low expert's log-probs are noisier
    c.kl = ConfigDict(dict(kind="g2h", high=0.0, low=0.0))  # weights; kinds g2, g2h, v_mse, x_mse
    c.guard = False  # GRPO-Guard
    c.same_noise = False  # one initial noise per group: rewards differ only through SDE noise
    c.best_of = 0  # train on this many per group, half the best, half the worst; 0 = all
    c.recompute_old_logp = False  # old log-probs from the trainer's forward; for param_dtype int8
    # and float8, where rollout and update scores differ by more than the clip range
    # ---- DiffusionNFT, and its variants AWM and online Flow-DPO (algorithm = "nft") ----
    c.nft = ConfigDict()
    c.nft.loss = "nft"  # nft, awm, dpo
    c.nft.timesteps = 2  # trained timesteps per sample (dpo: per pair) and expert
    c.nft.beta = 0.1  # distance of the mirrored policies from old
    c.nft.mode = "all"  # all, positive_only, negative_only, one_only, binary
    c.nft.old_decay = 1  # 0 on-policy, 1 default, 2 nearly frozen after 75 updates
    c.nft.ema_decay = 0.9  # cap for the evaluation average
    c.nft.sde = False  # rollouts use config.sde's stochastic steps; otherwise only the solver
    c.nft.train_guidance = False  # allow guidance other than 1
    c.awm = ConfigDict()  # loss = "awm"
    c.awm.weighting = "ghuber"  # uniform, t, t2, huber, ghuber
    c.awm.power = 0.25  # for ghuber
    c.awm.clip = 1.0  # for the ratio to old
    c.awm.adv_max = 1.0  # advantages are scaled to ± this
    c.awm.ema_kl_beta = 1.0  # pull towards the evaluation average
    c.dpo = ConfigDict(dict(beta=100.0))  # loss = "dpo"; recipes 100, papers 2000
    # ---- latent data, and supervised fine-tuning on it (algorithm = "sft") ----
    c.data = ConfigDict()
    c.data.path = ""  # from python -m wanjax.data cache, or a folder of FastVideo parquet files
    c.data.batch = 8  # clips per step, processed micro_samples at a time
    c.data.holdout = 0.05  # fraction of clips for validation, chosen by a digest of their content
    c.data.caption_dropout = 0.1  # fraction of captions replaced by the negative prompt's context
    c.data.first_frame = False  # TI2V-5B: condition on the first frame; I2V models always do
    c.sft = ConfigDict()
    c.sft.density = "uniform"  # of the unshifted time: uniform, logit_normal, mode
    c.sft.mean = 0.0  # for logit_normal
    c.sft.std = 1.0
    c.sft.scale = 1.29  # for mode
    c.sft.weighting = "none"  # error weight as a function of time: none, bell
    c.sft.timesteps = 1  # trained timesteps per clip and expert
    c.sft.bins = 4  # time bins per expert's range, for the validation loss
    # ---- DMD2 (algorithm = "dmd2"); config.sampling sets the student's steps ----
    c.dmd2 = ConfigDict()
    c.dmd2.rollout = "simulate"  # from noise; data_latent: from noised clips of config.data
    c.dmd2.student_every = 5  # critic steps per student step
    c.dmd2.guidance = ConfigDict(dict(high=0.0, low=0.0))  # of the teacher; 0 = its model's
    c.dmd2.floor = 1e-4  # for each sample's normaliser
    c.dmd2.t_lo = 20.0  # scored timesteps are clamped to [t_lo, t_hi]
    c.dmd2.t_hi = 980.0
    c.dmd2.ema_decay = 0.99  # per student update
    c.dmd2.ema_start = 200  # student updates before averaging begins
    c.dmd2.warm_steps = 0  # initial steps that regress on the teacher's trajectories
    c.dmd2.warm_substeps = 12  # teacher steps per student step
    c.dmd2.gan_weight = 0.0  # GAN loss on clips from config.data; FastGen: 0.03, CausVid: 0.001
    c.dmd2.gan_critic_weight = 1e-2
    c.dmd2.gan_penalty = 0.0  # approximate R1
    c.dmd2.divergence = "rkl"  # rkl, kl, js, jeffreys, hellinger; all but rkl need config.data
    c.roles = ConfigDict()  # path "" shares config.model's weights
    c.roles.teacher = ConfigDict(dict(path="", param_dtype="bfloat16"))
    c.roles.critic = ConfigDict(dict(path="", param_dtype="bfloat16"))
    c.roles.critic.optim = ConfigDict(dict(high=_optim(), low=_optim()))
    # ---- optimizers ----
    c.optim = ConfigDict(dict(high=_optim(), low=_optim()))
    # ---- evaluation and samples ----
    c.eval = ConfigDict()
    c.eval.prompts = "previews"  # 16 that ship with wanjax, for I2V with first frames; or as
    # config.prompts. "" = none: a run on clips shows their captions, others have no evaluation
    c.eval.number = 64  # prompts to score, from the top of the file; without a reward none
    c.eval.seed = 1234
    c.eval.samples = 4  # sample videos, of the first prompts
    c.eval.steps = 0  # sampler overrides; 0 or "" = as in the run
    c.eval.grid = ""
    c.eval.solver = ""
    c.eval.guidance = ConfigDict(dict(high=0.0, low=0.0))
    return c


def _optim() -> ConfigDict:
    return ConfigDict(
        dict(
            lr=1e-4,
            warmup=0,  # optimizer steps
            decay=0,  # optimizer steps of linear decay to 0 after warm-up; 0 = constant
            b1=0.9,
            b2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            clip_norm=1.0,  # 0 = off
        )
    )


# Bounds on numeric keys, as key patterns. Anything that depends on the model or on other keys is
# checked where it is used.
NUMBERS = {
    "at least 1": (
        "save_every", "keep_last", "alarms.patience", "model.interleave", "sampling.batch",
        "prompts_per_step", "group_size", "updates", "micro_samples", "micro_steps", "sde.iters",
        "nft.timesteps", "sft.timesteps", "sft.bins", "dmd2.student_every",
        "dmd2.warm_substeps", "eval.number",
    ),
    "at least 0": (
        "steps", "keep_every", "sample_every", "eval_every", "lora.rank", "sampling.shift",
        "guidance.high", "guidance.low", "sde.window", "sde.low_window",
        "sde.stride", "best_of", "kl.high", "kl.low", "awm.ema_kl_beta", "dmd2.guidance.*",
        "dmd2.ema_start", "dmd2.warm_steps", "dmd2.gan_*", "*optim.*.lr", "*optim.*.warmup",
        "*optim.*.decay", "*optim.*.weight_decay", "*optim.*.clip_norm", "eval.samples",
        "eval.steps", "eval.guidance.*", "reward_lost_steps",
    ),
    "above 0": (
        "lora.alpha", "reward_deadline", "adv_clip_max", "clip.*", "nft.beta", "awm.clip",
        "awm.adv_max", "dpo.beta", "sft.std", "dmd2.floor", "*optim.*.eps",
    ),
    "in [0, 1)": (
        "nft.ema_decay", "dmd2.ema_decay", "*optim.*.b1", "*optim.*.b2",
    ),
    "in [0, 1]": ("data.caption_dropout",),
    "in [0, 2**32)": ("seed", "eval.seed"),
}  # fmt: skip

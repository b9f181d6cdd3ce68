"""The names and commands that users, docs and outside checks rely on."""

import importlib
import inspect
import subprocess
import sys

import pytest

FUNCTIONS = {  # name: the parameters that callers give
    "wanjax.schedule.make_schedule": "grid steps shift boundary",
    "wanjax.sampler.sde_step": "x v sigma sigma_next kind eta noise sigma_max",
    "wanjax.sampler.sde_logp": "x x_next v sigma sigma_next kind eta sigma_max",
    "wanjax.advantages.group_advantages": "rewards preset",
    "wanjax.losses.grpo.grpo_loss": "logp_B logp_old_B adv_B clip",
    "wanjax.losses.nft.nft_loss": "v_new v_old v_ref x0 x_t sigma_B adv_B nft_beta kl_beta "
    "adv_clip_max",
    "wanjax.losses.nft.old_decay": "step kind",
    "wanjax.losses.dmd2.generator_loss": "x0 x0_fake x0_real floor",
    "wanjax.losses.dmd2.critic_loss": "v x0 noise",
    "wanjax.models.wan.denoise": "params lora x_BTHWC t_B ctx_BSE cond config",
    "wanjax.models.vae.encode": "config",
    "wanjax.models.vae.decode": "config",
    "wanjax.models.umt5.encode": "params ids mask config",
    "convert.weights.load": "path mesh dtype",
    "convert.lora.load": "path config",
}
COMMANDS = {  # module: flags of its help
    "wanjax.sample": "--model --lora --merge --prompt --out --steps --solver --shift --seed --mesh",
    "wanjax.export": "run --format",
    "wanjax.report": "run --out",
    "wanjax.data": "cache inspect",
    "wanjax.doctor": "--model",
    "convert.weights": "src --to --out --lora --dtype --verify",
    "convert.lora": "src --to --out",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_their_names_and_parameters(name):
    module, _, function = name.rpartition(".")
    found = inspect.signature(getattr(importlib.import_module(module), function)).parameters
    given = [p for p in FUNCTIONS[name].split() if not any(q.startswith(p) for q in found)]
    assert given == []
    needed = {n for n, p in found.items() if p.default is p.empty}
    assert len(needed) <= max(len(FUNCTIONS[name].split()), 3)


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_keep_their_flags(module):
    command = [sys.executable, "-m", module, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0
    assert [flag for flag in COMMANDS[module].split() if flag not in shown.stdout] == []

"""DMD2 of both experts through the trainer, on FastVideo's parquet files: clips with a GAN head and
adapters, texts alone with full weights; both continue after an interruption with the same bits."""

import json
import shutil

import jax.numpy as jnp
import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from tests import tiny
from wanjax import sampler, train
from wanjax.algorithms import distill, dmd2, phases
from wanjax.run import checkpoint, metrics

STEPS, GROUP = 4, 4
OWN = {
    "clips": dict(
        dmd2__rollout="data_latent", dmd2__gan_weight=0.5, dmd2__gan_penalty=0.1,
        dmd2__divergence="js",
    ),
    "texts": dict(lora__rank=0),
}  # fmt: skip


def _columns(name, array):
    return {f"{name}_bytes": array.tobytes(), f"{name}_shape": list(array.shape),
            f"{name}_dtype": "float32"}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Folders of both kinds, and {caption: (latents, text rows)}."""
    rng, folders, known = np.random.default_rng(0), {}, {}
    for number in range(6):
        z, text = rng.normal(size=(2, 2, 2, 4)), rng.normal(size=(31 + number, 24))
        known[f"clip {number}"] = z.astype(np.float32), text.astype(np.float32)
    for kind in OWN:
        folders[kind] = tmp_path_factory.mktemp(kind)
        rows = [{"id": name, "caption": name} | _columns("text_embedding", text)
                | (_columns("vae_latent", np.moveaxis(z, -1, 0)) if kind == "clips" else {})
                for name, (z, text) in known.items()]  # fmt: skip
        parquet.write_table(pyarrow.Table.from_pylist(rows), folders[kind] / "a.parquet")
    return folders, known


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


def _config(model, workdir, data, kind):
    """The student moves at steps 1 and 3; σ 1, .9 for the high expert, .75, .5 for the low one."""
    own = dict(algorithm="dmd2", prompts="", eval__prompts="", steps=STEPS, group_size=GROUP)
    c = tiny.make_config(model, workdir, **own, **OWN[kind])
    c.data.path, c.data.batch, c.data.holdout = str(data[0][kind]), 2, 0.0
    c.sampling.grid, c.sampling.sigmas, c.sampling.shift = "explicit", (1.0, 0.75, 0.5, 0.25), 3.0
    c.guidance.high = c.guidance.low = 1.0
    c.dmd2.student_every, c.dmd2.ema_start, c.dmd2.ema_decay = 2, 1, 0.5
    c.lora.targets = tiny.TARGETS
    for optim in (c.optim, c.roles.critic.optim):
        optim.high.lr = optim.low.lr = 1e-2 if c.lora.rank else 1e-3
    return c


@pytest.fixture(scope="module", params=OWN)
def whole(request, model, data, tmp_path_factory):
    """(kind, run that nothing interrupts, its disk as the last step began, what collect read and
    gave)."""
    kind, collect, seen = request.param, dmd2.collect, []
    folder = tmp_path_factory.mktemp("whole")

    def spy(state, setup, item, tools):
        if len(seen) == STEPS - 1:
            tiny.settle(folder / "run", 2)
            shutil.copytree(folder / "run", folder / "killed" / "run")
        seen.append((setup, item, collect(state, setup, item, tools)))
        return seen[-1][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dmd2, "collect", spy)
        run = train.main(_config(model, folder, data, kind))
    return kind, run, folder / "killed", seen


def _arrays(run, step=STEPS):
    tree, _ = checkpoint.restore(run, step, checkpoint.abstract(run, step))
    return {path: np.asarray(leaf) for path, leaf in tree.items()}


def _lines(run):
    timed = lambda name: name.startswith(("time/", "perf/"))
    return [{k: v for k, v in line.items() if not timed(k)} for line in metrics.read(run)]


def test_steps_are_taken_on_the_rows_of_the_files(whole, data):
    """Texts for all; for clips also their latents, at the exit's level for the student and as they
    are for the head."""
    kind, _, _, seen = whole
    assert len({text for _, item, _ in seen for text in item.texts}) == 6
    for step, (setup, item, batch) in enumerate(seen):
        z, rows = zip(*(data[1][text] for text in item.texts), strict=True)
        z = np.repeat(np.stack(z), GROUP, 0)
        for ctx, row_SE in zip(np.asarray(batch.ctx_PSE), rows, strict=True):
            np.testing.assert_array_equal(ctx[: len(row_SE)], row_SE)
            assert not ctx[len(row_SE) :].any()
        assert set(batch.latents) == {"critic"} | ({"student"} if step % 2 else set())
        found = {(name, e): own for name, both in batch.latents.items() for e, own in both.items()}
        assert len(found) == 2 * len(batch.latents)
        for (name, expert), own in found.items():
            assert set(own) == {"x"} | ({"real"} if kind == "clips" else set())
            np.testing.assert_array_equal(own.get("real", z), z)
            if kind == "clips" and name == "student":
                key, ids = dmd2._key(setup, step, expert, name, 0), jnp.arange(len(z))
                noise = sampler.initial_noise(key, ids, z[0].shape)
                sigma = setup.sampling.schedule.sigmas[phases.draw(setup, step, expert, name)[0]]
                x = (1 - sigma) * z + sigma * noise
                np.testing.assert_allclose(own["x"], x, atol=1e-5)


def test_every_trained_part_of_both_experts_moves_and_is_kept(whole):
    kind, run, _, _ = whole
    parts = "trained", "ema", "opt", "roles/critic/trained", "roles/critic/opt"
    lines, before, after = _lines(run), _arrays(run, 2), _arrays(run)
    for expert in ("high", "low"):
        own = [f"{part}/{expert}/" for part in parts]
        own += [f"roles/critic/trained/{expert}/{distill.HEAD}/"] if kind == "clips" else []
        for start in own:
            kept = [path for path in after if path.startswith(start)]
            assert any((after[path] != before[path]).any() for path in kept), start
        for name, count in (("dmd2/loss", 2), ("critic/loss", 4), ("dmd2/gan", 2)):
            found = [line for line in lines if f"{name}/{expert}" in line]
            assert len(found) == (0 if kind == "texts" and "gan" in name else count), name
        if kind == "clips":  # a head knows nothing at first
            first, *_, last = (x for line in lines if (x := line.get(f"critic/gan_loss/{expert}")))
            np.testing.assert_allclose(first, 2 * np.log(2), rtol=1e-6)
            assert last != first


def test_a_killed_run_ends_with_the_same_bits(whole, model, data, capsys):
    """In its fourth step, of which the checkpoint of the second is the last."""
    kind, run, folder, _ = whole
    again = train.main(_config(model, folder, data, kind))
    assert "resume   step 2 of" in capsys.readouterr().out
    assert _lines(again) == _lines(run)
    want, got = _arrays(run), _arrays(again)
    assert set(want) == set(got)
    for path, array in want.items():
        np.testing.assert_array_equal(got[path], array, err_msg=path)
    results = [json.loads((r / f"evals/step_{STEPS:06d}.json").read_text()) for r in (again, run)]
    assert results[0] == results[1]

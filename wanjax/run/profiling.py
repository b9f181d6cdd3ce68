"""A profile of some steps, as config.profile asks: run_dir/profile/plugins/profile/<time>/, which
TensorBoard (pip install tensorboard xprof) and Perfetto open.

Process 0 traces its own devices and its host: the step with its number, the phases of
`metrics.phase`, programs and kernels by name. Python calls are left out, they would fill the trace.
"""

import re
from collections.abc import Callable, Iterable, Iterator

import jax

from wanjax import paths


def steps_of(text: str, total: int) -> range:
    """The steps that config.profile names: "3:5" is steps 3 and 4, counted from 0; "" is none.

    Raises ValueError for other words, and for steps that a run of `total` does not have.
    """
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+):(\d+)", text)
    steps = range(int(found[1]), int(found[2])) if found else range(0)
    if not steps or steps.stop > total:
        raise ValueError(
            f"config.profile is {text!r}; expected FIRST:END as 3:5 for steps 3 and 4, within the "
            f"{total} of config.steps, or '' for none"
        )
    return steps


def profiled(steps: range, wanted: range, run_dir, say: Callable[[str], None]) -> Iterable[int]:
    """`steps` for a loop over them, of which those in `wanted` are traced while their turn lasts;
    `say` gets the line that tells where the trace is, or that they were before a resumed run."""
    traced = [step for step in steps if step in wanted]
    if wanted and not traced:
        say(f"profile  the steps before {wanted.stop} are past; nothing is traced")
    return _traced(steps, traced, run_dir, say) if traced and jax.process_index() == 0 else steps


def _traced(steps, traced, run_dir, say) -> Iterator[int]:
    yield from range(steps.start, traced[0])
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    folder = run_dir / "profile"
    with paths.local_folder(folder) as place:
        with jax.profiler.trace(str(place), profiler_options=options):
            for step in traced:
                with jax.profiler.StepTraceAnnotation("step", step_num=step):
                    yield step
    say(f"profile  steps {traced[0]} to {traced[-1]}: tensorboard --logdir {folder}")
    yield from range(traced[-1] + 1, steps.stop)

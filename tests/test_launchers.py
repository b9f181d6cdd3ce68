"""scripts/launch: what a launcher prints with --dry_run is what it does, and exit codes tell why.

Stubs of the cloud commands stand first on PATH, record their arguments and answer as told. Nothing
leaves this machine; the processes of local.sh are real.
"""

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests import tiny

ROOT = pathlib.Path(__file__).parents[1]
LAUNCH = ROOT / "scripts/launch"
TOOLS = ("gcloud", "kubectl", "xpk", "sbatch", "srun", "squeue", "scancel", "scontrol", "git")
FLAGS = [
    "--config=configs/quickstart.py",
    "--config.name=two words",
    """--config.prompts=a"b'$c*""",
]
PLAIN = ["--config=configs/grpo_wan22.py:pickscore", "--config.seed=3"]
HOSTS = "1 wanjax-b 10.0.0.7\n0 wanjax-a 10.0.0.6\n"

# Records its name and arguments in one append, then says $SAY and exits with $CODE.
STUB = r"""#!/usr/bin/env bash
line=$(printf '%s\x1f' "${0##*/}" "$@")
printf '%s\x1e' "$line" >> "$CALLS"
case "$*" in *describe*) echo "${STATE:-ACTIVE}" ;; esac
[ -z "${SAY:-}" ] || printf '%b\n' "$SAY"
exit "${CODE:-0}"
"""


@pytest.fixture
def desk(tmp_path):
    """A copy of the scripts, and stubs on PATH; `desk(…)` runs a launcher."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts", ignore=shutil.ignore_patterns("*.py"))
    (tmp_path / "bin").mkdir()
    for tool in TOOLS:
        path = tmp_path / "bin" / tool
        path.write_text(STUB)
        path.chmod(0o755)
    return Desk(tmp_path)


class Desk:
    """Where launchers run: `folder`, and `calls` of the last run."""

    def __init__(self, folder):
        self.folder = folder

    def env(self, **settings):
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        base = {"PATH": path, "HOME": str(self.folder), "CALLS": f"{self.folder}/calls"}
        return {**base, "TMPDIR": str(self.folder), **settings}

    def run(self, command, **settings):
        """(exit code, stdout, stderr, sorted calls) of a command."""
        calls = self.folder / "calls"
        calls.unlink(missing_ok=True)
        done = subprocess.run(
            command, env=self.env(**settings), cwd=self.folder, capture_output=True, text=True,
            timeout=60,
        )  # fmt: skip
        records = calls.read_text().split("\x1e")[:-1] if calls.exists() else []
        found = sorted(record.split("\x1f")[:-1] for record in records)
        return done.returncode, done.stdout, done.stderr, found

    def launch(self, script, *args, **settings):
        return self.run(["bash", f"scripts/launch/{script}", *args], **settings)


CASES = [
    ("tpu_vm.sh", {}, ["create"], 2),
    ("tpu_vm.sh", {"SLICES": "3", "SPOT": "0", "RESERVED": "1", "PROJECT": "p"}, ["create"], 2),
    ("tpu_vm.sh", {}, ["setup"], 3),
    ("tpu_vm.sh", {"SLICES": "2"}, ["setup"], 5),
    ("tpu_vm.sh", {}, ["run", *FLAGS], 1),
    ("tpu_vm.sh", {"SLICES": "2", "TPU": "v5litepod-16"}, ["run", *FLAGS], 2),
    ("tpu_vm.sh", {"WORKER": "all"}, ["logs"], 1),
    ("tpu_vm.sh", {}, ["delete"], 1),
    ("tpu_mig.sh", {}, ["create"], 3),
    ("tpu_mig.sh", {"TPU": "v6e", "TOPOLOGY": "2x4", "MODEL": "STANDARD"}, ["create"], 3),
    ("tpu_mig.sh", {"MODEL": "RESERVATION_BOUND", "RESERVATION": "r"}, ["create"], 3),
    ("tpu_mig.sh", {}, ["setup"], 5),
    ("tpu_mig.sh", {}, ["run", *FLAGS], 2),
    ("tpu_mig.sh", {"WORKER": "1"}, ["logs"], 1),
    ("tpu_mig.sh", {}, ["delete"], 3),
    ("gke_xpk.sh", {}, ["cluster"], 1),
    ("gke_xpk.sh", {"DEVICE": "h100-mega-80gb-8", "COUNT": "4"}, ["run", *PLAIN], 2),
    ("gke_xpk.sh", {"DEVICE": "tpu7x-4x4x4", "COUNT": "2"}, ["run", *PLAIN], 2),
    ("gke_xpk.sh", {}, ["status"], 1),
    ("gke_xpk.sh", {}, ["logs"], 1),
    ("gke_xpk.sh", {"PROJECT": "p"}, ["delete"], 1),
    ("slurm.sh", {"NODES": "2", "PARTITION": "p", "ACCOUNT": "a"}, ["run", *FLAGS], 1),
    ("slurm.sh", {}, ["status"], 1),
    ("slurm.sh", {}, ["delete"], 1),
]
SETTINGS = {"PROJECT": "p", "HOSTS": "hosts", "SAY": "wanjax exit code 0"}


def named(calls, word):
    return [call for call in calls if any(word in argument for argument in call)]


@pytest.mark.parametrize(("script", "settings", "args", "count"), CASES)
def test_a_dry_run_prints_what_is_then_executed(desk, script, settings, args, count):
    (desk.folder / "hosts").write_text(HOSTS)
    needed = SETTINGS | settings if script == "tpu_mig.sh" else {"SAY": SETTINGS["SAY"]} | settings
    needed = {**needed, "SAY": ""} if args == ["create"] else needed
    code, printed, _, calls = desk.launch(script, "--dry_run", *args, **needed)
    assert code == 0 and calls == [] and printed, printed
    code, _, told, really = desk.launch(script, *args, **needed)
    assert code == 0 and len(really) == count, told
    (desk.folder / "printed").write_text(printed)
    code, _, _, pasted = desk.run(["bash", "-e", "printed"], **needed)
    assert code == 0 and pasted == really


def test_every_command_of_the_guide_is_an_action_of_its_launcher():
    guide = (LAUNCH / "README.md").read_text()
    found = re.findall(r"scripts/launch/(\w+\.sh) (?:--dry_run )?(\w+)", guide)
    scripts = {path.name: path.read_text() for path in LAUNCH.glob("*.sh")}
    assert {name for name, _ in found} == {*scripts} - {"common.sh"}
    for name, action in found:
        assert re.search(rf"\b{action}( \|.*)?\)|= {action} \]", scripts[name]), (name, action)


@pytest.mark.parametrize("script", [p.name for p in LAUNCH.glob("*.sh") if p.name != "common.sh"])
def test_an_unknown_action_is_refused_with_the_known_ones(desk, script):
    for args in (["fly"], []):
        code, _, told, calls = desk.launch(script, *args, PROJECT="p")
        assert code == 1 and calls == []
        assert told.startswith(f"{script}: action is '") and "run" in told.partition("expected")[2]


def test_every_argument_stays_one_word(desk):
    _, _, _, ((tool, *argv),) = desk.launch("slurm.sh", "run", *FLAGS, NODES="2", GPUS="4")
    assert tool == "sbatch" and argv[-4:] == ["scripts/launch/slurm.sbatch", *FLAGS]
    assert {"--nodes=2", "--ntasks-per-node=4", "--gpus-per-node=4", "--signal=TERM@300"} < {*argv}


def test_the_remote_line_passes_flags_unchanged_and_tells_the_exit_code(desk):
    """Run the line that ssh would get by a shell, with a stub Python in ~/wanjax."""
    _, _, _, ((*_, command),) = desk.launch("tpu_vm.sh", "run", *FLAGS, SAY="wanjax exit code 0")
    python = desk.folder / "wanjax/.venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(STUB)
    python.chmod(0o755)
    line = command.removeprefix("--command=")
    code, output, _, calls = desk.run(["bash", "-c", line], SAY="hello", CODE="42")
    assert calls == [["python", "-u", "-m", "wanjax.train", "--coordinator=auto", *FLAGS]]
    assert output == "hello\nwanjax exit code 42\n" and code == 0
    assert (desk.folder / "wanjax/logs/train.log").read_text() == output


def test_group_hosts_get_their_id_and_the_address_of_the_first(desk):
    (desk.folder / "hosts").write_text(HOSTS)
    _, _, _, calls = desk.launch("tpu_mig.sh", "run", *PLAIN, **SETTINGS)
    for i, (name, call) in enumerate(zip(("wanjax-a", "wanjax-b"), calls, strict=True)):
        assert name in call
        place = f"--coordinator=10.0.0.6:8482 --num_processes=2 --process_id={i} "
        assert place in call[-1]


def test_group_hosts_are_listed_by_asking_each_machine(desk):
    code, output, _, calls = desk.launch("tpu_mig.sh", "hosts", PROJECT="p", SAY="0 m 10.0.0.1")
    assert code == 0 and output == "0 m 10.0.0.1\n"
    assert len(named(calls, "list-instances")) == 1 and len(named(calls, "worker-id")) == 1
    assert (desk.folder / "runs/wanjax.hosts").read_text() == output
    code, _, told, _ = desk.launch("tpu_mig.sh", "run", PROJECT="p")
    assert code == 1 and "has hosts '0', expected 0 to 1" in told


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        ("tpu_vm.sh", {"TPU": "tpu7x-64"}, "TPU is 'tpu7x-64', expected v4-N"),
        ("tpu_mig.sh", {"PROJECT": "p", "TPU": "v4"}, "TPU is 'v4', expected v5p, v6e or 7x"),
        ("tpu_mig.sh", {"PROJECT": "p", "TOPOLOGY": "64"}, "TOPOLOGY is '64'"),
        ("tpu_mig.sh", {}, "PROJECT is empty"),
        ("tpu_mig.sh", {"PROJECT": "p"}, "no file runs/wanjax.hosts; run the action hosts"),
        ("gke_xpk.sh", {"DEVICE": "h100"}, "DEVICE is 'h100'"),
        ("local.sh", {"PLATFORM": "tpu"}, "PLATFORM is 'tpu', expected cpu or gpu"),
        ("local.sh", {"PROCESSES": "0"}, "PROCESSES is '0'"),
    ],
)
def test_wrong_parameters_are_refused_in_one_line(desk, script, settings, message):
    code, output, told, calls = desk.launch(script, "--dry_run", "run", **settings)
    assert code == 1 and calls == [] and "gcloud" not in output
    assert message in told and told.count("\n") == 1


def test_flags_that_would_not_survive_xpk_are_refused(desk):
    code, _, told, calls = desk.launch("gke_xpk.sh", "run", *FLAGS)
    assert code == 1 and calls == [] and "'--config.name=two words'" in told


def test_waiting_for_the_queue_ends_when_it_failed_or_when_the_command_fails(desk):
    code, _, told, _ = desk.launch("tpu_vm.sh", "create", STATE="SUSPENDED")
    assert code == 42 and "wanjax is SUSPENDED" in told
    code, _, _, calls = desk.launch("tpu_vm.sh", "create", CODE="3")
    assert code == 3 and len(calls) == 1


@pytest.mark.parametrize(
    ("say", "code", "expected"),
    [
        ("wanjax exit code 0", 0, 0),
        ("wanjax exit code 0\\nwanjax exit code 42", 0, 42),
        ("wanjax exit code 134\\nwanjax exit code 1\\nwanjax exit code 134", 0, 1),
        ("wanjax exit code 134", 0, 42),
        ("Connection closed", 255, 42),
        ("nothing", 0, 42),
        ("wanjax exit code 0", 255, 42),
        ("wanjax exit code 1", 1, 1),
    ],
)
def test_exit_codes_of_all_hosts_become_one(desk, say, code, expected):
    got, _, _, calls = desk.launch("tpu_vm.sh", "run", SLICES="2", SAY=say, CODE=str(code))
    assert got == expected and len(calls) == 2


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (42, True), (137, True)])
def test_a_slurm_job_is_requeued_unless_it_is_done_or_wrong(desk, code, again):
    (desk.folder / "bin/scontrol").write_text(STUB.replace('"${CODE:-0}"', "0"))
    command = ["bash", "scripts/launch/slurm.sbatch", *FLAGS]
    got, _, _, calls = desk.run(command, SLURM_JOB_ID="7", CODE=str(code))
    assert got == code
    assert named(calls, "requeue") == ([["scontrol", "requeue", "7"]] if again else [])
    (srun,) = named(calls, "wanjax.train")
    assert srun[-3:] == FLAGS


# A trainer: logs its arguments, then does what $MODE_<process id> says.
TRAINER = r"""#!/usr/bin/env bash
for flag; do case $flag in --process_id=*) id=${flag#*=} ;; esac; done
printf '%s\n' "$@" > "$CALLS.$id"
mode=MODE_$id
echo "process $id"
case ${!mode:-0} in
  wait) trap 'exit 42' TERM; touch "$CALLS.ready.$id"; while :; do sleep 0.1; done ;;
  deaf) trap '' TERM; while :; do sleep 0.1; done ;;
  kill) kill -KILL $$ ;;
  *) exit "${!mode:-0}" ;;
esac
"""


@pytest.fixture
def trainer(desk):
    (desk.folder / "trainer").write_text(TRAINER)
    (desk.folder / "trainer").chmod(0o755)
    return {"PYTHON": f"{desk.folder}/trainer", "LOGS": "logs"}


@pytest.mark.parametrize(
    ("modes", "expected"),
    [("0 0", 0), ("42 42", 42), ("1 134", 1), ("0 kill", 42), ("1 deaf", 1), ("deaf kill", 42)],
)
def test_local_ends_with_all_its_processes_and_their_verdict(desk, trainer, modes, expected):
    settings = {f"MODE_{i}": mode for i, mode in enumerate(modes.split())}
    code, output, _, _ = desk.launch("local.sh", "run", *FLAGS, GRACE="1", **trainer, **settings)
    assert code == expected and "process 0" in output and "process 1" not in output
    assert (desk.folder / "logs/process-1.log").read_text() == "process 1\n"
    for i in (0, 1):
        argv = (desk.folder / f"calls.{i}").read_text().splitlines()
        place = ["--coordinator=127.0.0.1:29400", "--num_processes=2", f"--process_id={i}"]
        assert argv == ["-u", "-m", "wanjax.train", *place, *FLAGS]


def test_local_gives_each_process_its_gpus(desk, trainer):
    code, output, _, _ = desk.launch(
        "local.sh", "--dry_run", "run", PLATFORM="gpu", DEVICES="2", **trainer
    )
    assert code == 0
    assert "--process_id=0 --local_devices=0,1\n" in output
    assert "--process_id=1 --local_devices=2,3\n" in output and "JAX_PLATFORMS" not in output


def test_sigterm_to_local_lets_its_processes_save_and_stop(desk, trainer):
    process = subprocess.Popen(
        ["bash", "scripts/launch/local.sh", "run"], cwd=desk.folder, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=desk.env(MODE_0="wait", MODE_1="wait", **trainer),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while len([*desk.folder.glob("calls.ready.*")]) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 42
    finally:
        process.kill()


@pytest.mark.slow
def test_local_starts_the_real_trainer_on_two_processes(tmp_path):
    model = tiny.save_model(tmp_path / "model")
    flags = ["--config=configs/quickstart.py", f"--config.model.path={model}", "--dry_run"]
    flags += ["--config.sampling.height=16", "--config.sampling.width=16"]
    flags += ["--config.sampling.frames=5", f"--config.workdir={tmp_path}"]
    env = {**os.environ, "PYTHON": sys.executable, "LOGS": str(tmp_path), "PORT": "29417"}
    done = subprocess.run(
        ["bash", LAUNCH / "local.sh", "run", *flags], env={**env, "XLA_FLAGS": ""},
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for i in (0, 1):
        log = (tmp_path / f"process-{i}.log").read_text()
        assert f"process  {i} of 2 on " in log and "'data': 2" in log and "dry run: " in log


def test_shellcheck_finds_nothing():
    tool = shutil.which("shellcheck") or shutil.which(
        "shellcheck", path=pathlib.Path(sys.executable).parent
    )
    assert tool is not None, "shellcheck is missing; pip install -e '.[dev]' brings it"
    files = sorted(p for p in LAUNCH.iterdir() if p.suffix in (".sh", ".sbatch"))
    command = [tool, "--external-sources", "--source-path=SCRIPTDIR", *files]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout

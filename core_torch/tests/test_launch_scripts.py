"""What ``twinshard launch`` prints: it parses, it does what it says, and nothing is injected."""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from core_torch.cli import main
from core_torch.cli.commands import parse
from core_torch.config import RunConfig

HOSTILE = "a b'$(touch pwned)`touch pwned`\";&.toml"
# Stand-ins for Slurm's commands: srun runs until scancel tells it, requeue leaves a note.
STAND_INS = {
    "srun": 'echo "$@" > srun.txt; trap "echo told > told.txt; exit 1" TERM\n'
    'echo $$ > pid.txt; [ -n "${SAID:-}" ] && mkdir -p runs/twinshard && '
    'echo "{\\"exit_code\\": $SAID}" > runs/twinshard/outcome.json\n'
    'for _ in $(seq "${TENTHS:-0}"); do sleep 0.1; done; exit "${CODE:-0}"',
    "scancel": 'echo "$@" > scancel.txt; kill -TERM "$(cat pid.txt)"',
    "scontrol": '[ "$1" = requeue ] && echo "$2" > requeue.txt; [ "$1" = show ] && echo host7',
}


def printed(capsys: pytest.CaptureFixture[str], kind: str, *words: str) -> str:
    """What the command prints."""
    assert main(["launch", kind, *words]) == 0
    return capsys.readouterr().out


def assert_trains(words: list[str], config: str) -> None:
    """The words after torchrun's own are a command that Twinshard takes."""
    ours = words.index("core_torch")
    assert words[ours - 2 : ours] == ["-m", "--"]
    assert words[ours + 1 : ours + 3] == ["train", config]
    parse("train", words[ours + 3 :])


def bash_syntax(script: str) -> None:
    """``bash -n``: reads the script and runs nothing of it."""
    done = subprocess.run(
        ["bash", "-n"], input=script, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("nodes", [1, 3])
def test_torchrun_s_line_is_one_command_for_all_machines(
    nodes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--nodes", str(nodes), "--host", "first", "--config", HOSTILE]
    text = printed(capsys, "torchrun", *words)
    bash_syntax(text)
    line = shlex.split(text.splitlines()[-1])
    assert ("--standalone" in line) == (nodes == 1)
    assert ("--rdzv-endpoint=first:29500" in line) == (nodes == 3)
    assert_trains(line, HOSTILE)


def slurm(tmp_path: Path, script: str, tell: bool = False, **env: str) -> int:
    """Runs a script with stand-ins for Slurm, perhaps with the signal before the limit."""
    for name, body in STAND_INS.items():
        path = tmp_path / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
    place = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "42"}
    place["SLURM_JOB_NODELIST"] = "host[7-8]"
    process = subprocess.Popen(
        ["bash", "-c", script], cwd=tmp_path, env=place | env, stderr=subprocess.PIPE, text=True
    )
    if tell:
        while not (tmp_path / "pid.txt").exists() or not (tmp_path / "pid.txt").read_text():
            assert process.poll() is None
        process.terminate()
    _, problems = process.communicate(timeout=30)
    assert not [line for line in problems.splitlines() if "Terminated" not in line]
    return process.returncode


def test_slurm_s_script_runs_the_line_and_lets_nothing_be_injected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup = tmp_path / "env $(touch pwned).sh"
    setup.write_text("export FROM_SETUP=1\n")
    words = ["--config", HOSTILE, "--run", "runs/twinshard", "--setup", str(setup)]
    script = printed(capsys, "slurm", *words, "--partition", "gpu", "--account", "me")
    bash_syntax(script)
    assert slurm(tmp_path, script) == 0
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "requeue.txt").exists()
    ran = (tmp_path / "srun.txt").read_text().strip()
    assert "--rdzv-endpoint=host7:29500" in ran
    assert ran.endswith(f"-m -- core_torch train {HOSTILE} --run runs/twinshard --resume auto")
    directives = re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", script, re.M)
    assert dict(directives) == {
        "job-name": "twinshard",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "64",
        "gpus-per-node": "8",
        "time": "24:00:00",
        "partition": "gpu",
        "account": "me",
        "signal": "B:TERM@120",
        "open-mode": "append",
        "output": "twinshard-%j.log",
        "requeue": "",
    }


@pytest.mark.parametrize(
    ("env", "tell", "code", "again"),
    [
        ({"CODE": "0"}, False, 0, False),
        ({"CODE": "1", "SAID": "2"}, False, 1, False),
        ({"CODE": "1", "SAID": "75"}, False, 1, True),
        ({"CODE": "1", "TENTHS": "100"}, True, 1, True),
    ],
    ids=["complete", "failed", "preempted", "told before the limit"],
)
def test_slurm_s_script_queues_a_preempted_run_again(
    env: dict[str, str],
    tell: bool,
    code: int,
    again: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = printed(capsys, "slurm")
    assert slurm(tmp_path, script, tell=tell, **env) == code
    assert (tmp_path / "requeue.txt").exists() == again
    assert (tmp_path / "told.txt").exists() == tell
    if tell:
        assert (tmp_path / "scancel.txt").read_text() == "--signal=TERM 42\n"


def manifest(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, Any], ...]:
    """Service, Job and pod of a manifest."""
    told = json.loads(printed(capsys, "kubernetes", "--image", "registry/twinshard:1", *words))
    assert (told["apiVersion"], told["kind"]) == ("v1", "List")
    service, job = told["items"]
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    return service, job, job["spec"]["template"]["spec"]


def test_kubernetes_manifest_is_an_indexed_job_that_finds_its_first_pod(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--nodes", "4", "--config", HOSTILE, "--job-name", "mine", "--memory", "64Gi"]
    service, job, pod = manifest(capsys, *words)
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == job["spec"]["template"]["metadata"]["labels"]
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == 4
    assert pod["subdomain"] == service["metadata"]["name"] == "mine"
    assert pod["restartPolicy"] == "Never" and pod["terminationGracePeriodSeconds"] > 120
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "64Gi"}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    command = container["command"]
    assert "--rdzv-endpoint=mine-0.mine:29500" in command
    assert HOSTILE.replace("$(", "$$(") in command  # or Kubernetes would fill in a variable
    assert_trains([word.replace("$$(", "$(") for word in command], HOSTILE)


def test_a_pod_without_gpus_asks_for_none(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, pod = manifest(capsys, "--no-gpus", "--nodes", "1", "--config", HOSTILE)
    [container] = pod["containers"]
    assert "resources" not in container and "--standalone" in container["command"]


def test_a_file_that_is_here_is_checked_against_the_machines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[mesh]\nreplicas = 2\nshards = 8\n")
    assert RunConfig().mesh.ranks != 16
    words = ["launch", "slurm", "--config", str(path), "--nodes"]
    assert main([*words, "2"]) == 0
    assert main([*words, "3"]) == 2
    assert "is 16 ranks; 3 nodes x 8 are 24" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["torchrun", "--nodes", "2"], "host: 2 machines need the first one's name"),
        (["torchrun", "--host", "a b"], "host: must be a name or an address, got 'a b'"),
        (["slurm", "--job-name", "a\nb"], "job_name: must be at most 50 small letters"),
        (["slurm", "--partition", "a b"], "partition: must be letters, digits"),
        (["slurm", "--time", "soon"], "time: must be MINUTES, H:MM:SS or D-HH:MM:SS"),
        (["slurm", "--config", "a\nb"], "config: must be printable"),
        (["kubernetes"], "image: must name a container image"),
        (["kubernetes", "--image", "x", "--job-name", "A"], "job_name: must be at most 50"),
        (["kubernetes", "--image", "x", "--memory", "much"], "memory: must be like 64Gi"),
        (["kubernetes", "--image", "x", "--mount", "runs"], "mount: must begin with a slash"),
        (["slurm", "--port", "0"], "port: must lie in [1, 65535], got 0"),
    ],
)
def test_values_that_no_launcher_takes_are_refused(
    line: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", *line]) == 2
    assert message in capsys.readouterr().err

"""``twinshard launch``: prints what starts a run on other machines. Starts nothing itself.

Each launcher starts torchrun, which starts the ranks, with ``--resume auto``: the same script
begins a run and goes on with it. torchrun turns every exit code into 1, so whoever wants to know
why a run ended reads RUN/outcome.json.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from core_torch.cli.launch_options import (
    KubernetesOptions,
    LaunchOptions,
    SlurmOptions,
    TorchrunOptions,
)
from core_torch.config_file import from_toml
from core_torch.errors import EXIT_OK, EXIT_PREEMPTED, ConfigError


def run(options: LaunchOptions, words: list[str]) -> int:
    """Prints the script or manifest.

    Raises:
        ConfigError: the configuration is here, and wants another number of ranks.
    """
    check_ranks(options)
    if isinstance(options, TorchrunOptions):
        text = torchrun_lines(options)
    elif isinstance(options, SlurmOptions):
        text = slurm_script(options)
    else:
        text = json.dumps(kubernetes_manifest(options), indent=2)
    print(text)
    return EXIT_OK


def check_ranks(options: LaunchOptions) -> None:
    """Checks the configuration against the machines, if it can be read from here.

    Raises:
        ConfigError: it cannot work, or not with so many ranks.
    """
    if not Path(options.config).is_file():
        return  # the machines of the cluster have it
    mesh = from_toml(Path(options.config)).mesh
    ranks = options.nodes * options.ranks_per_node
    if mesh.ranks != ranks:
        raise ConfigError(
            f"{options.config}: {mesh.product} is {mesh.ranks} ranks; "
            f"{options.nodes} nodes x {options.ranks_per_node} are {ranks}",
            next="other --nodes and --ranks-per-node, or another mesh in the file",
        )


def run_folder(options: LaunchOptions) -> str:
    """The folder of the run."""
    base = options.mount.rstrip("/") if isinstance(options, KubernetesOptions) else "runs"
    return options.run or f"{base}/{options.job_name}"


def torchrun_words(options: LaunchOptions, endpoint: str) -> list[str]:
    """The command of one machine, unquoted.

    Args:
        options: of the run.
        endpoint: host and port at which the machines meet.
    """
    meet = ["--standalone"]
    if options.nodes > 1:
        meet = [
            f"--nnodes={options.nodes}",
            f"--rdzv-id={options.job_name}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={endpoint}",
        ]
    own = [f"--nproc-per-node={options.ranks_per_node}", f"--shutdown-timeout={options.grace}"]
    train = ["train", options.config, "--run", run_folder(options), "--resume", "auto"]
    return ["torchrun", *meet, *own, "-m", "--", "core_torch", *train]


def torchrun_lines(options: TorchrunOptions) -> str:
    """One line for all machines, with a comment that says so."""
    line = shlex.join(torchrun_words(options, f"{options.host}:{options.port}"))
    if options.nodes == 1:
        return line
    return f"# on each of the {options.nodes} machines, {options.host} being one of them\n{line}"


def slurm_script(options: SlurmOptions) -> str:
    """A script for sbatch.

    Slurm tells the script ``grace`` seconds before the limit; it tells the ranks, and queues the
    job again if they were told or have left with the code of a preempted run.
    """
    asked = {
        "job-name": options.job_name,
        "nodes": options.nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": options.cpus_per_rank * options.ranks_per_node,
        "gpus-per-node": options.ranks_per_node if options.gpus else "",
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"B:TERM@{options.grace}",
        "open-mode": "append",
        "output": f"{options.job_name}-%j.log",
    }
    directives = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value != ""]
    words = [shlex.quote(word) for word in torchrun_words(options, "ENDPOINT")]
    words = [word.replace("=ENDPOINT", '="$endpoint"') for word in words]
    outcome = shlex.quote(f"{run_folder(options)}/outcome.json")
    head = f'endpoint="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):{options.port}"'
    lines = [
        "#!/bin/bash",
        *directives,
        "#SBATCH --requeue",
        "",
        "set -u",
        *([f"source {shlex.quote(options.setup)}"] if options.setup else []),
        *([head] if options.nodes > 1 else []),
        "told=0",
        "tell() {",
        "    told=$((told + 1))",
        '    scancel --signal=TERM "$SLURM_JOB_ID"  # the ranks, not this script',
        "}",
        "trap tell TERM",
        "",
        f"rm -f {outcome}",
        "srun " + " ".join(words) + " &",
        "ranks=$!",
        "seen=-1",
        'until [ "$seen" -eq "$told" ]; do  # a signal ends wait before the ranks have ended',
        "    seen=$told",
        '    wait "$ranks"',
        "    code=$?",
        "done",
        "",
        "# torchrun turns every code into 1; the run says what it was.",
        f"said=\"$(grep -o '\"exit_code\": *[0-9]*' {outcome} 2>/dev/null | grep -o '[0-9]*$')\"",
        f'if [ "$code" -ne 0 ] && {{ [ "$told" -gt 0 ] || [ "$said" = {EXIT_PREEMPTED} ]; }}; then',
        '    scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines)


def kubernetes_manifest(options: KubernetesOptions) -> dict[str, Any]:
    """An indexed Job and the headless Service by which its pods find the first one."""
    name, labels = options.job_name, {"app": options.job_name}
    metadata = {"name": name, "namespace": options.namespace, "labels": labels}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before they are ready
            "selector": labels,
            "ports": [{"name": "rendezvous", "port": options.port}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": options.nodes,
            "parallelism": options.nodes,
            "backoffLimit": options.retries,
            "template": {"metadata": {"labels": labels}, "spec": _pod(options)},
        },
    }
    return {"apiVersion": "v1", "kind": "List", "items": [service, job]}


def _pod(options: KubernetesOptions) -> dict[str, Any]:
    """What every pod of the job is."""
    words = torchrun_words(options, f"{options.job_name}-0.{options.job_name}:{options.port}")
    container: dict[str, Any] = {
        "name": "ranks",
        "image": options.image,
        # A list, so no shell reads it; a doubled sign keeps Kubernetes from filling in variables.
        "command": [word.replace("$(", "$$(") for word in words],
        "ports": [{"containerPort": options.port}],
        "volumeMounts": [
            {"name": "runs", "mountPath": options.mount},
            {"name": "shm", "mountPath": "/dev/shm"},
        ],
    }
    limits: dict[str, Any] = {}
    if options.gpus:
        limits["nvidia.com/gpu"] = options.ranks_per_node
    if options.memory:
        limits["memory"] = options.memory
    if limits:
        container["resources"] = {"limits": limits}
    return {
        "subdomain": options.job_name,
        "restartPolicy": "Never",
        # torchrun gives its ranks ``grace`` seconds; it needs some to leave itself.
        "terminationGracePeriodSeconds": options.grace + 15,
        "containers": [container],
        "volumes": [
            {"name": "runs", "persistentVolumeClaim": {"claimName": options.claim}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }

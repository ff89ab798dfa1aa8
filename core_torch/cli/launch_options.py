"""Options of ``twinshard launch``, one dataclass for each launcher.

Values that end up in places without quotes (a job's name, directives of Slurm) must match a
pattern; all others are quoted where they are printed.
"""

import re
from dataclasses import dataclass

from core_torch.config import Problem
from core_torch.config_base import at_least

# A label of DNS with room for the index of a pod behind it.
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,48}[a-z0-9])?")
_DIRECTIVE = re.compile(r"[\w.:,+/@=-]*", re.ASCII)
_TIME = re.compile(r"(\d+-)?\d{1,3}(:\d{2}){0,2}")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchrunOptions:
    """The run, and the machines that it is started on by hand."""

    config: str = "run.toml"  # of the run, as every machine sees it
    run: str = ""  # folder of the run on a shared disk; empty: runs/NAME
    job_name: str = "twinshard"  # of the run: small letters, digits and hyphens
    nodes: int = 1  # machines
    ranks_per_node: int = 8  # processes on each, one for each GPU
    host: str = "localhost"  # name or address of the first machine
    port: int = 29500  # on which ranks find each other
    grace: int = 120  # seconds to commit and leave after a SIGTERM

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = common_problems(self)
        if self.nodes > 1 and self.host == "localhost":
            message = f"{self.nodes} machines need the first one's name, got localhost"
            problems.append(Problem("host", message))
        if not self.host or not _DIRECTIVE.fullmatch(self.host):
            problems.append(Problem("host", f"must be a name or an address, got {self.host!r}"))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class SlurmOptions:
    """The run, and the job that asks for its machines."""

    config: str = "run.toml"  # of the run, as every machine sees it
    run: str = ""  # folder of the run on a shared disk; empty: runs/NAME
    job_name: str = "twinshard"  # of the job: small letters, digits and hyphens
    nodes: int = 2  # machines
    ranks_per_node: int = 8  # processes on each
    gpus: bool = True  # ask for one GPU for each of them
    cpus_per_rank: int = 8  # processor cores for each of them
    time: str = "24:00:00"  # limit of the job; it is queued again until the run is complete
    partition: str = ""  # of the cluster; empty: its default
    account: str = ""  # who pays; empty: the default
    setup: str = ""  # a shell file to source first, that loads modules or an environment
    port: int = 29500  # on which ranks find each other
    grace: int = 120  # seconds before the limit at which ranks are told to commit and leave

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = common_problems(self) + at_least(1, self, "cpus_per_rank")
        if not _TIME.fullmatch(self.time):
            message = f"must be MINUTES, H:MM:SS or D-HH:MM:SS, got {self.time!r}"
            problems.append(Problem("time", message))
        for name in ("partition", "account"):
            value = getattr(self, name)
            if not _DIRECTIVE.fullmatch(value):
                message = f"must be letters, digits and ._:,+/@=-, got {value!r}"
                problems.append(Problem(name, message))
        return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesOptions:
    """The run, and the pods that it runs in."""

    config: str = "/runs/run.toml"  # of the run, as the pods see it
    run: str = ""  # folder of the run in the pods; empty: MOUNT/NAME
    job_name: str = "twinshard"  # of the job: small letters, digits and hyphens
    nodes: int = 2  # pods
    ranks_per_node: int = 8  # processes in each
    gpus: bool = True  # ask for one GPU for each of them
    image: str = ""  # container image that has Twinshard
    namespace: str = "default"  # of the objects
    claim: str = "runs"  # persistent volume claim that all pods can write to
    mount: str = "/runs"  # where pods see it
    memory: str = ""  # of a pod, e.g. 64Gi; empty: no request
    port: int = 29500  # on which ranks find each other
    retries: int = 10  # pods that may fail before the job does
    grace: int = 120  # seconds to commit and leave after a SIGTERM

    def validate(self) -> list[Problem]:
        """Problems of these options."""
        problems = common_problems(self) + at_least(0, self, "retries")
        if not self.image:
            problems.append(Problem("image", "must name a container image that has Twinshard"))
        for name in ("namespace", "claim"):
            problems += name_problems(name, getattr(self, name))
        if not self.mount.startswith("/"):
            problems.append(Problem("mount", f"must begin with a slash, got {self.mount!r}"))
        if self.memory and not _QUANTITY.fullmatch(self.memory):
            problems.append(Problem("memory", f"must be like 64Gi, got {self.memory!r}"))
        return problems


LaunchOptions = TorchrunOptions | SlurmOptions | KubernetesOptions


def common_problems(options: LaunchOptions) -> list[Problem]:
    """What is wrong with what all launchers take."""
    problems = at_least(1, options, "nodes", "ranks_per_node", "grace")
    problems += name_problems("job_name", options.job_name)
    if not options.config:
        problems.append(Problem("config", "must name the configuration of the run"))
    for name in ("config", "run"):
        if not getattr(options, name).isprintable():
            problems.append(Problem(name, f"must be printable, got {getattr(options, name)!r}"))
    if not 1 <= options.port <= 65535:
        problems.append(Problem("port", f"must lie in [1, 65535], got {options.port}"))
    return problems


def name_problems(name: str, value: str) -> list[Problem]:
    """What is wrong with the name of an object."""
    if _NAME.fullmatch(value):
        return []
    message = "must be at most 50 small letters, digits and hyphens, a letter first and no hyphen "
    return [Problem(name, f"{message}last, got {value!r}")]

"""A link of given rate and delay between two ranks of this machine.

Each rank gets a network namespace of its own; the two are joined by a process that holds back
every packet (see ``relay``). The namespaces have no name: they exist as long as the relay and
the ranks in them do, so there is nothing that could be left behind, however this process
ends. Nothing outside of them is touched. It needs root, /dev/net/tun, ``ip`` and ``nsenter``.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from core_torch.errors import ConfigError, TwinshardError

INTERFACE = "link0"
RANKS = 2
TUN = Path("/dev/net/tun")
_TOOLS = ("ip", "nsenter")
_ROOT = Path(__file__).parents[2]
_NUMBER = r"(\d+(?:\.\d+)?)"
_SPELLING = re.compile(rf"{_NUMBER}(k|m|g)bit,{_NUMBER}(us|ms|s)")
_RATES = {"k": 1e3, "m": 1e6, "g": 1e9}
_DELAYS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_END_SECONDS = 5.0


class LinkFailed(TwinshardError):
    """The emulated link could not be set up, although this machine seems to allow it."""


class Network(NamedTuple):
    """A link as asked for."""

    text: str  # as written: "1gbit,1ms"
    rate: float  # bits per second, in each direction
    delay: float  # seconds, one way


class Side(NamedTuple):
    """How a process gets to one end of the link."""

    prefix: tuple[str, ...]  # words before its command
    environment: dict[str, str]  # so that gloo uses the link
    address: str  # of this end


def parse_network(text: str) -> Network | None:
    """The link that ``text`` describes; None for ``loopback``, the machine's own.

    Args:
        text: ``loopback`` or ``RATE,DELAY``, such as ``1gbit,1ms`` or ``500mbit,250us``; the
            delay is one way, so a round trip takes twice as long.

    Raises:
        ConfigError: spelt in another way, or a rate of zero.
    """
    if text == "loopback":
        return None
    found = _SPELLING.fullmatch(text)
    if not found or not float(found[1]):
        raise ConfigError(
            f"network: {text!r} is neither loopback nor RATE,DELAY",
            next="for instance --network 1gbit,1ms",
        )
    return Network(text, float(found[1]) * _RATES[found[2]], float(found[3]) * _DELAYS[found[4]])


def obstacle() -> str:
    """Why no link can be emulated on this machine; empty if one can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces need Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not os.access(TUN, os.R_OK | os.W_OK):
        return f"{TUN} cannot be opened"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    return f"no command {' or '.join(missing)}" if missing else ""


@contextmanager
def emulated(network: Network, ranks: int = RANKS) -> Iterator[list[Side]]:
    """Sets the link up, yields its two ends, and takes it down.

    Raises:
        ConfigError: other than two ranks, or something is missing on this machine.
        LinkFailed: the kernel refused.
    """
    if ranks != RANKS:
        raise ConfigError(f"network: an emulated link joins 2 ranks, not {ranks}")
    if why := obstacle():
        raise ConfigError(f"network: no link can be emulated: {why}")
    path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    relay = subprocess.Popen(
        [sys.executable, "-m", "core_torch.bench.relay", str(network.rate), str(network.delay)],
        stdin=subprocess.PIPE,  # never written; its end says that this process is gone
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us to handle
        env=os.environ | {"PYTHONPATH": path},
    )
    assert relay.stdin and relay.stdout
    try:
        answer = json.loads(relay.stdout.readline() or b'{"error": "the relay ended"}')
        if "error" in answer:
            raise LinkFailed(f"no link: {answer['error']}", next="--network loopback")
        yield [
            Side(
                ("nsenter", f"--net={namespace}", "--"),
                {"GLOO_SOCKET_IFNAME": INTERFACE},
                address,
            )
            for namespace, address in zip(answer["namespaces"], answer["addresses"], strict=True)
        ]
    finally:
        relay.stdin.close()
        try:
            relay.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            relay.kill()
            relay.wait()
        relay.stdout.close()

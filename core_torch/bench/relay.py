"""The process between two network namespaces: lets packets pass at a rate, after a delay.

``python -m core_torch.bench.relay BITS_PER_SECOND SECONDS`` makes two namespaces with a TUN
device each, writes where they are as one line of JSON, and carries packets from one to the
other until its standard input ends. As on a cable, a packet leaves when those before it have
left, takes ``bytes / rate`` to get out, and arrives ``delay`` later.

What keeps it cheap enough for Python: packets of up to 65,000 bytes (TCP fills them), so a
gigabit is 2,000 packets per second and direction.

TCP inside the namespaces is told to start with windows and buffers that fill the link, not to
shrink them after a pause, and to learn nothing between connections: what is seen is then the
link and not a heuristic of the sender. Its congestion control is ``reno``, which waits for a
loss, and this link loses nothing. Packets carry no checksum, as on a loopback device.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import select
import struct
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import NoReturn

from core_torch.bench.link import INTERFACE, TUN

MTU = 65_000
ADDRESSES = ("10.78.0.1", "10.78.0.2")  # inside the namespaces only
_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD, _CHECKSUMS = 0x400454D0, 0x01
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
HEADER = 10  # bytes before each packet, that say whether its checksum is still to be made
_FEWEST_PACKETS = 10  # of the first window; what the kernel starts with anyway
_MOST_PACKETS = 1_000
_SETTINGS = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_no_metrics_save": "1",
    "tcp_rmem": "4096 8388608 33554432",
    "tcp_wmem": "4096 8388608 33554432",
}


class Direction:
    """Packets on their way from one device to the other."""

    def __init__(self, source: int, target: int, rate: float, delay: float) -> None:
        self.source = source
        self.free = 0.0  # when the last packet has left
        self._target = target
        self._seconds_per_byte = 8.0 / rate
        self._delay = delay
        self._packets: deque[tuple[float, bytes]] = deque()  # (when it arrives, what)

    def take(self) -> None:
        """Takes all packets that wait at the source."""
        with contextlib.suppress(BlockingIOError):
            while True:
                packet = os.read(self.source, HEADER + MTU)
                begin = max(time.monotonic(), self.free)
                self.free = begin + (len(packet) - HEADER) * self._seconds_per_byte
                self._packets.append((self.free + self._delay, packet))

    def deliver(self) -> float | None:
        """Hands over what has arrived; says when the next packet will, if there is one."""
        packets = self._packets
        while packets and packets[0][0] <= time.monotonic():
            os.write(self._target, packets.popleft()[1])
        return packets[0][0] if packets else None


def carry(directions: list[Direction], stop: int) -> None:
    """Carries packets until the descriptor ``stop`` can be read or has ended.

    A packet that comes while its line is busy leaves when the line is free, whenever it was
    taken until then. So busy sources wake nobody up: half the work of a full link.
    """
    while True:
        now = time.monotonic()
        times = [at for direction in directions if (at := direction.deliver()) is not None]
        times += [direction.free for direction in directions if direction.free > now]
        idle = [direction.source for direction in directions if direction.free <= now]
        wait = max(0.0, min(times) - time.monotonic()) if times else None
        ready, _, _ = select.select([*idle, stop], [], [], wait)
        if stop in ready:
            return
        for direction in directions:
            direction.take()


def new_namespace() -> int:
    """Moves this process into a new network namespace; a descriptor that keeps it alive."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"unshare: {os.strerror(error)}")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def new_device(address: str, window: int) -> int:
    """A TUN device in this process's namespace, up and with a route; its descriptor."""
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUMS)
    for name, value in _SETTINGS.items():
        with contextlib.suppress(OSError):  # a kernel without it still has a link
            Path("/proc/sys/net/ipv4", name).write_text(value)
    network = f"{address.rpartition('.')[0]}.0/24"
    for words in (
        f"link set lo up mtu {MTU}",
        f"addr add {address}/24 dev {INTERFACE}",
        f"link set {INTERFACE} mtu {MTU} txqueuelen 10000 up",
        f"route change {network} dev {INTERFACE} src {address} initcwnd {window} initrwnd {window}",
    ):
        subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
    return device


def main(rate: float, delay: float) -> None:
    """Sets up both ends, says where they are, and carries packets until standard input ends."""
    in_flight = 2 * delay * rate / 8 / MTU  # packets of one round trip
    window = int(min(max(2 * in_flight, _FEWEST_PACKETS), _MOST_PACKETS))
    namespaces, devices = [], []
    try:
        for address in ADDRESSES:
            namespaces.append(new_namespace())
            devices.append(new_device(address, window))
    except (OSError, subprocess.CalledProcessError) as error:
        say({"error": str(getattr(error, "stderr", "") or error).strip()})
        return
    with contextlib.suppress(PermissionError):  # to be on time although the ranks compute
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with contextlib.suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text("1000")
    paths = [f"/proc/{os.getpid()}/fd/{namespace}" for namespace in namespaces]
    say({"namespaces": paths, "addresses": ADDRESSES})
    a, b = devices
    carry([Direction(a, b, rate, delay), Direction(b, a, rate, delay)], sys.stdin.fileno())


def say(answer: dict[str, object]) -> None:
    """One line for the process that started this one."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def run() -> NoReturn:
    """Entry point of the process."""
    main(float(sys.argv[1]), float(sys.argv[2]))
    sys.exit(0)


if __name__ == "__main__":
    run()

"""The link: how it is asked for, how fast and late it is, and that nothing of it stays."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from core_torch.bench import link
from core_torch.bench.link import emulated, obstacle, parse_network
from core_torch.bench.relay import HEADER, Direction
from core_torch.cli.launch import launch
from core_torch.cli.ranks import Place
from core_torch.errors import ConfigError
from core_torch.tests.rank_jobs import MODULE

ROOT = Path(__file__).parents[2]
needs_link = pytest.mark.skipif(bool(obstacle()), reason=f"no emulated link: {obstacle()}")
SLOW = parse_network("100mbit,20ms")  # so slow that a busy machine makes no difference


@pytest.mark.parametrize(
    ("text", "rate", "delay"),
    [
        ("1gbit,1ms", 1e9, 1e-3),
        ("500mbit,250us", 5e8, 2.5e-4),
        ("0.5gbit,2ms", 5e8, 2e-3),
        ("64kbit,0.1s", 64e3, 0.1),
        ("1gbit,0ms", 1e9, 0.0),
    ],
)
def test_a_link_is_read_in_the_units_of_networks(text: str, rate: float, delay: float) -> None:
    network = parse_network(text)
    assert network is not None
    assert (network.text, network.rate) == (text, rate)
    assert network.delay == pytest.approx(delay)


def test_loopback_is_no_link() -> None:
    assert parse_network("loopback") is None


@pytest.mark.parametrize(
    "text", ["", "1gbit", "1gbit,", "1gbit,1", "1 gbit,1ms", "1gb,1ms", "-1gbit,1ms", "0gbit,1ms"]
)
def test_another_spelling_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="neither loopback nor RATE,DELAY") as caught:
        parse_network(text)
    assert "1gbit,1ms" in caught.value.next


def test_a_link_joins_two_ranks_and_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SLOW is not None
    with pytest.raises(ConfigError, match="joins 2 ranks, not 3"), emulated(SLOW, 3):
        pass
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs? root|need Linux"), emulated(SLOW):
        pass


def test_packets_leave_one_after_the_other_and_arrive_a_delay_later() -> None:
    device, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    target, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    device.setblocking(False)
    direction = Direction(device.fileno(), target.fileno(), rate=8000.0, delay=10.0)
    try:
        for _ in range(2):
            far.send(bytes(HEADER + 500))  # takes half a second at 1000 bytes per second
        before = time.monotonic()
        direction.take()
        first = direction.deliver()
        assert first == pytest.approx(before + 10.5, abs=0.2)
        arrivals = [at for at, _ in direction._packets]
        assert arrivals[1] - arrivals[0] == pytest.approx(0.5)
        end.setblocking(False)
        with pytest.raises(BlockingIOError):
            end.recv(1000)
        soon = Direction(device.fileno(), target.fileno(), rate=8e9, delay=0.0)
        far.send(b"now")
        soon.take()
        time.sleep(0.001)
        assert soon.deliver() is None
        assert end.recv(1000) == b"now"
    finally:
        for one in (device, far, target, end):
            one.close()


# Runs in the other namespace: answers eight pings, then sends four megabytes.
PEER = """
import socket, sys
listener = socket.create_server((sys.argv[1], 5000))
print("up", flush=True)
connection, _ = listener.accept()
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(8):
    connection.sendall(connection.recv(1))
connection.sendall(bytes(4_000_000))
"""
MEASURE = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
trips = []
for _ in range(8):
    begin = time.perf_counter()
    connection.sendall(b".")
    connection.recv(1)
    trips.append(time.perf_counter() - begin)
begin, left = time.perf_counter(), 4_000_000
while left:
    left -= len(connection.recv(left))
print(min(trips), time.perf_counter() - begin)
"""


@needs_link
def test_the_link_has_its_rate_and_delay_and_nothing_of_it_stays() -> None:
    assert SLOW is not None
    devices = {name for _, name in socket.if_nameindex()}
    with emulated(SLOW) as sides:
        assert {name for _, name in socket.if_nameindex()} == devices
        namespace = Path(sides[0].prefix[1].removeprefix("--net="))
        assert namespace.exists()
        script = [*sides[0].prefix, sys.executable, "-c", PEER, sides[0].address]
        with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as peer:
            assert peer.stdout is not None
            peer.stdout.readline()
            script = [*sides[1].prefix, sys.executable, "-c", MEASURE, sides[0].address]
            said = subprocess.run(script, capture_output=True, text=True, timeout=20, check=True)
    trip, transfer = map(float, said.stdout.split())
    assert 0.040 <= trip < 0.120
    # Four megabytes take 320 ms; some of it is under way when the last answer arrives.
    assert 0.250 <= transfer < 1.500
    assert not namespace.exists()
    assert {name for _, name in socket.if_nameindex()} == devices


@needs_link
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_relay_ends_with_its_parent(number: signal.Signals) -> None:
    script = (
        "import signal, time\n"
        "from core_torch.bench.link import emulated, parse_network\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & ignores it
        "with emulated(parse_network('1gbit,1ms')) as sides:\n"
        "    print(sides[0].prefix[1], flush=True)\n"
        "    time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as parent:
        assert parent.stdout is not None
        namespace = Path(parent.stdout.readline().strip().removeprefix("--net="))
        assert namespace.exists()
        parent.send_signal(number)
        parent.wait(10)
    end = time.monotonic() + 10
    while namespace.exists() and time.monotonic() < end:
        time.sleep(0.02)
    assert not namespace.exists()


@needs_link
def test_an_error_inside_takes_the_link_down() -> None:
    assert SLOW is not None
    with pytest.raises(ZeroDivisionError), emulated(SLOW) as sides:
        raise ZeroDivisionError
    assert not Path(sides[0].prefix[1].removeprefix("--net=")).exists()


@needs_link
def test_what_the_kernel_refuses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SLOW is not None
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(link.LinkFailed, match="no link: the relay ended"), emulated(SLOW):
        pass


def test_a_rank_runs_where_its_place_says(tmp_path: Path) -> None:
    script = 'echo "$WHO" >> ' + f'{tmp_path}/$RANK; exec "$@"'
    places = [Place(("sh", "-c", script, "sh"), {"WHO": f"rank {n}"}) for n in range(2)]
    job = {"kind": "echo", "value": 1}
    assert launch(job, 2, lambda event: None, module=MODULE, places=places) == [0, 2, 1]
    assert [(tmp_path / str(n)).read_text() for n in range(2)] == ["rank 0\n", "rank 1\n"]

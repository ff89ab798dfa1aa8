"""Length-prefixed messages over a stream socket."""

import socket

LENGTH_BYTES = 8


def send(peer: socket.socket, message: bytes) -> None:
    """Sends one message."""
    peer.sendall(len(message).to_bytes(LENGTH_BYTES, "big") + message)


def receive(peer: socket.socket) -> bytes | None:
    """The next message, or None if the peer has closed the connection."""
    head = _read(peer, LENGTH_BYTES)
    return None if head is None else _read(peer, int.from_bytes(head, "big"))


def _read(peer: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(size - len(data), 1 << 20))
        if not part:
            return None
        data += part
    return bytes(data)

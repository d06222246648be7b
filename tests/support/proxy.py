"""A TCP proxy that a test can throttle and cut."""

import socket
import threading
import time
from contextlib import suppress
from typing import Self


class Proxy:
    """Forwards connections to `port` on this machine,
    at most `rate` bytes a second in each direction.
    """

    def __init__(self, port: int, rate: float = float("inf")):
        self._target = port
        self._rate = rate
        self.refuses = False  # new connections, from now on
        self.flows = threading.Event()  # else nothing is forwarded, and no connection ends
        self.flows.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"mqtt://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Break all connections; new ones are accepted."""
        pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with suppress(OSError):  # closed already
                    end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                ours = self._listener.accept()[0]
            except OSError:
                return
            if self.refuses:
                ours.close()
                continue
            theirs = socket.create_connection(("127.0.0.1", self._target))
            self._pairs.append((ours, theirs))
            threading.Thread(target=self._forward, args=(ours, theirs), daemon=True).start()
            threading.Thread(target=self._forward, args=(theirs, ours), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                time.sleep(len(data) / self._rate)  # as a slow network
                self.flows.wait()
                sink.sendall(data)
        for end in (source, sink):
            end.close()

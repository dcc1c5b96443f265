"""A network between a client and a server on 127.0.0.1 that a test can cut and stall; runs as a separate process."""

import asyncio
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with a timeout of 0: closing resets the connection."""


class Proxy:
    """Forwards connections to a port of 127.0.0.1, unless it is cut or stalled."""

    def __init__(self, target: int) -> None:
        # Not in the test's process: its forks would inherit the connections and keep them open.
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(target)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.port = int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def _tell(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        assert self._answer() == f"{word}\n"

    def cut(self) -> None:
        """Reset all connections, including new ones."""
        self._tell("cut")

    def stall(self) -> None:
        """Accept connections but forward nothing."""
        self._tell("stall")

    def heal(self) -> None:
        """Forward again, beginning with data received during a stall."""
        self._tell("heal")

    def end(self) -> None:
        """Kill the proxy."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def proxy(target: int) -> Iterator[Proxy]:
    """Run a proxy in front of a port."""
    between = Proxy(target)
    try:
        yield between
    finally:
        between.end()


class _Network:
    """The network inside the process of a proxy."""

    def __init__(self, target: int) -> None:
        self._target, self._is_cut = target, False
        self._flows = asyncio.Event()
        self._flows.set()
        self._open: set[asyncio.StreamWriter] = set()

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            self._reset(writer)
            return
        try:
            onward = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self._reset(writer)
            return
        self._open |= {writer, onward[1]}
        await asyncio.gather(self._pump(reader, onward[1]), self._pump(onward[0], writer))
        self._open -= {writer, onward[1]}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                await self._flows.wait()
                writer.write(data)
                await writer.drain()
        except OSError:
            self._reset(writer)
        writer.close()

    def _reset(self, writer: asyncio.StreamWriter) -> None:
        if not writer.is_closing():
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()

    def obey(self, word: str) -> None:
        self._is_cut = word == "cut"
        if word == "stall":
            self._flows.clear()
        else:
            self._flows.set()
        for writer in self._open if word == "cut" else ():
            self._reset(writer)


async def _serve(target: int) -> None:
    network = _Network(target)
    server = await asyncio.start_server(network.connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        network.obey(word)
        print(word, flush=True)


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))

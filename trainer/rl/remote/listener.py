"""The trainer's port: connections are heard once they show the attempt's token, and few may wait for that."""

import logging
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainer.rl.remote.wire import Channel

MAX_WAITING = 64
"""Connections that have not shown the token yet; the oldest one makes room for a newer one."""
ACCEPT_PAUSE_SECONDS = 1.0
"""Pause after a connection that could not be accepted, as when too many files are open."""


class Listener:
    """Listens on a free port of all interfaces, a thread for each connection.

    A connection without the token has wire.HANDSHAKE_SECONDS, and one message of wire.MAX_FIRST_BYTES.

    Attributes:
        port: where peers connect.
        strangers: connections so far that ended without the token.
    """

    def __init__(self, token: str, serve: Callable[[Channel, dict[str, Any], str], None]) -> None:
        """Listen.

        Args:
            token: secret of the attempt.
            serve: called in a connection's thread, with its first message and address; the connection ends with it.
        """
        self._token, self._serve, self._closed = token, serve, False
        self._lock = threading.Lock()
        self._waiting: dict[socket.socket, None] = {}  # oldest first
        self.strangers = 0
        self._socket = socket.create_server(("", 0), backlog=128)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True, name="samplers").start()

    def close(self) -> None:
        """Accept no more connections; those that exist stay."""
        self._closed = True
        with suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                peer, (host, port, *_) = self._socket.accept()
            except OSError as error:
                if not self._closed:  # the peer has hung up, or too many files are open
                    logging.warning("a sampler could not connect: %s", error)
                    time.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            self._admit(peer)
            threading.Thread(target=self._hear, args=(peer, f"{host}:{port}"), daemon=True, name="sampler").start()

    def _admit(self, peer: socket.socket) -> None:
        """Let a connection wait for its first message; end the oldest one if too many do."""
        with self._lock:
            if len(self._waiting) >= MAX_WAITING:
                oldest = next(iter(self._waiting))
                del self._waiting[oldest]
                with suppress(OSError):  # it has hung up
                    oldest.shutdown(socket.SHUT_RDWR)  # its own thread closes it
            self._waiting[peer] = None

    def _hear(self, peer: socket.socket, address: str) -> None:
        try:
            channel, hello = self._authenticate(peer, address)
            self._serve(channel, hello, address)
        except OSError as error:
            logging.info("the connection from %s has ended: %s", address, error)
        except (ValueError, KeyError, TypeError, AttributeError) as error:  # a sampler with a bug
            logging.warning("the connection from %s was closed: %s: %s", address, type(error).__name__, error)
        finally:
            peer.close()

    def _authenticate(self, peer: socket.socket, address: str) -> tuple[Channel, dict[str, Any]]:
        """Return the channel and its first message. Raises OSError if there is none with the token."""
        try:
            channel = Channel(peer, self._token, server=True)
            return channel, channel.receive()[0]
        except OSError as error:
            with self._lock:
                self.strangers += 1
                first = self.strangers == 1
            if first:
                logging.warning(
                    "a connection from %s was closed before it showed the token of this attempt (%s); "
                    "further ones are only counted",
                    *(address, error),
                )
            raise
        finally:
            with self._lock:
                self._waiting.pop(peer, None)

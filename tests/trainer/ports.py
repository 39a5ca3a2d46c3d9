"""Ports for servers and ranks that bind them seconds later."""

import contextlib
import random
import socket


def free_port():
    """A free port below those that the system hands out, so that nobody is given it before it is bound."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no free port")

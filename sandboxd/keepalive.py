"""Connections on which nothing is said: pings keep proxies from cutting them, and find who is gone.

A command that prints nothing for ten minutes is one silent call. Proxies and address translation forget a
connection that is silent for some minutes (245 s and 350 s are common), some without a word to either end.
"""

from __future__ import annotations

# Less than any of these, and more than what would show in a daemon with thousands of connections.
KEEPALIVE_SECONDS = 60.0
# A host under load answers late; a connection that is cut takes its commands with it.
ANSWER_SECONDS = 60.0
# Clients may ping as often as that; by default a server cuts off who does so thrice within ten minutes.
LEAST_SECONDS = 0.5
MOST_MILLISECONDS = (1 << 31) - 1

Options = tuple[tuple[str, int], ...]


def _milliseconds(seconds: float) -> int:
    return min(MOST_MILLISECONDS, max(1, round(seconds * 1000)))


def _options(seconds: float) -> Options:
    return (
        ("grpc.keepalive_time_ms", _milliseconds(seconds)),
        ("grpc.keepalive_timeout_ms", _milliseconds(ANSWER_SECONDS)),
        # What gRPC 1.85 goes by, against the name of the other.
        ("grpc.http2.ping_timeout_ms", _milliseconds(ANSWER_SECONDS)),
    )


def of_server(seconds: float) -> Options:
    """Pings whoever has been silent for so long; whoever does not answer is gone."""
    return (
        *_options(seconds),
        ("grpc.http2.min_ping_interval_without_data_ms", _milliseconds(LEAST_SECONDS)),
    )


def of_client(seconds: float = KEEPALIVE_SECONDS) -> Options:
    """The same from a client, while it waits for an answer: however often nothing else was said."""
    return (*_options(seconds), ("grpc.http2.max_pings_without_data", 0))

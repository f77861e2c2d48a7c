"""What is to be told, and where to: the OTEL_ variables as their specification defines them.

The SDK reads the others (endpoints, headers, time limits, batch sizes, samplers, resource) by itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sandboxd.config import ConfigError
from sandboxd.telemetry.propagation import given

SIGNALS = ("traces", "metrics", "logs")
EXPORTERS = ("otlp", "none")
PROTOCOLS = ("grpc", "http/protobuf")


@dataclass(frozen=True, slots=True)
class Wanted:
    """`exported` are the signals that go to a collector, each with its protocol; `scraped` is where
    Prometheus may ask, `host:port`.
    """

    exported: Mapping[str, str]
    scraped: str | None = None

    @property
    def anything(self) -> bool:
        """False where telemetry is off."""
        return bool(self.exported) or self.scraped is not None


def wanted(scraped: str | None = None, environ: Mapping[str, str] = os.environ) -> Wanted:
    """Reads the environment. A signal is exported where its exporter is `otlp`, or where none is named but
    an endpoint is. Raises ConfigError for values that are not known.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Wanted({}, scraped)
    return Wanted(
        {signal: _protocol(signal, environ) for signal in SIGNALS if _is_on(signal, environ)}, scraped
    )


def carried(environ: Mapping[str, str] = os.environ) -> tuple[str | None, str | None]:
    """The `traceparent` and `tracestate` that whoever started this program gave it; None each where it gave
    none that means something.
    """
    parent = given(environ)
    return parent, (environ.get("TRACESTATE") if parent else None)


def _is_on(signal: str, environ: Mapping[str, str]) -> bool:
    variable = f"OTEL_{signal.upper()}_EXPORTER"
    exporter = environ.get(variable, "").strip().lower()
    if exporter and exporter not in EXPORTERS:
        raise ConfigError(f"{variable} = {exporter!r}: must be one of {', '.join(EXPORTERS)}")
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{signal.upper()}_ENDPOINT")
    return exporter == "otlp" or (not exporter and any(environ.get(name) for name in endpoints))


def _protocol(signal: str, environ: Mapping[str, str]) -> str:
    for variable in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = environ.get(variable, "").strip().lower()
        if protocol and protocol not in PROTOCOLS:
            raise ConfigError(f"{variable} = {protocol!r}: must be one of {', '.join(PROTOCOLS)}")
        if protocol:
            return protocol
    return PROTOCOLS[0]

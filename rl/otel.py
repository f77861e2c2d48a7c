"""Whether a signal of OpenTelemetry is to be exported, and how, as the standard variables say."""

from __future__ import annotations

from collections.abc import Mapping

from rl.errors import ConfigError

EXPORTERS, PROTOCOLS = ("otlp", "none"), ("grpc", "http/protobuf")


def protocol(signal: str, environ: Mapping[str, str]) -> str | None:
    """The protocol for `traces` or `metrics`; None when the variables ask for no export.

    Raises ConfigError for an exporter or a protocol that is not known.
    """
    name = signal.upper()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = _choice(environ, (f"OTEL_{name}_EXPORTER",), EXPORTERS)
    endpoints = (f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    if exporter == "none" or not (exporter or any(environ.get(each) for each in endpoints)):
        return None
    protocols = (f"OTEL_EXPORTER_OTLP_{name}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    return _choice(environ, protocols, PROTOCOLS) or PROTOCOLS[0]


def _choice(environ: Mapping[str, str], names: tuple[str, ...], allowed: tuple[str, ...]) -> str:
    """The first of these variables that is set; empty when none is."""
    for name in names:
        value = environ.get(name, "").strip().lower()
        if value and value not in allowed:
            raise ConfigError(f"{name} = {value!r}: must be one of {', '.join(allowed)}")
        if value:
            return value
    return ""

"""What a daemon tells OpenTelemetry and Prometheus of its work: traces, metrics and logs. Off, nothing of
OpenTelemetry is imported, and each place that could tell something costs one look at a variable.
"""

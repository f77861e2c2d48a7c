"""What runs as PID 1 inside a sandbox: standard library only, and nothing newer than Python 3.8."""

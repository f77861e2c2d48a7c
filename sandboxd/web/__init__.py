"""The live page of a daemon: what its pools, leases and training runs do, over HTTP, as they do it."""

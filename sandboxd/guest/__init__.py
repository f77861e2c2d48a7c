"""What the guest (`native`) speaks and does, for the daemon and for stand-ins: standard library only."""

"""The loop on a simulated generator and trainer, in virtual time: `python -m rl bench`."""

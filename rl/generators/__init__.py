"""Generators: `rl.generators.vllm` draws from a real model, `rl.generators.fake` from a script."""

"""Generators: `rl.generators.vllm.VllmGenerator` draws from a real model, `rl.generators.fake` from a script."""

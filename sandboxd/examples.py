"""What is typed, by command: the end of each command's help. A test has the parser read every one of them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

EXAMPLES: dict[str, dict[str, str]] = {
    "serve": {
        "sandboxd serve": "pools on this host, on the user's own socket",
        "sandboxd serve --config sandboxd.toml --metrics 127.0.0.1:9464": "one's own pools, for Prometheus",
        "sandboxd serve --web 127.0.0.1:8080 --web-run runs/demo": "a page to leave open",
    },
    "exec": {
        "sandboxd exec python -- python3 -c 'print(6*7)'": "one command",
        "sandboxd exec -t python -- bash": "a terminal",
        "sandboxd exec --timeout 5 --wait 10 python -- make test": "with bounds",
        "sandboxd exec --json python -- uname -a": "for a program",
    },
    "ls": {"sandboxd ls": "leased and warm sandboxes", "sandboxd ls --pool python --json": "for a program"},
    "inspect": {
        "sandboxd inspect python-0123456789ab": "all that is known of one",
        "sandboxd inspect --failures python": "why sandboxes of a pool failed of late",
    },
    "pool": {"sandboxd pool ls": "all of them", "sandboxd pool set python --warm 64": "keep more ready"},
    "image": {
        "sandboxd image import docker:python:3.12 --name py312": "from this host's Engine",
        "sandboxd image ls": "what pools can name",
    },
    "pool ls": {"sandboxd pool ls": "pools with their counts", "sandboxd pool ls --json": "for a program"},
    "pool set": {
        "sandboxd pool set python --warm 64": "keep more ready",
        "sandboxd pool set python --size-limit 960 --json": "what it has now, for a program",
    },
    "reload": {
        "sandboxd reload": "new settings, without a restart",
        "sandboxd reload --json": "what changed",
    },
    "top": {
        "sandboxd top": "what the pools do, as they do it",
        "sandboxd top --run runs/demo": "with a training run",
        "sandboxd top --once --json": "one look, for a program",
    },
    "prewarm": {
        "sandboxd prewarm python 256 --by 30": "256 will be wanted in 30 s",
        "sandboxd prewarm python 256 --id epoch-2 --grace 120": "to be changed or withdrawn later",
        "sandboxd prewarm python 0 --id epoch-2": "withdrawn",
    },
    "image import": {
        "sandboxd image import docker:python:3.12 --name py312": "from this host's Engine",
        "sandboxd image import rootfs.tar --name mine": "from a file",
    },
    "image ls": {"sandboxd image ls": "what pools can name", "sandboxd image ls --json": "for a program"},
    "image rm": {"sandboxd image rm py312": "where no sandbox uses it"},
    "image gc": {"sandboxd image gc": "what no image needs"},
    "bench": {
        "sandboxd bench burst --count 960 --hold 10": "960 at once on this host, held for 10 s",
        "sandboxd bench sweep 96,192,480,960 --html page.html": "where does it break?",
        "sandboxd bench poisson --rate 50 --slo 'p99_ready<2s,failed=0'": "service levels",
        "sandboxd bench churn --address 10.0.0.5:7001 --pool python --clients 4": "one that runs",
        "sandboxd bench burst --faults 'fail start 0.2, die 0.01'": "faults on purpose",
        "sandboxd bench compare before.json after.json": "beside each other",
    },
    "bench burst": {
        "sandboxd bench burst --count 960 --hold 10": "960 at once, held for 10 s",
        "sandboxd bench burst --warm --json": "from a full pool, for a program",
    },
    "bench sweep": {
        "sandboxd bench sweep 96,192,480,960 --html page.html": "where does it break?",
        "sandboxd bench sweep 8,16 --targets namespace,docker --image python:3.12": "two backends",
    },
    "bench ramp": {"sandboxd bench ramp --from 1 --to 100 --seconds 30": "how many a second it bears"},
    "bench poisson": {"sandboxd bench poisson --rate 50 --slo 'p99_ready<2s,failed=0'": "service levels"},
    "bench churn": {"sandboxd bench churn --callers 16 --seconds 30": "over and over"},
    "bench soak": {"sandboxd bench soak --cycles 1000": "does anything grow?"},
    "bench exec": {"sandboxd bench exec --count 1000 --output-mb 50": "commands and output"},
    "bench fork": {"sandboxd bench fork --count 8 --megabytes 10": "copies of a sandbox"},
    "bench telemetry": {"sandboxd bench telemetry --pairs 4": "what telling a collector costs"},
    "bench bombs": {"sandboxd bench bombs --count 50 --bombs 5": "do neighbours feel them?"},
    "bench starts": {"sandboxd bench starts --limits 4,8,16": "how many at once are best"},
    "bench chaos": {"sandboxd bench chaos --count 120 --size 48 --kills 2": "nothing is lost"},
    "bench compare": {
        "sandboxd bench compare before.json after.json": "a table for each thing that was measured",
        "sandboxd bench compare a.json b.json --html page.html": "with plots",
    },
    "doctor": {
        "sandboxd doctor": "what this host lacks for 960, and how to get it",
        "sandboxd doctor --config sandboxd.toml --json": "for the pools of these settings",
    },
    "completion": {"sandboxd completion bash": "what to eval in .bashrc"},
}


def leaves(parser: argparse.ArgumentParser, path: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command below a parser by its words, those that only lead to others included.

    argparse has no public way to them; other tools go this one, too.
    """
    for action in parser._actions:  # noqa: SLF001
        if isinstance(action, argparse._SubParsersAction):  # noqa: SLF001
            for name, inner in action.choices.items():
                words = f"{path} {name}".strip()
                yield words, inner
                yield from leaves(inner, words)


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Ends the help of every command with its examples."""
    for words, inner in leaves(parser):
        if words in EXAMPLES:
            inner.epilog = "\n\n".join(part for part in (written(EXAMPLES[words]), inner.epilog) if part)
            inner.formatter_class = argparse.RawDescriptionHelpFormatter


def written(examples: dict[str, str]) -> str:
    """For the end of a help text."""
    width = max(map(len, examples))
    return "\n".join(["examples:", *(f"  {typed:{width}}  {why}" for typed, why in examples.items())])

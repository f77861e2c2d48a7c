"""Imports go one way, each library has its place, and importing a module does nothing else."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.source_tree import ROOT, imports, module, relative, sources

# Who alone may import a library. What is not listed may be imported wherever it is declared.
PLACES = {
    "grpc": {
        "sandboxd/bench/health.py",
        "sandboxd/bench/telemetry.py",
        *(
            f"sandboxd/{name}.py"
            for name in (
                "telemetry/calls",
                *("client", "interaction", "patience", "remote_files", "remote_pools", "resumption"),
                *("daemon", "health_checks", "service", "status", "uploads"),
            )
        ),
    },
    "docker": {
        *(
            f"sandboxd/backends/{name}.py"
            for name in (
                *("docker", "docker_exec", "docker_images", "docker_start"),
                *("engine", "engine_client", "engine_exec"),
            )
        ),
        "sandboxd/bench/docker_sdk.py",
        "sandboxd/images/engine.py",
    },
    "torch": {
        *(
            f"rl/{name}.py"
            for name in (
                *("communicators", "lora", "model", "packed_attention", "padding", "sender_host"),
                *("shared_weights", "trainer"),
            )
        ),
        *(f"rl/generators/{name}.py" for name in ("gloo", "repack", "shared_memory")),
        *(f"rl/losses/{name}.py" for name in ("clipped", "kl", "tokens", "total", "weighted")),
    },
    "vllm": {
        "rl/communicators.py",
        *(
            f"rl/generators/{name}.py"
            for name in ("gloo", "in_core", "plugin", "reload", "repack", "shared_memory", "vllm")
        ),
    },
    "opentelemetry": {
        *(
            f"sandboxd/telemetry/{name}.py"
            for name in (
                *("calls", "command_span", "counting", "encoding", "exporters", "instruments", "logs"),
                *("prometheus", "setup", "spans"),
            )
        ),
        "sandboxd/bench/telemetry.py",
        "rl/telemetry.py",
        "rl/tracing.py",
    },
    "prometheus_client": {"sandboxd/telemetry/prometheus.py"},
}
GRPC = {"grpc", "grpc_health", "grpc_reflection", "grpc_status"}
# A module of the daemon may import those to its right, never one to its left.
LAYERS = [
    {"sandboxd.__main__", "sandboxd.cli"},
    {"sandboxd.commands", "sandboxd.pool_commands", "sandboxd.top", "sandboxd.bench"},
    {"sandboxd.daemon"},
    {"sandboxd.telemetry.setup"},
    {"sandboxd.health_checks", "sandboxd.web.server"},
    {"sandboxd.web"},
    {"sandboxd.upkeep"},
    {"sandboxd.backend_set", "sandboxd.strays"},
    {"sandboxd.doctor"},
    {"sandboxd.pool_service"},
    {"sandboxd.service"},
    {"sandboxd.pools"},
    {"sandboxd.recovery"},
    {"sandboxd.pool"},
    {"sandboxd.counts"},
    {"sandboxd.inspecting", "sandboxd.waiters", "sandboxd.leasing"},
    {"sandboxd.fleet"},
    {"sandboxd.resetting", "sandboxd.starts", "sandboxd.branching"},
    {"sandboxd.listener"},
    {"sandboxd.checkups", "sandboxd.quarantine", "sandboxd.proof"},
    {"sandboxd.portrait"},
    {"sandboxd.insisting", "sandboxd.starting", "sandboxd.sandbox", "sandboxd.regulator", "sandboxd.turns"},
    {"sandboxd.availability"},
    {"sandboxd.backends", "sandboxd.images"},
    {"sandboxd.endings"},
    {"sandboxd.journal", "sandboxd.journal_file"},
    {"sandboxd.template_record"},
    {"sandboxd.making_room"},
    {"sandboxd.ledger", "sandboxd.leases", "sandboxd.rates", "sandboxd.start_times"},
    {"sandboxd.health", "sandboxd.sizing", "sandboxd.slots"},
    {"sandboxd.queueing", "sandboxd.pacing", "sandboxd.announcements", "sandboxd.care", "sandboxd.bounds"},
    {"sandboxd.lines", "sandboxd.stopwatch"},
    {"sandboxd.telemetry.recorder"},
    {"sandboxd.types", "sandboxd.errors"},
]
PUBLIC = {
    *("sandboxd", "sandboxd.client", "sandboxd.errors"),
    *("sandboxd.beginning", "sandboxd.child", "sandboxd.scratch", "sandboxd.simulation"),
}


def _layer(name: str) -> int | None:
    for rank, names in enumerate(LAYERS):
        if any(name == prefix or name.startswith(f"{prefix}.") for prefix in names):
            return rank
    return None


def test_the_daemons_layers() -> None:
    wrong = [
        f"{module(path)} imports {name}"
        for path in sources("sandboxd")
        for name in imports(path, anywhere=False)
        if (own := _layer(module(path))) is not None and (other := _layer(name)) is not None and other < own
    ]
    assert wrong == []


def test_pure_modules_import_no_one_who_waits() -> None:
    pure = (
        *("errors", "types", "ledger", "leases", "lines", "making_room", "queueing", "rates"),
        *("pacing", "slots", "sizing", "health", "start_times", "announcements", "care", "bounds"),
    )
    allowed = {"sandboxd", *(f"sandboxd.{name}" for name in pure)}
    for name in pure:
        path = ROOT / "sandboxd" / f"{name}.py"
        names = set(imports(path))
        ours = {found for found in names if found.split(".")[0] == "sandboxd"}
        assert {found for found in ours if not _under(found, allowed)} == set(), name
        assert names.isdisjoint({"asyncio", "time", "socket", "subprocess"}), name


def test_the_doctor_judges_without_looking() -> None:
    ours = {
        f"sandboxd.doctor.{name}" for name in ("capacity", "checks", "facts", "features", "findings", "needs")
    }
    for name in ours:
        names = set(imports(ROOT / f"{name.replace('.', '/')}.py"))
        assert {found for found in names if found.startswith("sandboxd.") and not _under(found, ours)} <= {
            "sandboxd.doctor"
        }, name
        assert names.isdisjoint({"os", "pathlib", "subprocess", "socket", "time", "resource"}), name


def _under(name: str, allowed: Iterable[str]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed if entry != "sandboxd")


def test_rl_uses_only_what_sandboxd_shows_its_users() -> None:
    import sandboxd

    shown = {f"sandboxd.{name}" for name in sandboxd.__all__}
    wrong = [
        f"{relative(path)} imports {name}"
        for path in sources("rl")
        for name in imports(path)
        if name.split(".")[0] == "sandboxd"
        and name not in PUBLIC | shown
        and name.rpartition(".")[0] not in PUBLIC - {"sandboxd"}
    ]
    assert wrong == []


def test_sandboxd_knows_nothing_of_rl_and_no_package_of_the_tests() -> None:
    wrong = {(relative(p), n) for p in sources("sandboxd") for n in imports(p) if _top(n) in ("rl", "tests")}
    wrong |= {(relative(p), n) for p in sources("rl") for n in imports(p) if _top(n) == "tests"}
    assert wrong == set()


@pytest.mark.parametrize("library", PLACES)
def test_each_library_has_its_place(library: str) -> None:
    names = GRPC if library == "grpc" else {library}
    users = {
        relative(p) for p in sources("sandboxd", "rl") if any(_top(name) in names for name in imports(p))
    }
    assert users <= PLACES[library]
    # A rule about a file that is gone protects nothing.
    assert {place for place in PLACES[library] if not (ROOT / place).exists()} == set()


def test_the_guest_needs_only_the_standard_library() -> None:
    for path in sources("sandboxd/guest"):
        outside = {
            name
            for name in imports(path)
            if _top(name) not in sys.stdlib_module_names and not name.startswith("sandboxd.guest")
        }
        assert outside == set(), relative(path)


def test_no_import_cycles() -> None:
    known = {module(path): path for path in sources("sandboxd", "rl")}
    graph = {
        name: {found for found in imports(path, anywhere=False) if found in known and found != name}
        for name, path in known.items()
    }
    # A package's __init__ shows what its modules hold; they name one another, never it.
    for name, found in graph.items():
        found -= {package for package in found if name.startswith(f"{package}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


@pytest.mark.parametrize(("package", "extras"), [("sandboxd", []), ("rl", ["rl"])])
def test_what_is_imported_is_declared(package: str, extras: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for e in extras for line in project["optional-dependencies"][e]]
    declared = {re.split(r"[<>=\[; ]", line)[0].lower().replace("-", "_") for line in lines}
    declared |= {"sandboxd", "rl", "google"}  # google.* comes with protobuf and googleapis-common-protos
    declared |= {name.replace("grpcio", "grpc") for name in declared} | {"grpc_health"}
    declared |= {"opentelemetry"} if "opentelemetry_sdk" in declared else set()
    imported = {_top(name) for path in sources(package) for name in imports(path)}
    assert imported - set(sys.stdlib_module_names) - declared == set()


IMPORT_ALL = """
import importlib, sys, threading
FORBIDDEN = (
    "socket.bind", "socket.connect", "subprocess.Popen", "os.fork", "os.mkdir", "os.remove", "os.rename"
)
watching = True
def watch(event, args):
    if not watching:
        return
    writes = event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")
    # matplotlib looks for its own folder of settings when it is imported, and makes it.
    if (event in FORBIDDEN or writes) and "matplotlib" not in str(args[0]):
        sys.stderr.write("importing %s did %s %r\\n" % (name, event, args[:1]))
        sys.stderr.flush()
        import os; os._exit(1)
sys.addaudithook(watch)
for name in sys.argv[1:]:
    importlib.import_module(name)
watching = False
assert threading.active_count() == 1, threading.enumerate()
loaded = {"torch", "vllm", "transformers", "docker"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.parametrize("package", ["sandboxd", "rl"])
def test_importing_does_nothing(package: str) -> None:
    heavy = PLACES["torch"] | PLACES["docker"] | {"rl/trainer_host.py", "rl/generators/in_core.py"}
    names = [
        module(path)
        for path in sources(package)
        if relative(path) not in heavy and not module(path).endswith("__main__")
    ]
    done = subprocess.run(
        [sys.executable, "-B", "-c", IMPORT_ALL, *names],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _top(name: str) -> str:
    return name.partition(".")[0]

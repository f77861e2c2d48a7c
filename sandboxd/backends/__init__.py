"""What makes sandboxes: one `match`, no registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sandboxd.backends.base import Backend

if TYPE_CHECKING:
    from sandboxd.config import Config


def open_backend(kind: str, config: Config) -> Backend:
    """The backend of this kind, not yet opened, behind the faults that were asked for."""
    backend = _backend(kind, config)
    if not config.faults:
        return backend
    from sandboxd.backends.faults import FaultyBackend

    return FaultyBackend(backend, config.faults, seed=config.fault_seed)


def _backend(kind: str, config: Config) -> Backend:
    """Each is imported only when a pool uses it."""
    match kind:
        case "namespace":
            from sandboxd.backends.namespace import NamespaceBackend, NamespaceOptions

            options = NamespaceOptions(images_dir=config.images_dir)
            return NamespaceBackend(config.state_dir / "namespace", options)
        case "docker":
            from sandboxd.backends.docker import DockerBackend

            return DockerBackend(config.state_dir / "docker")
        case "fake":
            from sandboxd.backends.fake import FakeBackend, FakeScript

            return FakeBackend(FakeScript(**config.fake.model_dump()), root=config.state_dir / "fake")
        case _:
            raise ValueError(f"no backend {kind!r}")

"""Commands that name a user: where that is refused, and with which words."""

from __future__ import annotations

from sandboxd.errors import InvalidRequest, Phase
from sandboxd.types import Command, Template


def check(command: Command, template: Template) -> None:
    """Raises InvalidRequest for a user in a sandbox whose commands have one user."""
    if command.user and not template.users:
        raise InvalidRequest(
            f"user {command.user!r}: the commands of this sandbox have one user; leave it out, or set"
            " `users = true` in the settings of its pool",
            phase=Phase.EXEC,
        )

"""Writes what the documentation says of every setting and every call from where these are defined.

    scripts/reference.py            writes docs/reference.md, and the tables in pages between
                                    `<!-- settings MODULE.CLASS -->` and `<!-- end -->`
    scripts/reference.py --check    changes nothing, and fails where a page is not what it would write

Needs the development packages: the comments of protos/ are read with grpc_tools.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import annotated_types
import google.api
import grpc_tools
from google.protobuf import descriptor_pb2 as pb
from grpc_tools import protoc
from pydantic import BaseModel
from pydantic.fields import FieldInfo

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TABLE = re.compile(r"(<!-- settings ([\w.]+)\.(\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
TITLE = """# Reference of the protocol

Generated from [`protos/sandboxd/v1`](../protos/sandboxd/v1); [protocol.md](protocol.md) says how the parts
belong together."""
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def main(arguments: list[str]) -> int:
    """Returns the exit code: 1 where `--check` finds a page that is out of date."""
    pages = {DOCS / "reference.md": reference()}
    for page in sorted(DOCS.rglob("*.md")):
        made = TABLE.sub(lambda found: found[1] + settings(found[2], found[3]) + found[5], page.read_text())
        pages.setdefault(page, made)
    stale = [page for page, text in pages.items() if not page.exists() or page.read_text() != text]
    if arguments != ["--check"]:
        for page in stale:
            page.write_text(pages[page])
        return 0
    for page in stale:
        sys.stderr.write(f"{page.relative_to(ROOT)} is not current: run 'make docs', commit the result\n")
    return 1 if stale else 0


def settings(module: str, name: str) -> str:
    """The table of one section of a settings file: its fields, defaults, bounds and docstrings."""
    section: type[BaseModel] = getattr(importlib.import_module(module), name)
    said = _docstrings(section)
    lines = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    for key, field in section.model_fields.items():
        cells = [f"`{key}`", _default(field), _allowed(field), said[key]]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _docstrings(section: type[BaseModel]) -> dict[str, str]:
    """What stands below each field; a field without is an error, but for a section, which has its own."""
    body = ast.parse(inspect.cleandoc("\n" + inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    said: dict[str, str] = {}
    for above, below in zip(body.body, [*body.body[1:], ast.Pass()], strict=True):
        if not isinstance(above, ast.AnnAssign) or not isinstance(above.target, ast.Name):
            continue
        kind = section.model_fields[above.target.id].annotation
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            said[above.target.id] = " ".join(str(below.value.value).split())
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            said[above.target.id] = f"{str(kind.__doc__).splitlines()[0]} See below."
        else:
            raise SystemExit(f"{section.__module__}.{section.__name__}.{above.target.id} has no docstring")
    return said


def _default(field: FieldInfo) -> str:
    value: Any = field.default
    if field.default_factory is not None:
        value = None if inspect.isfunction(field.default_factory) else field.default_factory()  # type: ignore[call-arg]
    if isinstance(value, BaseModel) or value is None:
        return ""
    if isinstance(value, int | float):
        return _number(value)
    return f"`{value}`" if isinstance(value, str | Path) and value else "empty"


def _number(value: float) -> str:
    """As TOML has it, and not 1e+06 for a million."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.0f}" if value == int(value) else f"{value:g}"


def _allowed(field: FieldInfo) -> str:
    """Words for the type and its bounds."""
    choices = _choices(field.annotation)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    bounds = [*_bounds(field.metadata)]
    for part in get_args(field.annotation):
        bounds += _bounds(getattr(part, "__metadata__", ()))
    return ", ".join(dict.fromkeys(bounds))


def _choices(annotation: Any) -> list[str]:
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    return [choice for part in get_args(annotation) for choice in _choices(part)]


def _bounds(metadata: Any) -> Iterator[str]:
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from _bounds(one.metadata)
        for name, sign in BOUNDS.items():
            kind = getattr(annotated_types, name.title())
            if isinstance(one, kind):
                yield f"{sign} {_number(getattr(one, name))}"


def reference() -> str:
    """The page of all services, messages and enums, with the comments of their definitions."""
    parts = [TITLE]
    for file in _files():
        comments = {tuple(one.path): one.leading_comments.strip() for one in file.source_code_info.location}
        page = _Page(comments)
        for number, service in enumerate(file.service):
            parts += page.service(service, (6, number))
        for number, message in enumerate(file.message_type):
            parts += page.message(message, (4, number), "")
        for number, enum in enumerate(file.enum_type):
            parts += page.enum(enum, (5, number), "")
    return "\n\n".join(part for part in parts if part) + "\n"


def _files() -> list[pb.FileDescriptorProto]:
    own = sorted(str(path.relative_to(ROOT / "protos")) for path in (ROOT / "protos").rglob("*.proto"))
    common = Path(next(iter(google.api.__path__))).parents[1]
    with tempfile.NamedTemporaryFile() as target:
        standard = Path(next(iter(grpc_tools.__path__))) / "_proto"
        options = [f"-I{path}" for path in (ROOT / "protos", common, standard)]
        options.append(f"--descriptor_set_out={target.name}")
        if protoc.main(["protoc", *options, "--include_source_info", *own]):
            raise SystemExit("the protos do not compile")
        found = pb.FileDescriptorSet.FromString(Path(target.name).read_bytes()).file
    return sorted((file for file in found if file.name in own), key=lambda file: -len(file.service))


class _Page:
    """One file's definitions as Markdown; `comments` are by path, as descriptor.proto numbers fields."""

    def __init__(self, comments: dict[tuple[int, ...], str]) -> None:
        self._comments = comments

    def _said(self, path: tuple[int, ...]) -> str:
        paragraphs = re.split(r"\n\s*\n", self._comments.get(path, ""))
        return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)

    def _cell(self, path: tuple[int, ...]) -> str:
        return " ".join(self._said(path).split()).replace("|", "\\|")

    def service(self, service: pb.ServiceDescriptorProto, path: tuple[int, ...]) -> list[str]:
        lines = ["| call | request | reply | |", "|---|---|---|---|"]
        for number, call in enumerate(service.method):
            asked = ("stream of " if call.client_streaming else "") + _link(call.input_type)
            told = ("stream of " if call.server_streaming else "") + _link(call.output_type)
            lines.append(f"| `{call.name}` | {asked} | {told} | {self._cell((*path, 2, number))} |")
        return [f"## {service.name}", self._said(path), "\n".join(lines)]

    def message(self, message: pb.DescriptorProto, path: tuple[int, ...], within: str) -> list[str]:
        if message.options.map_entry:
            return []
        name = f"{within}{message.name}"
        parts = [f"### {name}", self._said(path)]
        if message.field:
            parts.append(self._fields(message, path))
        for number, inner in enumerate(message.nested_type):
            parts += self.message(inner, (*path, 3, number), f"{name}.")
        for number, enum in enumerate(message.enum_type):
            parts += self.enum(enum, (*path, 4, number), f"{name}.")
        return parts

    def _fields(self, message: pb.DescriptorProto, path: tuple[int, ...]) -> str:
        maps = {one.name: one for one in message.nested_type if one.options.map_entry}
        lines = ["| field | type | |", "|---|---|---|"]
        for number, field in enumerate(message.field):
            kind = _kind(field)
            if entry := maps.get(field.type_name.rsplit(".", 1)[-1]):
                kind = f"map of {_kind(entry.field[0])} to {_kind(entry.field[1])}"
            elif field.label == field.LABEL_REPEATED:
                kind = f"repeated {kind}"
            if field.HasField("oneof_index") and not field.proto3_optional:
                kind += f", one of `{message.oneof_decl[field.oneof_index].name}`"
            lines.append(f"| `{field.name}` | {kind} | {self._cell((*path, 2, number))} |")
        return "\n".join(lines)

    def enum(self, enum: pb.EnumDescriptorProto, path: tuple[int, ...], within: str) -> list[str]:
        lines = ["| value | |", "|---|---|"]
        for number, value in enumerate(enum.value):
            lines.append(f"| `{value.name}` = {value.number} | {self._cell((*path, 2, number))} |")
        return [f"### {within}{enum.name}", self._said(path), "\n".join(lines)]


def _kind(field: pb.FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return pb.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(name: str) -> str:
    """To the place on this page; Google's own types by their names."""
    short = name.removeprefix(".sandboxd.v1.")
    if short == name:
        return f"`{name.removeprefix('.')}`"
    return f"[{short}](#{short.replace('.', '').lower()})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The .proto files keep the rules of proto/buf.yaml: buf's STANDARD and COMMENTS.

Read from protoc's own descriptors, so that this checks what the compiler sees.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

ROOT = Path(__file__).resolve().parents[1] / "proto"
FILES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("penstock/v1/*.proto"))

# What generates code has an environment of its own; see the Makefile.
TOOLS = Path(sys.prefix) / "proto-tools" / "bin" / "python"

PASCAL = re.compile(r"([A-Z][a-z0-9]*)+")
SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")

# Field numbers in the descriptors' own schema, of which a source location's path consists.
MESSAGE, ENUM, SERVICE = 4, 5, 6
FIELD, NESTED, NESTED_ENUM, ONEOF = 2, 3, 4, 8
VALUE, METHOD = 2, 2

# Two services have heartbeats; their messages say whose. proto/buf.yaml makes the same exception.
MESSAGES_OF = {"Controller.Heartbeat": "BrokerHeartbeat", "Groups.Heartbeat": "GroupHeartbeat"}

Named = tuple[str, tuple[int, ...], Any]


@pytest.fixture(scope="module")
def protos(tmp_path_factory) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "all.binpb"
    result = subprocess.run(
        [
            *(TOOLS, "-m", "grpc_tools.protoc", f"--proto_path={ROOT}"),
            *("--include_source_info", f"--descriptor_set_out={out}", *FILES),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    # protoc warns of imports that are not used.
    assert "warning" not in result.stderr, result.stderr
    found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    assert [file.name for file in found.file] != []
    return {file.name: file for file in found.file}


def enum_parts(prefix: str, path: tuple[int, ...], enum: Any) -> Iterator[Named]:
    yield f"{prefix}{enum.name}", path, enum
    for index, value in enumerate(enum.value):
        yield f"{prefix}{enum.name}.{value.name}", (*path, VALUE, index), value


def message_parts(prefix: str, path: tuple[int, ...], message: Any) -> Iterator[Named]:
    name = f"{prefix}{message.name}"
    yield name, path, message
    for index, field in enumerate(message.field):
        yield f"{name}.{field.name}", (*path, FIELD, index), field
    for index, oneof in enumerate(message.oneof_decl):
        # What protoc makes up for an optional field has no place in the source.
        if not any(field.proto3_optional and field.oneof_index == index for field in message.field):
            yield f"{name}.{oneof.name}", (*path, ONEOF, index), oneof
    for index, enum in enumerate(message.enum_type):
        yield from enum_parts(f"{name}.", (*path, NESTED_ENUM, index), enum)
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from message_parts(f"{name}.", (*path, NESTED, index), nested)


def parts(file: descriptor_pb2.FileDescriptorProto) -> Iterator[Named]:
    """All that has a name in a file: its full name, where it stands, and its descriptor."""
    for index, message in enumerate(file.message_type):
        yield from message_parts("", (MESSAGE, index), message)
    for index, enum in enumerate(file.enum_type):
        yield from enum_parts("", (ENUM, index), enum)
    for index, service in enumerate(file.service):
        yield service.name, (SERVICE, index), service
        for number, method in enumerate(service.method):
            yield f"{service.name}.{method.name}", (SERVICE, index, METHOD, number), method


def of_type(protos: dict[str, Any], kind: type) -> Iterator[tuple[str, Any]]:
    for file in protos.values():
        for name, _, descriptor in parts(file):
            if isinstance(descriptor, kind):
                yield f"{file.name}: {name}", descriptor


def test_every_part_has_a_comment(protos):
    bare = []
    for file in protos.values():
        comments = {
            tuple(location.path): location.leading_comments.strip()
            for location in file.source_code_info.location
        }
        bare += [f"{file.name}: {name}" for name, path, _ in parts(file) if not comments.get(path)]
    assert not bare, "\n".join(bare)


def test_the_walk_sees_every_kind(protos):
    kinds = Counter(type(part).__name__ for file in protos.values() for _, _, part in parts(file))
    assert set(kinds) == {
        "DescriptorProto",
        "FieldDescriptorProto",
        "OneofDescriptorProto",
        "EnumDescriptorProto",
        "EnumValueDescriptorProto",
        "ServiceDescriptorProto",
        "MethodDescriptorProto",
    }
    assert sorted(protos) == FILES


def test_files_stand_where_their_package_says(protos):
    for name, file in protos.items():
        assert file.package == "penstock.v1"
        assert file.syntax == "proto3"
        assert SNAKE.fullmatch(Path(name).stem)
        assert not file.public_dependency
        assert not file.weak_dependency


def test_names_are_written_as_usual(protos):
    styles = {
        descriptor_pb2.DescriptorProto: PASCAL,
        descriptor_pb2.EnumDescriptorProto: PASCAL,
        descriptor_pb2.ServiceDescriptorProto: PASCAL,
        descriptor_pb2.MethodDescriptorProto: PASCAL,
        descriptor_pb2.FieldDescriptorProto: SNAKE,
        descriptor_pb2.OneofDescriptorProto: SNAKE,
        descriptor_pb2.EnumValueDescriptorProto: UPPER,
    }
    odd = [
        where
        for kind, style in styles.items()
        for where, descriptor in of_type(protos, kind)
        if not style.fullmatch(descriptor.name)
    ]
    assert not odd, odd


def test_enum_values_carry_the_enums_name(protos):
    odd = []
    for where, enum in of_type(protos, descriptor_pb2.EnumDescriptorProto):
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper() + "_"
        odd += [f"{where}.{v.name}" for v in enum.value if not v.name.startswith(prefix)]
        if enum.value[0].name != f"{prefix}UNSPECIFIED" or enum.value[0].number != 0:
            odd.append(f"{where}: the first value must be {prefix}UNSPECIFIED = 0")
        if enum.options.allow_alias:
            odd.append(f"{where}: aliases")
    assert not odd, odd


def test_every_method_has_messages_of_its_own(protos):
    used: Counter[str] = Counter()
    odd = []
    for where, service in of_type(protos, descriptor_pb2.ServiceDescriptorProto):
        for method in service.method:
            types = [t.rpartition(".")[2] for t in (method.input_type, method.output_type)]
            used.update(types)
            full_name = f"{service.name}.{method.name}"
            stems = (method.name, full_name.replace(".", ""), MESSAGES_OF.get(full_name))
            if types not in [[f"{stem}Request", f"{stem}Response"] for stem in stems]:
                odd.append(f"{where}.{method.name} uses {types}")
    odd += [f"{name} is used {count} times" for name, count in used.items() if count > 1]
    assert not odd, odd

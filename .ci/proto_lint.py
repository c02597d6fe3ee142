#!/usr/bin/env python3
"""Holds the API to its own rules: names, comments, packages, and bulk data last.

Usage: proto_lint.py DESCRIPTOR_SET     (of `protoc --include_source_info --descriptor_set_out=…`)

  * the package is the file's folder: lmhead/v1/x.proto has package lmhead.v1
  * messages, enums, services and rpcs are CamelCase, fields snake_case
  * an enum value starts with its enum's name, and the zero value is <ENUM>_UNSPECIFIED
  * rpc Foo takes FooRequest and returns FooResponse
  * every message, field, enum, enum value, service and rpc has a comment
  * a bytes field has a higher number than every field of another kind: bulk data comes last on the wire
"""

import re
import sys

from google.protobuf import descriptor_pb2

CAMEL = re.compile(r"^[A-Z][A-Za-z0-9]*$")
SNAKE = re.compile(r"^[a-z][a-z0-9]*(_[a-z0-9]+)*$")
# Field numbers of descriptor.proto, of which source paths are made.
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM = 2, 3, 4
ENUM_VALUE = SERVICE_METHOD = 2


def upper_snake(camel):
    """OptimizerKind -> OPTIMIZER_KIND; DType -> DTYPE or D_TYPE, both right."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", camel).upper()
    return {words, re.sub(r"(?<=[A-Za-z])(?=[A-Z][a-z])", "_", camel).upper()}


class Linter:
    def __init__(self, file):
        self.file = file
        self.locations = {tuple(location.path): location for location in file.source_code_info.location}
        self.errors = []

    def error(self, path, text):
        location = self.locations.get(tuple(path))
        line = location.span[0] + 1 if location else 1
        self.errors.append(f"{self.file.name}:{line}: error: {text}")

    def commented(self, path, what):
        location = self.locations.get(tuple(path))
        if location is None or not (location.leading_comments.strip() or location.trailing_comments.strip()):
            self.error(path, f"{what} has no comment, write what it means")

    def run(self):
        package = ".".join(self.file.name.split("/")[:-1])
        if self.file.package != package:
            self.error((), f"package {self.file.package}, the folder says {package}")
        for i, message in enumerate(self.file.message_type):
            self.message((FILE_MESSAGE, i), message)
        for i, enum in enumerate(self.file.enum_type):
            self.enum((FILE_ENUM, i), enum)
        for i, service in enumerate(self.file.service):
            self.service((FILE_SERVICE, i), service)
        return self.errors

    def message(self, path, message):
        if message.options.map_entry:
            return
        if not CAMEL.match(message.name):
            self.error(path, f"message {message.name} is not CamelCase")
        self.commented(path, f"message {message.name}")
        for i, field in enumerate(message.field):
            where = f"field {message.name}.{field.name}"
            if not SNAKE.match(field.name):
                self.error((*path, MESSAGE_FIELD, i), f"{where} is not snake_case")
            self.commented((*path, MESSAGE_FIELD, i), where)
        self.bulk_last(path, message)
        for i, nested in enumerate(message.nested_type):
            self.message((*path, MESSAGE_NESTED, i), nested)
        for i, enum in enumerate(message.enum_type):
            self.enum((*path, MESSAGE_ENUM, i), enum)

    def bulk_last(self, path, message):
        kinds = [(field.type == field.TYPE_BYTES, field) for field in message.field]
        highest = max((field.number for is_bytes, field in kinds if not is_bytes), default=0)
        for i, (is_bytes, field) in enumerate(kinds):
            if is_bytes and field.number < highest:
                self.error((*path, MESSAGE_FIELD, i), f"bytes field {message.name}.{field.name} has number "
                           f"{field.number}, use one above {highest}: bulk data comes last")

    def enum(self, path, enum):
        if not CAMEL.match(enum.name):
            self.error(path, f"enum {enum.name} is not CamelCase")
        self.commented(path, f"enum {enum.name}")
        prefixes = upper_snake(enum.name)
        for i, value in enumerate(enum.value):
            value_path = (*path, ENUM_VALUE, i)
            if value.number == 0:
                if value.name not in {f"{prefix}_UNSPECIFIED" for prefix in prefixes}:
                    self.error(value_path, f"zero value {value.name}, use {min(prefixes)}_UNSPECIFIED")
            elif not value.name.startswith(tuple(f"{prefix}_" for prefix in prefixes)):
                self.error(value_path, f"value {value.name} does not start with {min(prefixes)}_")
            self.commented(value_path, f"value {value.name}")

    def service(self, path, service):
        if not CAMEL.match(service.name):
            self.error(path, f"service {service.name} is not CamelCase")
        self.commented(path, f"service {service.name}")
        for i, method in enumerate(service.method):
            method_path = (*path, SERVICE_METHOD, i)
            if not CAMEL.match(method.name):
                self.error(method_path, f"rpc {method.name} is not CamelCase")
            self.commented(method_path, f"rpc {method.name}")
            for kind, got in (("Request", method.input_type), ("Response", method.output_type)):
                wanted = f".{self.file.package}.{method.name}{kind}"
                if got != wanted:
                    self.error(method_path, f"rpc {method.name} has {kind.lower()} {got}, use {wanted}")


def check(descriptor_set):
    return [error for file in descriptor_set.file for error in Linter(file).run()]


def main(path):
    descriptor_set = descriptor_pb2.FileDescriptorSet()
    with open(path, "rb") as file:
        descriptor_set.ParseFromString(file.read())
    errors = check(descriptor_set)
    print("\n".join(errors + [f"proto lint: {len(errors)} errors in {len(descriptor_set.file)} files"]))
    return 1 if errors or not descriptor_set.file else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))

"""The JSON Schema of a table, made from what `kernels.table_format` checks, so that the two cannot drift apart.

python -m kerneltune.table_schema > docs/table.schema.json
"""

from __future__ import annotations

import json
from typing import Any

from kerneltune.kernels.table_format import (
    CEILING_FIELDS,
    CLASS_PATTERN,
    DEVICE_FIELDS,
    FLAGS,
    KEYS,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_FIGURE,
    MAX_NUMBER,
    MAX_TEXT,
    MEASURED_FIELDS,
    PROVENANCE_FIELDS,
    SCHEMA,
    TEXTS,
    Fields,
)

TEXT = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
WHOLE = {"type": "integer", "minimum": 1, "exclusiveMaximum": MAX_NUMBER}
PARAMETER = {
    "anyOf": [
        TEXT,
        {"type": "boolean"},
        {"type": "integer", "exclusiveMinimum": -MAX_NUMBER, "exclusiveMaximum": MAX_NUMBER},
    ]
}
PARAMETERS = {"type": "object", "propertyNames": TEXT, "additionalProperties": PARAMETER}
LOSS = {"type": "number", "minimum": 0}
KINDS: dict[type, dict[str, Any]] = {
    int: {"type": "integer", "minimum": 0},
    float: {"type": "number", "minimum": 0},
    str: {"type": "string"},
    bool: {"type": "boolean"},
}


def make_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kerneltune table",
        "description": (
            "Tuned configs of one kernel on one device: which config serves which workload. What a schema cannot say: "
            f"a file has at most {MAX_BYTES} bytes of UTF-8 without a byte order mark, holds no name twice in one "
            "object and no character, in texts and names, that is not printable, and writes whole numbers without a "
            "point or an exponent: 64, not 64.0, which a schema takes for the same."
        ),
        "$ref": f"#/$defs/depth{MAX_DEPTH}",
        "type": "object",
        "required": ["schema", "kernel", "device", "entries"],
        "properties": {
            "schema": {"const": SCHEMA},
            "kernel": {"enum": list(KEYS)},
            "device": {
                "type": "object",
                "required": ["name", "sm_count"],
                "properties": {"name": TEXT, "sm_count": WHOLE, **_fields(DEVICE_FIELDS)},
            },
            "provenance": {"$ref": "#/$defs/provenance"},
            "entries": {"type": "array", "maxItems": MAX_ENTRIES, "items": {"$ref": "#/$defs/entry"}},
        },
        "allOf": [
            {
                "if": {"properties": {"kernel": {"const": kernel}}, "required": ["kernel"]},
                "then": {"properties": {"entries": {"items": {"properties": _of_kernel(kernel)}}}},
            }
            for kernel in KEYS
        ],
        "$defs": {
            "entry": {
                "type": "object",
                "required": ["workload", "config"],
                "properties": {
                    "workload": {"type": "object"},
                    "config": {
                        "type": "object",
                        "minProperties": 1,
                        "propertyNames": TEXT,
                        "additionalProperties": {"anyOf": [*PARAMETER["anyOf"], PARAMETERS]},
                    },
                    "measured": {
                        "type": "object",
                        "properties": {
                            name: {"anyOf": [kind, {"type": "null"}]} for name, kind in _fields(MEASURED_FIELDS).items()
                        },
                    },
                    "loss": {
                        "type": "object",
                        "properties": {"inputs": {"type": "object", "additionalProperties": LOSS}},
                        "patternProperties": {"=": LOSS},
                    },
                    "provenance": {"$ref": "#/$defs/provenance", "description": "where it is not the file's"},
                },
            },
            "provenance": {
                "type": "object",
                "description": "versions, kernel_hash (by variant), ceilings, date, command of the measurements",
                "properties": {
                    **_fields(PROVENANCE_FIELDS),
                    "kernel_hash": {"type": ["string", "object"], "additionalProperties": KINDS[str]},
                    "ceilings": {
                        "type": "object",
                        "properties": {
                            **_fields(CEILING_FIELDS),
                            "tflops": {"type": "object", "additionalProperties": KINDS[float]},
                        },
                    },
                },
            },
            **{f"depth{left}": _bounded(left) for left in range(MAX_DEPTH, -1, -1)},
        },
    }


def _fields(fields: Fields) -> dict[str, Any]:
    return {name: KINDS[kind] for name, kind in fields.items()}


def _bounded(left: int) -> dict[str, Any]:
    """A value that holds no number out of bounds and at most `left` objects or lists in one another."""
    bounds = {"exclusiveMinimum": -MAX_FIGURE, "exclusiveMaximum": MAX_FIGURE}
    if left == 0:
        return bounds | {"not": {"type": ["object", "array"]}}
    inner = {"$ref": f"#/$defs/depth{left - 1}"}
    return bounds | {"additionalProperties": inner, "items": inner}


def _of_kernel(kernel: str) -> dict[str, Any]:
    """The workload, and the names of losses, of one kernel's entries."""
    keys = KEYS[kernel]
    fields: dict[str, Any] = {}
    for name in keys.all:
        fields[name] = TEXT if name in TEXTS else {"type": "boolean"} if name in FLAGS else WHOLE
    fields[keys.input] = {"type": "string", "pattern": _whole_text(CLASS_PATTERN)}
    scaled = ",".join(f"{name}=({_below(MAX_NUMBER)})" for name in keys.scaled)
    return {
        "workload": {"properties": fields, "required": list(keys.all), "additionalProperties": False},
        "loss": {"propertyNames": {"anyOf": [{"pattern": _whole_text(scaled)}, {"not": {"pattern": "="}}]}},
    }


def _whole_text(pattern: str) -> str:
    """Anchored; the look-ahead is for engines whose "$" passes over a last line break."""
    return f"^({pattern})$(?!\\n)"


def _below(limit: int) -> str:
    """The whole numbers from 1 to below `limit`, as text."""
    digits = str(limit)
    smaller = [f"[1-9][0-9]{{0,{len(digits) - 2}}}"]
    for place, digit in enumerate(digits):  # equal before this place, less at it
        least = 1 if place == 0 else 0
        if int(digit) > least:
            smaller.append(f"{digits[:place]}[{least}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    return "|".join(smaller)


if __name__ == "__main__":
    print(json.dumps(make_schema(), indent=1))

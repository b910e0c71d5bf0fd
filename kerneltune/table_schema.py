"""The JSON Schema of a table, made from what `kernels.table_format` checks, so that the two cannot drift apart.

python -m kerneltune.table_schema > docs/table.schema.json
"""

from __future__ import annotations

import json
from typing import Any

from kerneltune.kernels.table_format import (
    CLASS_PATTERN,
    FLAGS,
    KEYS,
    MAX_BYTES,
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_NUMBER,
    MAX_TEXT,
    SCHEMA,
    TEXTS,
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


def make_schema() -> dict[str, Any]:
    """JSON Schema, draft 2020-12."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kerneltune table",
        "description": (
            "Tuned configs of one kernel on one device: which config serves which workload. What a schema cannot say: "
            f"a file has at most {MAX_BYTES} bytes of UTF-8, is nested at most {MAX_DEPTH} deep, holds no name twice "
            "in one object, no text that is not printable, and no number that is not finite."
        ),
        "type": "object",
        "required": ["schema", "kernel", "device", "entries"],
        "properties": {
            "schema": {"const": SCHEMA},
            "kernel": {"enum": list(KEYS)},
            "device": {
                "type": "object",
                "required": ["name", "sm_count"],
                "properties": {"name": TEXT, "sm_count": WHOLE},
            },
            "provenance": {
                "type": "object",
                "description": "versions, kernel_hash (by variant), ceilings, date, command of the measurements",
            },
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
                    "measured": {"type": "object"},
                    "loss": {
                        "type": "object",
                        "properties": {"inputs": {"type": "object", "additionalProperties": {"type": "number"}}},
                        "patternProperties": {"=": {"type": "number"}},
                    },
                    "provenance": {"type": "object", "description": "where it is not the file's"},
                },
            }
        },
    }


def _of_kernel(kernel: str) -> dict[str, Any]:
    """The workload, and the names of losses, of one kernel's entries."""
    keys = KEYS[kernel]
    fields: dict[str, Any] = {}
    for name in keys.all:
        fields[name] = TEXT if name in TEXTS else {"type": "boolean"} if name in FLAGS else WHOLE
    fields[keys.input] = {"type": "string", "pattern": f"^({CLASS_PATTERN})$"}
    scaled = ",".join(f"{name}=[1-9][0-9]*" for name in keys.scaled)
    return {
        "workload": {"properties": fields, "required": list(keys.all), "additionalProperties": False},
        "loss": {"propertyNames": {"anyOf": [{"pattern": f"^{scaled}$"}, {"not": {"pattern": "="}}]}},
    }


if __name__ == "__main__":
    print(json.dumps(make_schema(), indent=1))

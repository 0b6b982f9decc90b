"""The published JSON schemas, generated from the models so that they cannot drift.

`python -m conformance.schema` writes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from conformance.combinations import Combinations
from conformance.diff import Diff
from conformance.gate import Policy
from conformance.known import KnownIssues
from conformance.matrix import Matrix
from conformance.results import line_adapter

DIRECTORY = Path(__file__).resolve().parent


def texts() -> dict[str, str]:
    """File name -> text of each schema. The results schema describes one line of `results.jsonl`."""
    schemas: dict[str, dict[str, Any]] = {
        "matrix.schema.json": Matrix.model_json_schema(),
        "known_issues.schema.json": KnownIssues.model_json_schema(),
        "results.schema.json": _with_kind(line_adapter().json_schema()),
        "diff.schema.json": TypeAdapter(Diff).json_schema(mode="serialization"),
        "policy.schema.json": Policy.model_json_schema(),
        "combinations.schema.json": Combinations.model_json_schema(),
    }
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {
        name: json.dumps(head | schema, indent=2, sort_keys=True, ensure_ascii=False) + "\n" for name, schema in schemas.items()
    }


def _with_kind(schema: dict[str, Any]) -> dict[str, Any]:
    """A line must say its kind: the dataclasses have it by default, a file has not."""
    for definition in schema["$defs"].values():
        if "kind" in definition.get("properties", {}):
            definition["required"] = [*definition.get("required", []), "kind"]
    return schema

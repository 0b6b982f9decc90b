"""How to write a row's overrides, ready to paste: what the matrix alone knows."""

from __future__ import annotations

import shlex

from conformance.matrix import ROLES, Role, Row


def explanation(row: Row) -> list[str]:
    """Lines for a terminal."""
    lines = [f"{row.id}: {row.title.en} ({row.name}, {row.title.zh})", f"implemented by {row.implemented_by}, {row.status}"]
    if row.topology.sizes():
        lines.append("needs " + ", ".join(f"{k}={v}" for k, v in row.topology.sizes().items()))
    if row.note:
        lines.append(row.note.en)
    for variant in row.variant_names:
        note = row.spelling(variant).note
        lines.append("")
        lines.append(("as documented:" if variant == "documented" else f"variant {variant}:") + (f" {note.en}" if note else ""))
        for role in ROLES:
            own, inherited = role_overrides(row, variant, role)
            lines.append(f"  {role}:" + (" inherits the actor's" if inherited else ""))
            lines += " \\\n".join(f"    {shlex.quote(text)}" for text in own).splitlines()
    return [*lines, "", *HINTS]


#: How to write keys of the open mapping, whatever the row.
HINTS = (
    "'++' writes a key of override_transformer_config whether verl's YAML has it or not; '+' fails for the ones it has.",
    "Do not write '+' or '++' under ref's override_transformer_config: it replaces what ref inherits from the actor.",
)


def role_overrides(row: Row, variant: str, role: Role) -> tuple[list[str], bool]:
    """The overrides that the role's own keys need, and whether it inherits the actor's instead. Not quoted for a shell."""
    everything = row.overrides(variant, "on")
    own = [text for text in everything if f"actor_rollout_ref.{role}." in text]
    settings = [s for s in row.spelling(variant).settings if s.key.startswith(f"actor_rollout_ref.{role}.")]
    if role == "ref" and not settings:
        return list(everything), True
    return own, False

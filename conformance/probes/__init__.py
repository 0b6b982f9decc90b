"""Probes: what ran in a rank during the step, as a flat mapping `fact name -> number or text`.

A fact is named by family and detail, e.g. `collectives.tp.all_reduce` or `modules.megatron.core...TEGroupedMLP`; the families
are those that `matrix.yaml` may name as evidence. Probes only look: none changes what the stack computes.
"""

from __future__ import annotations

Fact = float | str
Facts = dict[str, Fact]

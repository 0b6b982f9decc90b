"""The documentation's page on the operators of namespace `npu`: which are emulated, what checks them, what differs by version."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.npu.vendor import VendorFacts, emulated_schemas, emulated_version
from conformance.operators import Family
from conformance.report.markdown import code, escape, table
from conformance.report.row_page import WRITTEN

#: Operator -> the families that call it, forward or backward. The tests look what is called and compare.
CALLED_BY: dict[str, tuple[Family, ...]] = {
    "npu_rms_norm": ("rms_norm",),
    "npu_rms_norm_backward": ("rms_norm",),
    "npu_swiglu": ("swiglu",),
    "npu_swiglu_backward": ("swiglu",),
    "npu_fusion_attention": ("fusion_attention", "fusion_attention_backward"),
    "npu_fusion_attention_grad": ("fusion_attention_backward",),
    "npu_grouped_matmul": ("grouped_matmul",),
    "npu_grouped_matmul.List": ("grouped_matmul",),
    "npu_moe_token_permute": ("moe_permute",),
    "npu_moe_token_permute_grad": ("moe_permute",),
    "npu_moe_token_unpermute": ("moe_permute", "moe_unpermute"),
    "npu_moe_token_unpermute_grad": ("moe_unpermute",),
    "npu_moe_token_permute_with_routing_map": ("moe_permute",),
    "npu_moe_token_permute_with_routing_map_grad": ("moe_permute",),
    "npu_moe_token_unpermute_with_routing_map": ("moe_permute", "moe_unpermute"),
    "_npu_moe_token_unpermute_with_routing_map": ("moe_permute", "moe_unpermute"),
    "npu_moe_token_unpermute_with_routing_map_grad": ("moe_unpermute",),
    "npu_rotary_mul": ("rotary",),
    "npu_rotary_mul_backward": ("rotary",),
    "npu_all_gather_base_mm": ("all_gather_matmul",),
    "npu_mm_reduce_scatter_base": ("matmul_reduce_scatter",),
    "npu_mm_all_reduce_base": ("matmul_all_reduce",),
    "npu_apply_adam_w.out": ("fused_adamw",),
}
#: Operators that no family calls -> the file whose tests call them.
TESTED_IN = {
    "npu_scaled_masked_softmax": "tests/test_npu_ops_elementwise.py",
    "npu_scaled_masked_softmax_backward": "tests/test_npu_ops_elementwise.py",
    "npu_apply_adam_w": "tests/test_npu_ops_matmul.py",
    "empty_with_swapped_memory": "tests/test_npu_ops_elementwise.py",
    "npu_dtype_cast": "tests/test_npu_ops_elementwise.py",
    "npu_dtype_cast_backward": "tests/test_npu_ops_elementwise.py",
    "npu_format_cast": "tests/test_npu_ops_elementwise.py",
    "get_npu_format": "tests/test_npu_ops_elementwise.py",
}

_ABOUT = """\
The emulation registers its operators under the schemas of torch_npu {emulated}: the dispatcher then takes and refuses the
same arguments as on hardware. The schemas were read out of the library in torch_npu's wheels, of {versions}.
What is read is kept in `conformance/npu/vendor_schemas.json`; tests compare every argument, default and return with what is
registered.

To read the wheels again: `python -m conformance.npu.schemas fetch`, then `python -m conformance.npu.schemas write`. With the
wheels in the cache the tests also run their meta registrations and compare outputs' shapes and dtypes with the emulation's."""

_TABLE = """\
Checked by: the family of `pytest conformance/test_operators.py` whose generated cases call the operator, or the file of tests.
Under a version: `=` its schema is the emulated one; `≠` it has another; `–` it has no such operator."""

_WIDER = """\
What the vendor's documentation forbids, the emulation refuses by name. It takes more than hardware only here; no generated case
makes use of it.

- `npu_all_gather_base_mm`, `npu_mm_reduce_scatter_base` and `npu_mm_all_reduce_base` take float32; hardware takes float16,
  bfloat16 and int8. The first two take a contraction below 256; hardware takes 256 and more. The suite's models are tiny, and
  float32 is the precision that finds faults. One place in `ops/mc2.py` has it.
- Attention, norms, SwiGLU, rotary embedding, MoE permutation, grouped products and AdamW take float64, which hardware does not
  have: the tests compare with formulas to twelve digits."""

_REST = """\
torch_npu has many more operators. One that is not in the table above is refused by name. A family is the first word of the
name."""


def operators_page(facts: VendorFacts) -> str:
    """The whole page."""
    versions = list(facts.declared)
    about = _ABOUT.format(emulated=emulated_version(), versions=f"{', '.join(versions[:-1])} and {versions[-1]}")
    blocks = [WRITTEN, "# The operators of the NPU", about, "## Emulated", _TABLE, *_emulated(facts, versions)]
    wider = ["## Wider than hardware", _WIDER]
    return "\n\n".join([*blocks, *wider, *_differences(facts), *_others(facts)]) + "\n"


def _emulated(facts: VendorFacts, versions: list[str]) -> Iterator[str]:
    schemas = {version: facts.of(version) for version in versions}

    def sign(op: str, version: str) -> str:
        if op not in schemas[version]:
            return "–"
        return "≠" if op in facts.differences[version] else "="

    lines = [[code(op), _checked_by(op), *(sign(op, version) for version in versions)] for op in emulated_schemas()]
    yield table(["operator", "checked by", *versions], lines)


def _checked_by(op: str) -> str:
    return ", ".join(code(name) for name in CALLED_BY.get(op, ())) or code(TESTED_IN[op])


def _differences(facts: VendorFacts) -> Iterator[str]:
    yield "## Where a version differs"
    yield f"What the version has otherwise than {emulated_version()}."
    lines = [
        [v, code(op), escape("; ".join(found), limit=2000)] for v, ops in facts.differences.items() for op, found in ops.items()
    ]
    yield table(["torch_npu", "operator", "difference"], lines)


def _others(facts: VendorFacts) -> Iterator[str]:
    yield "## Not emulated"
    yield _REST
    lines = []
    for version, families in facts.others.items():
        count = sum(families.values())
        named = ", ".join(f"{word} {number}" for word, number in families.items())
        lines.append([version, str(facts.declared[version]), str(facts.declared[version] - count), str(count), named])
    yield table(["torch_npu", "operators", "emulated", "not emulated", "families of the latter"], lines)

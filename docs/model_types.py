"""Write the tables in ``docs/models.md``: ``python docs/model_types.py``, after every change of the lists of types."""

from __future__ import annotations

from pathlib import Path

from options import page_with

from fused_kv_llm.model.families import FAMILIES, REFUSED

PAGE = Path(__file__).with_name("models.md")
BEGIN = "<!-- made by docs/model_types.py -->"


def table() -> str:
    """Return the tables of supported and of refused types in Markdown."""
    rows = ["| models with | for example | `model_type` |", "|---|---|---|"]
    for family in FAMILIES:
        types = ", ".join(f"`{name}`" for name in sorted(family.types))
        rows.append(f"| {family.name} | {family.examples} | {types} |")
    rows += ["", "Refused are:", "", "| `model_type` | because |", "|---|---|"]
    for reason in dict.fromkeys(REFUSED.values()):
        types = ", ".join(f"`{name}`" for name in sorted(REFUSED) if REFUSED[name] == reason)
        rows.append(f"| {types} | {reason} |")
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page_with(table(), PAGE.read_text(encoding="utf-8"), BEGIN), encoding="utf-8")

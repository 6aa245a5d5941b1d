"""Write the reference of every config key, from the schema, into configs/README.md.

python tools/config_reference.py            print it
python tools/config_reference.py --write    replace what stands between the two markers
python tools/config_reference.py --check    exit with status 1 where the page is out of date
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml

from allattn.config.checks import ONLY_FOR
from allattn.config.keys import Key, Range, documentation
from allattn.config.schema import Config
from allattn.config.stages import PruneConfig

PAGE = Path(__file__).resolve().parents[1] / "configs" / "README.md"
BEGIN = "<!-- reference: written by tools/config_reference.py from the schema; do not edit -->"
END = "<!-- end of the reference -->"
HEADER = (
    "| key | type | unit | default | allowed | meaning |\n| --- | --- | --- | --- | --- | --- |"
)
DOCUMENT_END = "...\n"  # YAML puts it after a bare value
TYPES = {"int": "whole number", "float": "number", "bool": "true or false", "str": "text"}


def sections(section: Any = Config, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and the dataclass of every section, in the order of the schema."""
    yield path, section
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        inside = _section_of(hints[field.name])
        if inside is not None:
            many = "[i]" if "list[" in str(field.type) else ""
            yield from sections(inside, f"{path}.{field.name}{many}".lstrip("."))


def keys(section: Any) -> Iterator[dataclasses.Field[Any]]:
    """Yield the fields of a section that are values, not sections of their own."""
    hints = get_type_hints(section)
    for field in dataclasses.fields(section):
        if _section_of(hints[field.name]) is None:
            yield field


def _section_of(hint: Any) -> Any:
    """Return the dataclass in a type such as `PruneConfig | None` or `list[StageConfig]`."""
    return next((t for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)), None)


def reference() -> str:
    """Return the whole reference as Markdown."""
    parts = []
    for path, section in sorted(sections(), key=lambda found: found[0] == ""):  # the top level last
        fields = list(keys(section))
        if not fields:
            continue
        title = (
            f"### `{path}`\n\n{_plain(section.__doc__)}\n\n"
            if path
            else "### keys without a section\n\n"
        )
        rows = [_row(path, field, section) for field in fields]
        parts.append("\n".join([title + HEADER, *rows]))
    return "\n\n".join(parts)


def _plain(text: str | None) -> str:
    """Return a docstring as paragraphs without the indentation of the source."""
    return re.sub(r"\n +", "\n", text or "").strip()


def _row(path: str, field: dataclasses.Field[Any], section: Any) -> str:
    found = documentation(field)
    if found is None:
        raise SystemExit(f"config_reference: error: {path}.{field.name}: has no documentation")
    meaning = found.meaning
    if section is PruneConfig and field.name in ONLY_FOR:
        meaning += f" Only for {', '.join(f'`{m}`' for m in ONLY_FOR[field.name])}."
    cells = [f"`{field.name}`", _type(field, found), found.unit or "–", _default(field),
             _allowed(field, found), meaning]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def _type(field: dataclasses.Field[Any], found: Key) -> str:
    """Return the annotation in words."""
    if found.type:
        return found.type
    kind = str(field.type).removesuffix(" | None")
    optional = ", or null" if kind != str(field.type) else ""
    if kind.startswith("list["):
        return f"list of {TYPES[kind[5:-1]]}s{optional}"
    return TYPES.get(kind, "mapping") + optional


def _default(field: dataclasses.Field[Any]) -> str:
    """Return the default as it would stand in a config."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if isinstance(value, float):  # YAML reads 1e-08 as text, but a config's types make it a number
        return f"`{value:g}`"
    return f"`{yaml.safe_dump(value, default_flow_style=True).removesuffix(DOCUMENT_END).strip()}`"


def _allowed(field: dataclasses.Field[Any], found: Key) -> str:
    """Return the allowed values, in words or as a list of choices."""
    if isinstance(found.allowed, Range):
        return found.allowed.words()
    if isinstance(found.allowed, tuple):
        return ", ".join(f"`{choice}`" for choice in found.allowed)
    return found.allowed or ("`true`, `false`" if field.type == "bool" else "any")


def filled(page: str) -> str:
    """Return a page with the reference between its two markers.

    Raises:
        ValueError: the page does not have both markers, in this order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE}: the lines {BEGIN} and {END} are missing; put them back")
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="replace the reference in the page")
    what.add_argument("--check", action="store_true", help="only say whether it is up to date")
    args = parser.parse_args(argv)
    if not (args.write or args.check):
        print(reference())
        return 0
    try:
        old = PAGE.read_text(encoding="utf-8")
        new = filled(old)
        if args.write:
            PAGE.write_text(new, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"config_reference: error: {error}", file=sys.stderr)
        return 1
    if args.check and new != old:
        print(f"config_reference: {PAGE} is out of date; run this again with --write")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""YAML as a human would lay it out: keys in their order, long texts as blocks."""

from collections.abc import Mapping
from typing import Any

import yaml

NOTICE = "# Made by `goodput-agent render`; what is changed here is lost the next time.\n"


class _Dumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as blocks, and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always: a reader should find each value where it counts."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(document: Mapping[str, Any], *remarks: str) -> str:
    """The document with a notice that it was generated, and these remarks as comments."""
    comments = "".join(f"# {remark}\n" for remark in remarks)
    body = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True, indent=2
    )
    return NOTICE + comments + body

"""YAML for readers: keys in the given order, texts of several lines as blocks."""

from collections.abc import Mapping
from typing import Any

import yaml

NOTICE = "# Made by `goodput-agent render`, which overwrites changes.\n"


class _Dumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as blocks, without aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always true: each value is written in full."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def yaml_text(document: Mapping[str, Any], *remarks: str) -> str:
    """The document after comments: that it is generated, and these remarks."""
    comments = "".join(f"# {remark}\n" for remark in remarks)
    body = yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=1000, allow_unicode=True, indent=2
    )
    return NOTICE + comments + body

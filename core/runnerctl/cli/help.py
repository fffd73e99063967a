"""Help texts in sections. Plain text: whole flag names on 80 columns, and quick to make."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_COLUMN = 26  # where the descriptions start; longer flags get a line of their own


class SectionedCommand(TyperCommand):
    """A command whose options are listed by the panel they were declared with."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the command's own options, then each panel in turn."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is None:
                continue
            is_argument = param.param_type_name == "argument"
            panel = getattr(param, "rich_help_panel", None)
            if is_argument:
                record = (param.metavar or param.name, record[1])
            title = "Arguments" if is_argument else panel or "Options"
            sections.setdefault(title, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records, col_max=_COLUMN)

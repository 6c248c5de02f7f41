"""What the commands print on a terminal, at two widths."""

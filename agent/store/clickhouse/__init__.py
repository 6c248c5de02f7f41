"""The shared database of large fleets: ClickHouse, to which agents publish their files."""

"""The shared database of large fleets: ClickHouse, which agents forward their journals to."""

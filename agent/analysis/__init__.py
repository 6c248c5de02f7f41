"""Pure computations on records: no I/O, no clock."""

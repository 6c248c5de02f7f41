"""The journal: an agent's own SQLite file, whose changes are forwarded to the shared database."""

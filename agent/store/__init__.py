"""Stores everything in SQL: SQLite or PostgreSQL."""

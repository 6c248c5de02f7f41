"""The audit of a live deployment: one small function for each check."""

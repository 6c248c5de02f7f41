"""What the agent measures and knows, declared once as data."""

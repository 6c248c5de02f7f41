"""Reading the engines' own metrics pages."""

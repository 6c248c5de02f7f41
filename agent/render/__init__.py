"""Rules and other texts made from the catalogue and the objectives: data in, text out."""

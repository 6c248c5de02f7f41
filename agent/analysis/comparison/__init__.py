"""Is it better than before? Two runs, line by line, with the evidence for each verdict."""

"""Alert rules and dashboards, made from the catalogue and the objectives: data in, text out."""

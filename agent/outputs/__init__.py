"""Everything that the agent exposes or sends: metrics, the API, the page, forwarded spans."""
